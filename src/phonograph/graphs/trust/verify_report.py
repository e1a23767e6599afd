"""VerifyReport: the comparisons that verify made, which of them failed, and what could not be tried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from phonograph.errors import VerifyError
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.running.entries import Verified


@dataclass(frozen=True)
class Check:
    """One comparison on one batch."""

    key: ShapeKey
    used: int
    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons, and what could not be tried. Without a comparison nothing is shown, and it is not ok."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    num_recordings: int = 0
    """The recordings that there are; a quick look takes some of them."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return bool(self.checks) and not self.failures

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def raise_if_failed(self) -> None:
        """Raise with every failed check; also where nothing was checked."""
        if not self.ok:
            raise VerifyError(str(self))

    @property
    def summary(self) -> str:
        """In a line: how much was checked, and how much of it failed."""
        looked_at = len({check.key for check in self.checks})
        of = f" of {self.num_recordings}" if self.num_recordings > looked_at else ""
        return f"{len(self.checks)} checks on {looked_at}{of} recordings, {len(self.failures)} failed"

    @property
    def verified(self) -> Verified:
        """What the runner is told of it."""
        return Verified(len(self.checks), len({check.key for check in self.checks}), self.summary)

    def table(self) -> str:
        """A line for each recording: its checks, how many batches, and what failed."""
        lines = [f"{'recording':<44} {'batches':>7} {'checks':>6}  result"]
        for key in dict.fromkeys(check.key for check in self.checks):
            checks = [check for check in self.checks if check.key == key]
            failed = Counter(check.name for check in checks if not check.passed)
            result = f"FAILED: {', '.join(failed)}" if failed else "ok"
            lines.append(f"{key!s:<44} {len({check.used for check in checks}):>7} {len(checks):>6}  {result}")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [f"verify: {self.summary}"]
        lines += [f"  {c.key} with {c.used} used: {c.name}: {c.detail}" for c in self.failures]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])
