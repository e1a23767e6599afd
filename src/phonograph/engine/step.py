"""What the scheduler hands out and what it tells: a step to launch, and the updates that its commit brings."""

from __future__ import annotations

from dataclasses import dataclass, field

from phonograph.engine.request import FinishReason
from phonograph.engine.sequence import Sequence

NOT_FINITE = -1
"""In place of a token: the logits that it was to be picked from hold NaN or +inf."""
NOTHING_ALLOWED = -2
"""In place of a token: all logits are -inf, as under a mask that allows nothing."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Prefill tokens of one sequence: they come from the host and are computed from position `start` on."""

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    samples: bool
    """Whether it reaches the end of what the host knows, so that the step samples the sequence's next token."""
    enters: bool
    """Whether the sequence got its row in this step, fresh or after a preemption."""

    @property
    def count(self) -> int:
        return len(self.tokens)


PageUpdate = tuple[int, int, int]
"""(row, index, page): a change of the device tables."""


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass, planned by counts.

    A decode computes one token and samples the next; token and position are in the device tables, so it is named by
    its sequence alone. While nothing changes, consecutive steps carry the *same* tuple `decodes`, so what is derived
    from it can be kept.
    """

    number: int
    decodes: tuple[Sequence, ...]
    prefills: tuple[Chunk, ...]
    page_updates: tuple[PageUpdate, ...]
    """To be written to the device tables before the step runs; names no place twice."""
    sampling: tuple[Sequence, ...] = field(init=False)
    """Whose token the step samples, in the order of the batch: decodes, then prefills that reach their end."""

    def __post_init__(self) -> None:
        sampled = tuple(chunk.sequence for chunk in self.prefills if chunk.samples)
        object.__setattr__(self, "sampling", self.decodes + sampled if sampled else self.decodes)

    @property
    def is_decode(self) -> bool:
        return not self.prefills

    @property
    def new_rows(self) -> tuple[Chunk, ...]:
        """First chunks in a new row: their `start` is the length that the device tables begin with."""
        return tuple(chunk for chunk in self.prefills if chunk.enters)

    @property
    def num_seqs(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.count for chunk in self.prefills)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that take part, in the order of the batch."""
        return self.decodes + tuple(chunk.sequence for chunk in self.prefills)


Update = tuple[Sequence, tuple[int, ...], FinishReason | None]
"""(sequence, new tokens, why it ended if it did); a plain tuple, since a commit makes one for every token."""
