"""The forward passes of the engine as phases of the graph layer: decode, prefill and idle."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phonograph.devices import Device
from phonograph.engine.attention.base import Queries
from phonograph.engine.attention.gaps import GapAttention
from phonograph.engine.batches import DecodeBatch, PrefillBatch, Wants
from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.limits import Limits
from phonograph.engine.models.interface import Model
from phonograph.engine.penalties import Penalties, count_tokens, penalise
from phonograph.engine.readback import Picked
from phonograph.engine.request import MAX_LOGPROBS
from phonograph.engine.sampler import Sampler, Sampling, few_threads
from phonograph.engine.sampling.masks import mask
from phonograph.engine.state.column import TableSizes
from phonograph.engine.state.columns import MASKS, PENALTIES, PLACE
from phonograph.engine.state.tables import RequestTables
from phonograph.engine.trials import Trials
from phonograph.graphs.axes import Axis
from phonograph.graphs.context import Stage, current
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.phase import Phase
from phonograph.graphs.slots import Pad, Slot

_ROWS = 32
_SAMPLING = {
    "greedy": Wants(),
    "sampled": Wants(Sampling.TRUNCATED),
    "detailed": Wants(Sampling.PENALISED, logprobs=True, constrained=True),
}
"""What each value of decode's axis records. Each does all that those before it do: plain temperature runs where
truncation is recorded."""


class Passes:
    """The bodies: they gather from the request tables, run the model, pick tokens, and note them in the tables."""

    def __init__(self, model: Model, sampler: Sampler, device: Device, limits: Limits, cache: CacheGroup) -> None:
        self.limits = limits
        self.cache = cache
        self.vocab = model.config.vocab
        sizes = TableSizes(limits.max_seqs, self.vocab, -(-limits.num_positions // limits.page_size))
        self.tables = RequestTables(device, (*PLACE, *sampler.columns, *PENALTIES, *MASKS), sizes)
        self._decoder = model
        self._sampler = sampler
        self._prefiller = model.with_attention(GapAttention(model.attention))

    # -- phases -------------------------------------------------------------------------------------------

    def phases(self, backends: Mapping[str, str]) -> dict[str, Phase]:
        """Every phase by name, for the backends that they will have."""
        if backends["decode"] != "disabled":
            self.tables.make_all()
        broken = backends["prefill"] == "breakable"
        trials = Trials(self.tables, self.cache, self.limits, self.vocab, spans=broken)
        phases = self._decode_phase(trials), self._prefill_phase(trials), self._idle_phase()
        return {phase.name: phase for phase in phases}

    def _decode_phase(self, trials: Trials) -> Phase:
        return Phase(
            name="decode",
            slots=[Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0), valid=(0, self.limits.max_seqs))],
            bucketed="seqs",
            body=self._decode,
            sample=trials.decode_sampler(Wants()),
            axes=[Axis("sampling", tuple(_SAMPLING), of=_sampling_of, apply=_with_sampling)],
            preserve=trials.running,
        )

    def _prefill_phase(self, trials: Trials) -> Phase:
        limits = self.limits
        return Phase(
            name="prefill",
            slots=[
                Slot("tokens", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, self.vocab - 1)),
                Slot("rows", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_seqs)),
                Slot("positions", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, limits.num_positions - 1)),
                Slot("decoding", ("tokens",), torch.bool, pad=Pad.fill(False)),
                Slot("ends", ("sampled",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_tokens - 1)),
            ],
            bucketed="tokens",
            dims=[Dim("sampled", limit=limits.max_seqs * limits.tokens_per_row)],
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
        queries = Queries(batch.rows, tables.length, pages, tokens_per_row=1, by_row=True)
        hidden = self._decoder.hidden(tables.last_token, queries, self.cache)
        return self._next_tokens(self._decoder.logits(hidden.states), queries, batch.wants)

    def _prefill(self, batch: PrefillBatch) -> torch.Tensor:
        tables, rows = self.tables, batch.rows
        tokens = torch.where(batch.decoding, tables.last_token[rows], batch.tokens)
        # A recording may not look at the host's spans; an eager pass is faster with them.
        spans = batch.spans if current().stage is Stage.EAGER else None
        queries = Queries(rows, batch.positions, tables.pages[:, : batch.width], None, spans)
        return self._prefiller.hidden(tokens, queries, self.cache, wanted=batch.ends).states

    def _prefill_tail(self, hidden: torch.Tensor, batch: PrefillBatch) -> Picked:
        ends = batch.ends
        queries = Queries(batch.rows[ends], batch.positions[ends], self.tables.pages, tokens_per_row=1)
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
            count_tokens(self.tables["counts"], queries.rows, tokens)
        self._decoder.kernels.write_next_token(queries, tokens, None, self.tables.last_token, self.tables.length)
        return Picked(tokens, logprobs)

    def _pick(self, logits: torch.Tensor, queries: Queries, part: slice, wants: Wants) -> torch.Tensor:
        """The tokens of some of the queries."""
        logits, rows = logits[part], queries.rows[part]
        with few_threads(logits):
            if wants.level is Sampling.PENALISED:
                logits = penalise(logits.float(), self.tables.gather(Penalties, rows))
            if wants.constrained:
                logits = mask(logits, self.tables["allowed"][rows])
        sampling = None
        if wants.level > Sampling.GREEDY:
            positions = queries.token_positions[part] + 1
            sampling = self.tables.gather(self._sampler.rows, rows, positions=positions)
        return self._sampler.pick(logits, sampling, wants.level)


def _sampling_of(batch: DecodeBatch) -> str:
    if batch.wants.is_detailed:
        return "detailed"
    return "sampled" if batch.wants.level > Sampling.GREEDY else "greedy"


def _with_sampling(batch: DecodeBatch, value: str) -> DecodeBatch:
    return replace(batch, wants=_SAMPLING[value])


def _nobody(extent: Extent, seed: int) -> DecodeBatch:
    return DecodeBatch(np.zeros(extent.used["seqs"], dtype=np.int64), 1, Wants())


def _nothing_to_keep(batch: Any) -> AbstractContextManager[None]:
    """The null row and page are nobody's."""
    return nullcontext()
