"""Runs the steps that the scheduler plans: every forward pass goes through a runner of the graph layer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from phonograph.devices import Device
from phonograph.engine.attention.base import Attention, PagedCache, Queries, Span, StepAttention
from phonograph.engine.limits import Limits
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.penalties import PenaltyTables, is_penalised
from phonograph.engine.request import SamplingParams
from phonograph.engine.sampler import Sampling, penalise, pick
from phonograph.engine.step import Step
from phonograph.engine.tables import RequestTables, TableUpdates
from phonograph.graphs.breaks import graph_break
from phonograph.graphs.capture import CaptureReport
from phonograph.graphs.context import Stage, current
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.phase import Phase, Variant
from phonograph.graphs.pool import BufferPool
from phonograph.graphs.progress import Progress
from phonograph.graphs.resolve import PhasePlan, Plan
from phonograph.graphs.runner import Runner, RunnerOptions
from phonograph.graphs.slots import Pad, Slot


@dataclass(frozen=True)
class DecodeBatch:
    """One token for each of these rows; everything else is in the tables."""

    rows: Any
    width: int
    """Pages that the longest sequence has; a recording looks at all that a row can have."""
    level: Sampling


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt chunks and, among them, rows that decode: their token comes from the tables."""

    tokens: Any
    rows: Any
    positions: Any
    decoding: Any
    ends: Any
    """Index of the last token of every sequence that samples."""
    width: int
    level: Sampling
    spans: tuple[Span, ...] | None


@dataclass(frozen=True)
class Launched:
    """A step on its way; its tokens are on the device until somebody asks."""

    step: Step
    tokens: torch.Tensor

    def result(self) -> list[int]:
        """The sampled tokens, in the order of `step.sampling`; waits for the device."""
        found: list[int] = self.tokens.tolist()
        return found


class _SpanAttention:
    """Attention as a break: between two graphs it sees the sequences of the live batch."""

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.name = inner.name
        self.store = inner.store

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        if current().breaker is None:
            return self._inner.prepare(cache, queries, num_heads)
        return _BrokenAttention(self._inner, cache, queries)


@dataclass(frozen=True)
class _BrokenAttention:
    """Prepares in every gap anew, with the spans of the step that is replayed."""

    inner: Attention
    cache: PagedCache
    queries: Queries

    def attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        return self._attend(layer, self.queries.rows, self.queries.positions, self.queries.table, q, window)

    @graph_break
    def _attend(
        self,
        layer: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        q: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        queries = Queries(rows, positions, table, False, current().batch.spans)
        return self.inner.prepare(self.cache, queries, q.shape[1]).attend(layer, q, window)


class Executor:
    """Owns the KV cache, the request tables and one runner per phase."""

    def __init__(self, model: Decoder, device: Device, plan: Plan, limits: Limits) -> None:
        self.device = device
        self.limits = limits
        self.vocab = model.config.vocab
        self.max_pages = -(-limits.max_len // limits.page_size)
        config, on = model.config, device.torch_device
        self.cache = PagedCache.empty(
            config.num_layers,
            limits.num_pages,
            limits.page_size,
            config.num_kv_heads,
            config.head_dim,
            dtype=model.dtype,
            device=on,
        )
        self.tables = RequestTables(device, limits.max_seqs, self.max_pages)
        self._decoder = model
        self._prefiller = Decoder(config, model.weights, _SpanAttention(model.attention), limits.max_len)
        pool, memory = BufferPool(device), device.new_pool()
        options = RunnerOptions(
            outputs="own", strict=plan.graphs == "strict", debug=plan.debug, collect_garbage=plan.gc, eager_copies=False
        )
        self.runners = {
            name: Runner(phase, device, _within(plan.phase(name), limit), pool=pool, memory=memory, options=options)
            for name, phase, limit in (
                ("decode", self._decode_phase(), limits.max_seqs),
                ("prefill", self._prefill_phase(), limits.max_tokens),
            )
        }

    def capture(self, progress: Progress | None = None) -> list[CaptureReport]:
        """Record both phases."""
        return [runner.capture(progress) for runner in self.runners.values()]

    # -- phases -------------------------------------------------------------------------------------------

    def _decode_phase(self) -> Phase:
        return Phase(
            name="decode",
            slots=[Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0), valid=(0, 0))],
            bucketed="seqs",
            body=self._decode,
            sample=self._decode_sample(Sampling.GREEDY),
            variants=_variants(self._decode_sample),
            preserve=_nothing_to_keep,
        )

    def _prefill_phase(self) -> Phase:
        return Phase(
            name="prefill",
            slots=[
                Slot("tokens", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, 0)),
                Slot("rows", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, 0)),
                Slot("positions", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, 0)),
                Slot("decoding", ("tokens",), torch.bool, pad=Pad.fill(False)),
                Slot("ends", ("sampled",), torch.int64, pad=Pad.fill(0), valid=(0, 0)),
            ],
            bucketed="tokens",
            dims=[Dim("sampled", limit=self.limits.max_seqs)],
            body=self._prefill,
            tail=self._prefill_tail,
            sample=self._prefill_sample,
            preserve=_nothing_to_keep,
        )

    def _decode(self, batch: DecodeBatch) -> torch.Tensor:
        tables, rows = self.tables, batch.rows
        positions = tables.length[rows]
        queries = Queries(rows, positions, tables.pages[:, : batch.width], one_per_sequence=True)
        hidden = self._decoder.hidden(tables.last_token[rows], queries, self.cache)
        return self._next_tokens(self._decoder.logits(hidden), rows, positions + 1, batch.level)

    def _next_tokens(
        self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, level: Sampling
    ) -> torch.Tensor:
        """Pick a token for every row and note it in the tables."""
        if level is Sampling.PENALISED:
            logits = penalise(logits, self.penalties.rows(rows))
        tokens = pick(logits, self.tables.sampling(rows, lengths), level)
        self.tables.advance(rows, tokens, lengths)
        if level is Sampling.PENALISED:
            self.penalties.count(rows, tokens)
        return tokens

    @cached_property
    def penalties(self) -> PenaltyTables:
        """Made for the first request that asks for them: they are as wide as the vocabulary."""
        return PenaltyTables(self.limits.max_seqs, self.vocab, self.device.torch_device)

    def _prefill(self, batch: PrefillBatch) -> torch.Tensor:
        tables, rows = self.tables, batch.rows
        tokens = torch.where(batch.decoding, tables.last_token[rows], batch.tokens)
        # A recording may not look at the host's spans; an eager pass is faster with them.
        spans = batch.spans if current().stage is Stage.EAGER else None
        queries = Queries(rows, batch.positions, tables.pages[:, : batch.width], False, spans)
        return self._prefiller.hidden(tokens, queries, self.cache)

    def _prefill_tail(self, hidden: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        ends = batch.ends
        rows, positions = batch.rows[ends], batch.positions[ends]
        return self._next_tokens(self._prefiller.logits(hidden[ends]), rows, positions + 1, batch.level)

    def _decode_sample(self, level: Sampling) -> Callable[[Extent, int], DecodeBatch]:
        """Null rows only: trial runs must not touch anybody's state."""

        def sample(extent: Extent, seed: int) -> DecodeBatch:
            return DecodeBatch(np.zeros(extent.used["seqs"], dtype=np.int64), self.max_pages, level)

        return sample

    def _prefill_sample(self, extent: Extent, seed: int) -> PrefillBatch:
        num_tokens = extent.used["tokens"]
        null = np.zeros(num_tokens, dtype=np.int64)
        ends = np.zeros(extent.used["sampled"], dtype=np.int64)
        no = np.zeros(num_tokens, dtype=bool)
        return PrefillBatch(null, null, null, no, ends, self.max_pages, Sampling.GREEDY, spans=None)

    # -- steps --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Bring the tables up to date and start the forward pass."""
        self.tables.apply(self._updates(step))
        level = max((_level(s.request.params) for s in step.sampling), default=Sampling.GREEDY)
        batch = self._decode_batch(step, level) if step.is_decode else self._prefill_batch(step, level)
        tokens = self.runners["decode" if step.is_decode else "prefill"].run(batch)
        return Launched(step, tokens)

    def _updates(self, step: Step) -> TableUpdates:
        updates = TableUpdates(pages=list(step.page_updates))
        for chunk in step.new_rows:
            request = chunk.sequence.request
            seed = request.params.seed if request.params.seed is not None else hash((request.id, request.arrival))
            updates.enter(chunk.sequence.row, request.params, (seed + chunk.sequence.index) % (1 << 62), chunk.start)
            if is_penalised(request.params) or "penalties" in self.__dict__:
                self.penalties.enter(chunk.sequence)
        return updates

    def _width(self, lengths: Many[int]) -> int:
        return max(1, -(-max(lengths, default=1) // self.limits.page_size))

    def _decode_batch(self, step: Step, level: Sampling) -> DecodeBatch:
        rows = np.fromiter((s.row for s in step.decodes), dtype=np.int64, count=len(step.decodes))
        return DecodeBatch(rows, self._width([s.num_computed for s in step.decodes]), level)

    def _prefill_batch(self, step: Step, level: Sampling) -> PrefillBatch:
        num_decodes = len(step.decodes)
        spans = [Span(s.row, index, s.num_computed - 1, 1) for index, s in enumerate(step.decodes)]
        ends = list(range(num_decodes))
        known = [0] * num_decodes  # their tokens are in the tables
        for chunk in step.prefills:
            spans.append(Span(chunk.sequence.row, len(known), chunk.start, chunk.count))
            known += chunk.tokens
            if chunk.samples:
                ends.append(len(known) - 1)
        counts = [span.count for span in spans]
        decoding = np.zeros(len(known), dtype=bool)
        decoding[:num_decodes] = True
        return PrefillBatch(
            np.asarray(known, dtype=np.int64),
            np.repeat(np.asarray([span.row for span in spans], dtype=np.int64), counts),
            np.concatenate([np.arange(span.start, span.start + span.count) for span in spans]),
            decoding,
            np.asarray(ends, dtype=np.int64),
            self._width([span.start + span.count for span in spans]),
            level,
            tuple(spans),
        )


def _level(params: SamplingParams) -> Sampling:
    if is_penalised(params):
        return Sampling.PENALISED
    if params.temperature == 0:
        return Sampling.GREEDY
    return Sampling.TRUNCATED if params.top_k or params.top_p < 1 or params.min_p > 0 else Sampling.SAMPLED


def _variants(sampler: Callable[[Sampling], Callable[[Extent, int], Any]]) -> list[Variant]:
    """The levels above greedy: plain temperature is served by the recordings that also truncate."""

    def is_sampled(batch: Any) -> bool:
        return batch.level in (Sampling.SAMPLED, Sampling.TRUNCATED)

    def is_penalised_batch(batch: Any) -> bool:
        return bool(batch.level is Sampling.PENALISED)

    return [
        Variant("sampled", is_sampled, sampler(Sampling.TRUNCATED)),
        Variant("penalised", is_penalised_batch, sampler(Sampling.PENALISED), captured=False),
    ]


def _nothing_to_keep(batch: Any) -> AbstractContextManager[None]:
    """Samples use the null row and page, which nobody reads."""
    return nullcontext()


def _within(plan: PhasePlan, limit: int) -> PhasePlan:
    """The phase's plan, with the engine's limit where nothing else says how far buckets go."""
    if plan.backend == "disabled" or plan.buckets is not None or plan.limit is not None:
        return plan
    return PhasePlan(plan.backend, limit, None, plan.exact, plan.max_padding_ratio, plan.max_padding_rows)
