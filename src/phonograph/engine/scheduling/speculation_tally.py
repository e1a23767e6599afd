"""SpeculationTally: acceptance of drafts by position, tokens per round, and why rows decoded without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep, Update

PLAIN_REASONS = ("grammar", "request", "cost")
"""Why a row decodes plainly: its next step depends on its text, its request says so, or drafts would not pay."""


@dataclass(frozen=True)
class SpeculationCounts:
    """Of rows that decoded in rounds, so far."""

    rounds: int = 0
    """Rounds of rows for which something was drafted, and that brought a token at least."""
    tokens: int = 0
    """Tokens that those brought, the one that the target adds to the accepted ones included."""
    drafted: int = 0
    accepted: tuple[int, ...] = ()
    """How often the draft in each place of a round was accepted."""
    plain: Mapping[str, int] = field(default_factory=dict)
    """Steps in which a row decoded one token, by reason."""

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        places = ", ".join(f"{count / self.rounds:.0%}" for count in self.accepted) if self.rounds else "nothing yet"
        plain = ", ".join(f"{count:,} by {reason}" for reason, count in self.plain.items() if count)
        return (
            f"{self.tokens_per_round:.2f} tokens a round over {self.rounds:,} rounds; accepted by position: {places}"
            f"{f'; decoded plainly: {plain}' if plain else ''}"
        )


class SpeculationTally:
    """Follows the commits of an engine whose rows decode in rounds of so many drafts."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._rounds = self._tokens = self._drafted = 0
        self._accepted = [0] * depth
        self._plain: Counter[str] = Counter(dict.fromkeys(PLAIN_REASONS, 0))

    def note(self, step: ScheduledStep, updates: Iterable[Update]) -> None:
        """What the commit of a step brought."""
        decoding = set(step.decodes)
        for sequence, tokens, _ in updates:
            if tokens and sequence in decoding:
                self._note(sequence, len(tokens), is_round=step.tokens_per_row > 1)

    def _note(self, sequence: Sequence, count: int, *, is_round: bool) -> None:
        depth = sequence.draft_depth(self._depth)
        if not depth or not is_round:
            by_row = "request" if sequence.constraint is None else "grammar"
            self._plain["cost" if depth else by_row] += 1
            return
        self._rounds += 1
        self._tokens += count
        self._drafted += depth
        for place in range(count - 1):
            self._accepted[place] += 1
        sequence.num_drafted += depth
        sequence.num_accepted += count - 1

    @property
    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(self._rounds, self._tokens, self._drafted, tuple(self._accepted), dict(self._plain))
