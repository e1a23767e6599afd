"""embed: what prefill computes, and of some chunks the sum of their hidden states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.prefill import PrefillBody, PrefillSample, TokenStates, prefill_pass
from phonograph.engine.passes.prefill_batch import PrefillBatch, PrefillBatches
from phonograph.engine.passes.readback import Picked
from phonograph.engine.passes.registry import EMBED, PassDeclaration
from phonograph.engine.passes.rounds import Rounds
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.limits import Limits
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.graphs.phases.context import BREAKING
from phonograph.graphs.phases.opaque import opaque


@dataclass(frozen=True)
class EmbedBatch(PrefillBatch):
    """A batch of prefill, and which of its tokens are summed: spans that follow each other, none within another."""

    pool_starts: Any = None
    """Index of the first token of every span."""
    pool_stops: Any = None
    """Index after its last."""


class EmbedStates(NamedTuple):
    """What a recording gives."""

    ends: torch.Tensor | TokenStates  # [num_sampled, …]: of the tokens that something is sampled after
    pooled: torch.Tensor  # [num_pooled, hidden], float32


class EmbedBatches:
    """Makes the batches of steps in which a chunk is pooled."""

    def __init__(self, limits: Limits, rounds: Rounds | None) -> None:
        self._prefill = PrefillBatches(limits, rounds)

    def batch(self, step: Step) -> EmbedBatch:
        """The batch of prefill, and the spans of its chunks."""
        first, spans = len(step.decodes.rows) * step.tokens_per_row, list[tuple[int, int]]()
        for chunk in step.prefills:
            if chunk.pooled is not None:
                spans.append((first + chunk.pooled[0], first + chunk.pooled[1]))
            first += len(chunk.tokens)
        starts, stops = np.asarray(spans, dtype=np.int64).reshape(-1, 2).T.copy()
        return EmbedBatch(**vars(self._prefill.batch(step)), pool_starts=starts, pool_stops=stops)


def sum_spans(states: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """[num_spans, hidden] in float32: of each span the sum of its states, always in the order of the tokens.

    Atomic additions would be faster, and not deterministic.
    """
    if starts.shape[0] == 0:  # in a step that is run again for one sequence
        return _fake_sums(states, starts, stops)
    # What lies between two spans is a segment too, that nobody reads. Padding (0, 0) becomes an empty one at the end.
    bounds = torch.stack((starts, stops), 1).flatten().cummax(0).values
    return torch.segment_reduce(states.float(), "sum", offsets=bounds, axis=0, unsafe=True, initial=0.0)[::2]


def _fake_sums(states: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    return states.new_empty((starts.shape[0], states.shape[1]), dtype=torch.float32)


class EmbedBody:
    """Runs the model over chunks and decodes, and sums spans; the tail picks tokens as that of prefill does."""

    def __init__(self, parts: PassParts, rounds: Rounds | None, backend: str) -> None:
        self._prefill = PrefillBody(parts, rounds, backend)
        self._sum = opaque(sum_spans, fake=_fake_sums)

    def __call__(self, batch: EmbedBatch) -> EmbedStates:
        found, ends = self._prefill.found(batch, None), batch.ends
        states = found.hidden
        at_ends = self._prefill.at_ends(found, states[ends], ends)
        return EmbedStates(at_ends, self._sum(states, batch.pool_starts, batch.pool_stops))

    def tail(self, found: EmbedStates, batch: EmbedBatch) -> Picked:
        """Tokens of the sequences that sample, and the sums of the spans that there are."""
        ends = found.ends
        picked = (
            self._prefill.rounds_tail(ends, batch) if isinstance(ends, TokenStates) else self._prefill.tail(ends, batch)
        )
        return picked._replace(pooled=found.pooled[: batch.pool_starts.shape[0]])


class EmbedSample:
    """Samples of prefill whose tokens, but for padding, are cut into spans."""

    def __init__(self, parts: PassParts, *, spans: bool, following: bool) -> None:
        self._prefill = PrefillSample(parts, spans=spans, following=following)

    def __call__(self, extent: Extent, seed: int) -> EmbedBatch:
        batch, count = self._prefill(extent, seed), extent.used["pooled"]
        known = int(np.count_nonzero(batch.rows))
        num_spans = min(count, known)
        inner = np.random.default_rng(seed).permutation(np.arange(1, known))[: max(0, num_spans - 1)]
        cuts = np.asarray([0, *sorted(inner.tolist()), known], dtype=np.int64)
        starts, stops = np.zeros((2, count), dtype=np.int64)
        if num_spans:
            starts[:num_spans], stops[:num_spans] = cuts[:-1], cuts[1:]
        return EmbedBatch(**vars(batch), pool_starts=starts, pool_stops=stops)


def embed_pass(parts: PassParts, backend: str, declared: PassDeclaration = EMBED, rounds: Rounds | None = None) -> Pass:
    """The pass over all tokens of a step in which a chunk is pooled; slots and state are those of prefill."""
    limits, body = parts.limits, EmbedBody(parts, rounds, backend)
    plain = prefill_pass(parts, backend, declared, rounds)
    places = {"pad": Pad.fill(0), "valid": (0, limits.max_tokens)}
    own = [Slot(name, ("pooled",), torch.int64, **places) for name in ("pool_starts", "pool_stops")]  # type: ignore[arg-type]
    return replace(
        plain,
        slots=[*plain.slots, *own],
        dims=[*plain.dims, Dim("pooled", limit=limits.max_seqs)],
        batch=EmbedBatches(limits, rounds).batch,
        public=(*plain.public, "pool_starts", "pool_stops"),
        body=body,
        tail=body.tail,
        sample=EmbedSample(parts, spans=backend in BREAKING, following=rounds is not None and bool(rounds.taps)),
    )
