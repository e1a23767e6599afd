"""SamplingTail: from logits to tokens, and these into the request tables; what every pass that samples ends with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from phonograph.engine.ops.kernels import Kernels
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.readback import Picked
from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.requests.request import MAX_LOGPROBS
from phonograph.engine.sampling.masks import MaskRows, mask
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.engine.sampling.penalties import Penalties, count_tokens, penalise, with_said
from phonograph.engine.sampling.sampler import Sampler, TopLogprobs, few_threads
from phonograph.engine.state.tables import RequestTables
from phonograph.graphs.phases.axes import Axis
from phonograph.graphs.phases.context import Stage, current
from phonograph.graphs.phases.opaque import opaque

_ROWS = 32


_RECORDED = {
    "greedy": SamplingNeeds(),
    "sampled": SamplingNeeds(Sampling.TRUNCATED),
    "detailed": SamplingNeeds(Sampling.PENALISED, logprobs=True, constrained=True, masked=True),
}
"""What each value of the axis records. Each does all that those before it do: plain temperature runs where truncation
is recorded."""


def _sampling_of(batch: Any) -> str:
    if batch.needs.is_detailed:
        return "detailed"
    return "sampled" if batch.needs.level > Sampling.GREEDY else "greedy"


def _with_sampling(batch: Any, value: str) -> Any:
    return replace(batch, needs=replace(_RECORDED[value], states=batch.needs.states))


SAMPLING = Axis("sampling", tuple(_RECORDED), of=_sampling_of, apply=_with_sampling)
"""For passes that sample within their recording: their batches have a field `needs`."""


def _with_states(batch: Any, value: str) -> Any:
    return replace(batch, needs=replace(batch.needs, states=value == "last"))


HIDDEN_STATES = Axis(
    "hidden_states", ("none", "last"), of=lambda batch: "last" if batch.needs.states else "none", apply=_with_states
)
"""For the same passes, of an engine whose requests may ask for hidden states. Those of prompts come out of recordings
in every case, as many as a step has places for."""


def axes_for(gives_states: bool) -> list[Axis]:
    """What passes that sample within their recording have."""
    return [SAMPLING, HIDDEN_STATES] if gives_states else [SAMPLING]


def _fake_tokens(logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """What the opaque call of the tail returns: tokens, and logprobs where they are needed."""
    rows, (_, logprobs, *_) = logits.shape[0], others[_NEEDS]
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if not logprobs:
        return (tokens,)
    top = (rows, min(MAX_LOGPROBS, logits.shape[1]))
    likely = logits.new_empty(top, dtype=torch.float32)
    return tokens, logits.new_empty(rows, dtype=torch.float32), logits.new_empty(top, dtype=torch.int64), likely


_NEEDS = 3
"""Where `SamplingTail._next_tokens` has `needs`, after the logits."""


class SamplingTail:
    """Picks the tokens after the queries of a step, and notes them in the tables."""

    def __init__(self, tables: RequestTables, sampler: Sampler, kernels: Kernels) -> None:
        self._tables = tables
        self._sampler = sampler
        self._kernels = kernels
        self._opaque = opaque(self._next_tokens, fake=_fake_tokens, mutates=("last_token", "length"))

    def next_tokens(self, logits: torch.Tensor, queries: Queries, needs: SamplingNeeds) -> Picked:
        """One token after every query."""
        if current().stage is Stage.COMPILING:
            return self._traced(logits, queries, needs)
        picked, tables = self.pick(logits, queries, needs), self._tables
        # Last, once everything that may fail is done: a step that raised is run again on the state that it found.
        if needs.level is Sampling.PENALISED:
            count_tokens(tables["counts"], queries.rows, picked.tokens)
        self._kernels.write_next_token(queries, picked.tokens, tables.last_token, tables.length)
        return picked

    def _traced(self, logits: torch.Tensor, queries: Queries, needs: SamplingNeeds) -> Picked:
        """As one opaque call: it writes the tables, and picks by custom kernels."""
        tables, places = self._tables, (queries.rows, queries.positions, queries.table)
        found = self._opaque(
            *(logits, places, queries.tokens_per_row, queries.by_row),
            (needs.level.value, needs.logprobs, needs.constrained, needs.masked),
            tables.last_token,
            tables.length,
        )
        return Picked(found[0], TopLogprobs(*found[1:]) if needs.logprobs else None)

    def _next_tokens(
        self,
        logits: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tokens_per_row: int | None,
        by_row: bool,
        needs: tuple[int, bool, bool, bool],
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The tables are the ones that it has; as arguments, they say what is written."""
        queries = Queries(*places, tokens_per_row=tokens_per_row, by_row=by_row)
        level, *others = needs
        picked = self.next_tokens(logits, queries, SamplingNeeds(Sampling(level), *others))
        found = picked.logprobs
        if found is None:
            return (picked.tokens,)
        return picked.tokens, found.token_logprob, found.top_ids, found.top_logprobs

    def pick(
        self, logits: torch.Tensor, queries: Queries, needs: SamplingNeeds, said: torch.Tensor | None = None
    ) -> Picked:
        """The token after every query; the tables stay as they are.

        `said` ([num_queries, any], below 0 for none) is what the step itself puts out before each query, if all that
        comes before it stays: penalties go by it.
        """
        if needs.constrained or needs.masked or needs.level is Sampling.PENALISED:
            # Some rows at a time: what is computed on the way is as wide as the vocabulary, many times over.
            parts = [slice(start, start + _ROWS) for start in range(0, logits.shape[0], _ROWS)]
            tokens = torch.cat([self._pick(logits, queries, part, needs, said) for part in parts])
        else:
            tokens = self._pick(logits, queries, slice(None), needs, said)
        return Picked(tokens, self._sampler.logprobs(logits, tokens, MAX_LOGPROBS) if needs.logprobs else None)

    def _pick(
        self, logits: torch.Tensor, queries: Queries, part: slice, needs: SamplingNeeds, said: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens of some of the queries."""
        logits, rows = logits[part], queries.rows[part]
        positions = queries.token_positions[part] + 1 if needs.masked or needs.level > Sampling.GREEDY else None
        with few_threads(logits):
            if needs.level is Sampling.PENALISED:
                penalties = self._tables.gather(Penalties, rows)
                if said is not None:
                    penalties = replace(penalties, counts=with_said(penalties.counts, said[part]))
                logits = penalise(logits.float(), penalties)
            if (allowed := self._allowed(rows, positions, needs)) is not None:
                logits = mask(logits, allowed)
        sampling = None
        if needs.level > Sampling.GREEDY:
            sampling = self._tables.gather(self._sampler.rows, rows, positions=positions)
        return self._sampler.pick(logits, sampling, needs.level)

    def _allowed(self, rows: torch.Tensor, positions: torch.Tensor | None, needs: SamplingNeeds) -> torch.Tensor | None:
        """A bit for every token that may come next, by grammars and by requests' own tokens; None where all may."""
        by_grammar = self._tables["allowed"][rows] if needs.constrained else None
        if not needs.masked:
            return by_grammar
        by_request = self._tables.gather(MaskRows, rows, positions=positions).allowed()
        return by_request if by_grammar is None else by_request & by_grammar
