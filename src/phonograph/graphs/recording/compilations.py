"""Compilations in a capture: torch.compile at work while a graph is recorded, which is refused with its line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phonograph.devices.compiling import around_compilations
from phonograph.devices.trace import user_frame
from phonograph.errors import CaptureError, Frame

_REMEDY = (
    "Compile for every size in the warm-ups: call the compiled function there as the capture does, or compile it with "
    "dynamic=True"
)


@contextmanager
def refusing_compilations() -> Iterator[None]:
    """Inside, and on this thread, a compiled function runs what was compiled before.

    A compiler tunes kernels, reads the device and allocates: a graph would hold some of that, and miss the rest.
    """
    lines: list[Frame | None] = []
    try:
        with around_compilations(lambda: lines.append(user_frame())):
            yield
    except Exception as error:
        if lines:
            raise _found(lines[0]) from error
        raise
    if lines:
        raise _found(lines[0])


def _found(line: Frame | None) -> CaptureError:
    return CaptureError("torch.compile compiles here in the middle of a capture", _REMEDY, frame=line)
