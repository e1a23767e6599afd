"""StepWidth: how many tokens of each row that decodes a step computes: a round, or one where nothing is drafted."""

from __future__ import annotations

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.sequence import Sequence


class StepWidth:
    """Rounds, unless no row takes drafts: then a plain step does the same for less."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.tokens_per_row
        self._decodes: tuple[Sequence, ...] | None = None
        self._width = self._most

    def of(self, decodes: tuple[Sequence, ...]) -> int:
        """For a step with these decodes; consecutive steps that carry the same tuple have the same answer."""
        if self._most == 1:
            return 1
        if decodes is not self._decodes:
            depth = self._most - 1
            is_drafted = not decodes or any(sequence.draft_depth(depth) for sequence in decodes)
            self._decodes, self._width = decodes, self._most if is_drafted else 1
        return self._width
