"""The capture table: a line for each recording, with its time and memory, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.errors import CaptureError
from phonograph.graphs.decisions import ShapeKey


@dataclass(frozen=True)
class CaptureRow:
    """One line of the capture table."""

    key: ShapeKey
    seconds: float
    num_bytes: int
    num_graphs: int
    error: CaptureError | None = None


@dataclass(frozen=True)
class CaptureReport:
    """What a capture made, and what it could not make."""

    rows: tuple[CaptureRow, ...]
    warm_seconds: float
    seconds: float

    @property
    def failures(self) -> tuple[CaptureRow, ...]:
        return tuple(row for row in self.rows if row.error is not None)

    def __str__(self) -> str:
        lines = [f"{'recording':<28} {'graphs':>6} {'seconds':>9} {'bytes':>14}"]
        for row in self.rows:
            if row.error is None:
                lines.append(f"{row.key!s:<28} {row.num_graphs:>6} {row.seconds:>9.4f} {row.num_bytes:>14,}")
            else:
                lines.append(f"{row.key!s:<28} failed: {row.error}")
        made = [row for row in self.rows if row.error is None]
        total = sum(row.num_bytes for row in made)
        lines.append(
            f"{f'{len(made)} of {len(self.rows)} captured':<28} {sum(r.num_graphs for r in made):>6} "
            f"{self.seconds:>9.4f} {total:>14,}  (warm-up {self.warm_seconds:.4f} s of it)"
        )
        return "\n".join(lines)
