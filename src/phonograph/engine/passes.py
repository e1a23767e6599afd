"""The forward passes of the engine as phases of the graph layer: decode, prefill and idle."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from phonograph.devices import Device
from phonograph.engine.attention.base import Attention, PagedCache, Queries, StepAttention
from phonograph.engine.batches import DecodeBatch, PrefillBatch, Wants
from phonograph.engine.constraints import MaskTable
from phonograph.engine.limits import Limits
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.penalties import PenaltyTables
from phonograph.engine.readback import Picked
from phonograph.engine.request import MAX_LOGPROBS
from phonograph.engine.sampler import Sampler, Sampling, few_threads, penalise
from phonograph.engine.tables import RequestTables, allocating
from phonograph.engine.trials import Trials
from phonograph.graphs.breaks import graph_break
from phonograph.graphs.context import Stage, current
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.phase import Phase, Variant
from phonograph.graphs.slots import Pad, Slot

SAMPLED = Wants(Sampling.TRUNCATED)
_ROWS = 32
DETAILED = Wants(Sampling.PENALISED, logprobs=True, constrained=True)


class _SpanAttention:
    """Attention as a break: between two graphs it sees the sequences of the live batch."""

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.name = inner.name
        self._prepared: tuple[object, StepAttention] | None = None

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        if current().breaker is None:
            return self._inner.prepare(cache, queries, num_heads)
        return _BrokenAttention(self, cache, queries)

    def prepared(
        self, cache: PagedCache, rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, num_heads: int
    ) -> StepAttention:
        """For the step that is replayed; its first gap prepares for all of them."""
        batch = current().batch
        if self._prepared is None or self._prepared[0] is not batch:
            queries = Queries(rows, positions, table, one_per_sequence=False, spans=batch.spans)
            self._prepared = batch, self._inner.prepare(cache, queries, num_heads)
        return self._prepared[1]


@dataclass(frozen=True)
class _BrokenAttention:
    """Attends in gaps, by what was prepared for the live batch."""

    outer: _SpanAttention
    cache: PagedCache
    queries: Queries

    def attend(self, layer: int, q: torch.Tensor, window: int | None, out: torch.Tensor | None = None) -> torch.Tensor:
        # Made by the graph before the gap, for the one behind it: nothing is copied between them.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        return self._attend(layer, self.queries.rows, self.queries.positions, self.queries.table, q, window, out)

    @graph_break
    def _attend(
        self,
        layer: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return self.outer.prepared(self.cache, rows, positions, table, q.shape[1]).attend(layer, q, window, out)


class Passes:
    """The bodies: they gather from the request tables, run the model, pick tokens, and note them in the tables."""

    def __init__(self, model: Decoder, sampler: Sampler, device: Device, limits: Limits, cache: PagedCache) -> None:
        self.limits = limits
        self.cache = cache
        self.vocab = model.config.vocab
        with self._allocating("request tables"):
            self.tables = RequestTables(device, limits.max_seqs, -(-limits.max_len // limits.page_size))
        self._device = device
        self._decoder = model
        self._sampler = sampler
        self._prefiller = Decoder(
            model.config,
            model.weights,
            _SpanAttention(model.attention),
            model.kernels,
            limits.max_len,
            model.residual,
        )

    @cached_property
    def penalties(self) -> PenaltyTables:
        """As wide as the vocabulary: made when recordings need them, or for the first request that asks."""
        with self._allocating("penalty tables"):
            return PenaltyTables(self.limits.max_seqs, self.vocab, self._device.torch_device)

    @cached_property
    def masks(self) -> MaskTable:
        """As wide as the vocabulary, in bits."""
        with self._allocating("grammar masks"):
            return MaskTable(self.limits.max_seqs, self.vocab, self._device.torch_device)

    def _allocating(self, what: str) -> AbstractContextManager[None]:
        return allocating(f"{what} for {self.limits.max_seqs:,} sequences", "Lower max_seqs.")

    @property
    def has_penalties(self) -> bool:
        return "penalties" in self.__dict__

    # -- phases -------------------------------------------------------------------------------------------

    def phases(self, backends: Mapping[str, str]) -> dict[str, Phase]:
        """Every phase by name, for the backends that they will have."""
        wide = (*self.penalties.tensors, self.masks.words) if backends["decode"] != "disabled" else ()
        broken = backends["prefill"] == "breakable"
        trials = Trials(self.tables, self.cache, self.limits, self.vocab, others=wide, spans=broken)
        phases = self._decode_phase(trials), self._prefill_phase(trials), self._idle_phase()
        return {phase.name: phase for phase in phases}

    def _decode_phase(self, trials: Trials) -> Phase:
        def is_sampled(batch: DecodeBatch) -> bool:
            return batch.wants.level > Sampling.GREEDY and not batch.wants.is_detailed

        def is_detailed(batch: DecodeBatch) -> bool:
            return batch.wants.is_detailed

        return Phase(
            name="decode",
            slots=[Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0), valid=(0, self.limits.max_seqs))],
            bucketed="seqs",
            body=self._decode,
            sample=trials.decode_sampler(Wants()),
            # Each does all that those before it do: plain temperature runs where truncation is recorded.
            variants=[
                Variant("sampled", is_sampled, trials.decode_sampler(SAMPLED)),
                Variant("detailed", is_detailed, trials.decode_sampler(DETAILED)),
            ],
            preserve=trials.running,
        )

    def _prefill_phase(self, trials: Trials) -> Phase:
        limits = self.limits
        return Phase(
            name="prefill",
            slots=[
                Slot("tokens", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, self.vocab - 1)),
                Slot("rows", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_seqs)),
                Slot("positions", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_len - 1)),
                Slot("decoding", ("tokens",), torch.bool, pad=Pad.fill(False)),
                Slot("ends", ("sampled",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_tokens - 1)),
            ],
            bucketed="tokens",
            dims=[Dim("sampled", limit=limits.max_seqs)],
            body=self._prefill,
            tail=self._prefill_tail,
            sample=trials.prefill_sample,
            preserve=trials.running,
        )

    def _idle_phase(self) -> Phase:
        """A pass for nobody, over the null row: it shows that the device answers."""
        return Phase(
            name="idle",
            slots=[Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0), valid=(0, 0))],
            bucketed="seqs",
            body=self._decode,
            sample=_nobody,
            preserve=_nothing_to_keep,
        )

    # -- bodies -------------------------------------------------------------------------------------------

    def _decode(self, batch: DecodeBatch) -> Picked:
        tables, pages = self.tables, self.tables.pages[:, : batch.width]
        queries = Queries(batch.rows, tables.length, pages, one_per_sequence=True, by_row=True)
        hidden = self._decoder.hidden(tables.last_token, queries, self.cache)
        return self._next_tokens(self._decoder.logits(hidden), queries, batch.wants)

    def _prefill(self, batch: PrefillBatch) -> torch.Tensor:
        tables, rows = self.tables, batch.rows
        tokens = torch.where(batch.decoding, tables.last_token[rows], batch.tokens)
        # A recording may not look at the host's spans; an eager pass is faster with them.
        spans = batch.spans if current().stage is Stage.EAGER else None
        queries = Queries(rows, batch.positions, tables.pages[:, : batch.width], False, spans)
        return self._prefiller.hidden(tokens, queries, self.cache, wanted=batch.ends)

    def _prefill_tail(self, hidden: torch.Tensor, batch: PrefillBatch) -> Picked:
        ends = batch.ends
        queries = Queries(batch.rows[ends], batch.positions[ends], self.tables.pages, one_per_sequence=True)
        # A graph whose places for them never change in number puts out all of them.
        logits = self._prefiller.logits(hidden[: ends.shape[0]])
        return self._next_tokens(logits, queries, batch.wants)

    def _next_tokens(self, logits: torch.Tensor, queries: Queries, wants: Wants) -> Picked:
        """Pick the token behind every query and note it in the tables."""
        if wants.constrained or wants.level is Sampling.PENALISED:
            # Some rows at a time: what is computed on the way is as wide as the vocabulary, many times over.
            parts = [slice(start, start + _ROWS) for start in range(0, logits.shape[0], _ROWS)]
            tokens = torch.cat([self._pick(logits, queries, part, wants) for part in parts])
        else:
            tokens = self._pick(logits, queries, slice(None), wants)
        logprobs = self._sampler.logprobs(logits, tokens, MAX_LOGPROBS) if wants.logprobs else None
        # Last, once everything that may fail is done: a step that raised is run again on the state that it found.
        if wants.level is Sampling.PENALISED:
            self.penalties.count(queries.rows, tokens)
        self._decoder.kernels.advance(queries, tokens, self.tables.last_token, self.tables.length)
        return Picked(tokens, logprobs)

    def _pick(self, logits: torch.Tensor, queries: Queries, part: slice, wants: Wants) -> torch.Tensor:
        """The tokens of some of the queries."""
        logits, rows = logits[part], queries.rows[part]
        with few_threads(logits):
            if wants.level is Sampling.PENALISED:
                logits = penalise(logits.float(), self.penalties.rows(rows))
            if wants.constrained:
                logits = self.masks.apply(logits, rows)
        is_drawn = wants.level > Sampling.GREEDY
        sampling = self.tables.sampling(rows, queries.token_positions[part] + 1) if is_drawn else None
        return self._sampler.pick(logits, sampling, wants.level)


def _nobody(extent: Extent, seed: int) -> DecodeBatch:
    return DecodeBatch(np.zeros(extent.used["seqs"], dtype=np.int64), 1, Wants())


def _nothing_to_keep(batch: Any) -> AbstractContextManager[None]:
    """The null row and page are nobody's."""
    return nullcontext()
