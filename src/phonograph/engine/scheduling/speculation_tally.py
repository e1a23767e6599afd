"""SpeculationTally: acceptance of drafts by position, tokens per round, and why rows decoded without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat

from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep, Update

PLAIN_REASONS = ("grammar", "request", "cost", "no_draft")
"""Why a row decodes plainly: its next step depends on its text, its request says so, drafts would not pay, or there was
none to verify."""


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

    def note(self, step: ScheduledStep, updates: Iterable[Update], drafted: Iterable[int] | None = None) -> None:
        """What the commit of a step brought; `drafted` says for how many places of each of `step.sampling`."""
        # What was sampled of a step comes in the order of its decodes, then of its prompts.
        said = dict(zip(step.decodes, repeat(self._depth) if drafted is None else drafted, strict=False))
        for sequence, tokens, _ in updates:
            if tokens and sequence in said:
                self._note(sequence, len(tokens), said[sequence] if step.tokens_per_row > 1 else None)

    def _note(self, sequence: Sequence, count: int, said: int | None) -> None:
        """`said` is None in a step that verifies nothing."""
        depth = sequence.draft_depth(self._depth)
        drafted = min(depth, said or 0)
        if not drafted:
            by_row = "request" if sequence.constraint is None else "grammar"
            self._plain[by_row if not depth else "cost" if said is None else "no_draft"] += 1
            return
        self._rounds += 1
        self._tokens += count
        self._drafted += drafted
        for place in range(count - 1):
            self._accepted[place] += 1
        sequence.num_drafted += drafted
        sequence.num_accepted += count - 1

    @property
    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(self._rounds, self._tokens, self._drafted, tuple(self._accepted), dict(self._plain))
