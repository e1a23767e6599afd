"""Health: whether requests are taken, and if not, why; and what is wrong where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phonograph.engine.process.statistics import EngineStats

_NAMED = 3


@dataclass(frozen=True)
class Health:
    """`degraded`: requests are accepted, and some fail for lack of a graph that the server may use."""

    state: Literal["starting", "ready", "degraded", "draining", "down", "stopped"]
    reason: str = ""

    @property
    def is_serving(self) -> bool:
        """Whether requests are accepted."""
        return self.state in ("ready", "degraded")


def health_in_service(stats: EngineStats | None) -> Health:
    """The health of a core that accepts requests, by its newest stats; names recordings, but no requests."""
    wrong = [made.label for phase in stats.phases for made in phase.recordings if made.mistrusted] if stats else []
    if stats is None or not wrong:
        return Health("ready")
    names = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
    found = f"replays of {names} differed from the eager path (--shadow-verify)"
    if not stats.is_strict or all(one.coverage is None or one.coverage.is_full for one in stats.phases):
        return Health("ready", f"{found}; other ways to compute the same are used since, nothing wrong was sent")
    return Health(
        "degraded", f"{found}; with --graphs strict its batches fail until the server is started again (no_graph)"
    )
