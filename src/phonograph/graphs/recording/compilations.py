"""Compilations in a capture: torch.compile at work while a graph is recorded, which is refused with its line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    # Where nobody has imported the compiler, the warm-ups called nothing compiled.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    lines: list[Frame | None] = []
    thread, handler = threading.get_ident(), dynamo.callback_handler

    def note(_: Any) -> None:
        if threading.get_ident() == thread:
            lines.append(user_frame())

    handler.register_start_callback(note)
    try:
        yield
    except Exception as error:
        if lines:
            raise _found(lines[0]) from error
        raise
    finally:
        if note in handler.start_callbacks:  # torch._dynamo.reset() forgets all
            handler.remove_start_callback(note)
    if lines:
        raise _found(lines[0])


def _found(line: Frame | None) -> CaptureError:
    return CaptureError("torch.compile compiles here in the middle of a capture", _REMEDY, frame=line)
