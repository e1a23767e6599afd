"""Capture report: a row for each recording, with its time and memory, or why there is none."""

from __future__ import annotations

import linecache
import traceback
from dataclasses import dataclass

import torch

from phonograph.devices.trace import raising_frame
from phonograph.errors import CaptureError, PhonographError
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.phases.selection import LeftOut
from phonograph.graphs.recording.guarding import Finding

_LOOK = "Run the body eagerly under a debugger; a call that no graph can hold needs @graph_break, backend='breakable'"

_ROOM = "Leave graphs more room: smaller or fewer buckets, or a smaller KV cache or other state"


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
    left_out: tuple[LeftOut, ...] = ()
    """What the plan's bound had no room for."""
    findings: tuple[Finding, ...] = ()
    """Shapes whose ops depend on the sample; refused, unless they are only to be reported."""

    @property
    def failures(self) -> tuple[CaptureRow, ...]:
        return tuple(row for row in self.rows if row.error is not None)

    @property
    def reported(self) -> tuple[Finding, ...]:
        """Findings whose shapes have a recording."""
        made = {row.key for row in self.rows if row.error is None}
        return tuple(one for one in self.findings if one.key in made)

    def __str__(self) -> str:
        lines = [f"{'recording':<28} {'graphs':>6} {'seconds':>9} {'bytes':>14}"]
        for row in self.rows:
            if row.error is None:
                lines.append(f"{row.key!s:<28} {row.num_graphs:>6} {row.seconds:>9.4f} {row.num_bytes:>14,}")
            else:
                lines.append(f"{row.key!s:<28} failed: {row.error}")
        lines += [f"left out: {one}" for one in self.left_out]
        lines += [f"recorded all the same: {one}" for one in self.reported]
        made = [row for row in self.rows if row.error is None]
        total = sum(row.num_bytes for row in made)
        lines.append(
            f"{f'{len(made)} of {len(self.rows)} captured':<28} {sum(r.num_graphs for r in made):>6} "
            f"{self.seconds:>9.4f} {total:>14,}  (warm-up {self.warm_seconds:.4f} s of it)"
        )
        return "\n".join(lines)


def as_capture_error(error: Exception, key: ShapeKey) -> CaptureError:
    """The error with the shape it belongs to; its frames are let go, since they hold the body's tensors."""
    if isinstance(error, CaptureError):
        error.shape = str(key)
        found = error
    else:
        frame = raising_frame(error.__traceback__)
        line = linecache.getline(frame.file, frame.line).strip() if frame else ""
        what = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        problem = what if isinstance(error, PhonographError) else f"{type(error).__name__}: {what}"
        at = f", at `{line}`" if line else ""
        remedy = _ROOM if isinstance(error, torch.OutOfMemoryError | MemoryError) else _LOOK
        found = CaptureError(f"{problem}{at}", remedy, op=line, frame=frame, shape=str(key))
    traceback.clear_frames(error.__traceback__)
    return found.with_traceback(None)
