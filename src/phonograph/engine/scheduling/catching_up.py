"""CatchingUp: when a drafter reads what plain steps left for it, by counts of steps."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.engine.requests.limits import Limits


class CatchingUp:
    """Counts the plain steps that are not read; one for a scheduler."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_unread = 0

    def is_due(self, width: int, decodes: Sequence[object], *, probes: bool = False) -> bool:
        """Whether the drafter reads before a step: for a round, which wants fresh drafts, or a probe, which compares
        them with what comes; and when no place is left.

        Without decodes there is nobody to read for; a round then reads the ends of its prompts itself.
        """
        places, is_round, num_unread = self._limits.unread_places, width > 1, self._num_unread
        if self._limits.tokens_per_row == 1 or (is_round and not decodes):
            return False
        found = bool(decodes) and (probes or (num_unread > 0 and (is_round or 0 < places <= num_unread)))
        self._num_unread = 0 if is_round else 1 if found else num_unread + 1
        return found
