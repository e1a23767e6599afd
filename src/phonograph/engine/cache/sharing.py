"""PrefixSharing: whether sequences share the pages of equal prompts, and why."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.engine.models.interface import Model
from phonograph.engine.options import EngineOptions

STATE_BY_ROW = "state-by-row-shares-no-prefixes"
"""The rule for models that keep state of a sequence as a whole."""


@dataclass(frozen=True)
class PrefixSharing:
    """The decision, with its reason."""

    is_on: bool
    reason: str

    def __str__(self) -> str:
        return f"prefix cache: {'on' if self.is_on else 'off'}: {self.reason}"


def prefix_sharing(options: EngineOptions, model: Model) -> PrefixSharing:
    """As asked, unless the model has state that no page holds: a prefix found in pages would come without it."""
    if not options.prefix_cache:
        return PrefixSharing(False, "it was asked to be off")
    if model.columns:
        names = ", ".join(column.name for column in model.columns)
        return PrefixSharing(False, f"the model keeps state by row ({names}), which pages don't hold ({STATE_BY_ROW})")
    return PrefixSharing(True, "pages hold all that the model keeps of a prompt")
