"""CatchingUp: when a drafter reads what plain steps left for it, by counts of steps."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.engine.requests.limits import Limits


class CatchingUp:
    """Counts the plain steps that are not read; one for a scheduler."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_unread = 0

    def is_due(self, width: int, decodes: Sequence[object], chunks: Sequence[object]) -> bool:
        """Whether the drafter reads before a step: for a round, which wants fresh drafts; when no place is left; and
        before prompts among decodes, since the tokens of such a step are read at once."""
        if self._limits.tokens_per_row == 1 or not decodes:
            return False
        places, is_mixed, is_round, num_unread = self._limits.unread_places, bool(chunks), width > 1, self._num_unread
        found = num_unread > 0 and (is_round or (places > 0 and (is_mixed or num_unread >= places)))
        self._num_unread = 0 if is_round or (is_mixed and places) else 1 if found else num_unread + 1
        return found
