"""DrafterFailures: what a drafter raised in one engine; the first of each kind is a warning, the others are counted."""

from __future__ import annotations

import logging
import re

log = logging.getLogger("phonograph")


class DrafterFailures:
    """No output depends on drafts, so nobody but the log hears of what a drafter raises.

    One that fails may do so in every call. A kind is what does not happen then, the exception and its message, numbers
    in it aside: shapes differ from step to step.
    """

    def __init__(self) -> None:
        self.count = 0
        """Calls in which it raised, or returned what can't be used; a call that is recorded counts once."""
        self._told: set[tuple[str, str, str]] = set()

    def note(self, so: str, error: Exception) -> None:
        """Count a failure, and warn of it where it is the first of its kind; `so` is what follows."""
        self.count += 1
        kind = so, type(error).__name__, re.sub(r"\d+", "#", str(error))
        if kind in self._told:
            return
        self._told.add(kind)
        log.warning(
            "the drafter failed, and %s: %s: %s. Later failures like this one are not logged, but counted by "
            "LLM.explain",
            so,
            type(error).__name__,
            str(error).removesuffix("."),
        )

    def __str__(self) -> str:
        if not self.count:
            return ""
        return f"the drafter failed in {self.count:,} call{'' if self.count == 1 else 's'}: see the warnings"
