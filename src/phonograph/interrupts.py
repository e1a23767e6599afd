"""Interrupts: one Ctrl-C ends a command, whenever it comes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

STATUS = 130
"""Of a command that was interrupted: 128 and the signal's number, as shells have it."""
_AGAIN_SECONDS = 0.01


def install() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt`, or end the process at once where that would be lost.

    Does nothing where somebody else handles or ignores the signal.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable


def end_at_once_from_now_on() -> None:
    """After the command: in what Python does at its end, an interrupt would be an error of whoever it hits."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def left_to_asyncio() -> Iterator[None]:
    """Inside, Python's own handler is in place: `asyncio.run` replaces no other by one that cancels its work."""
    before = signal.getsignal(signal.SIGINT)
    if before is not _interrupt:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A library that is being imported may drop the exception (torch does, while it imports numpy), or make another of
    # it, and can't be imported again. A process that imports has nothing to clean up.
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or it is being flushed
            stream.flush()
    os._exit(STATUS)


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """Interrupt again, later: a finalizer or callback was hit, which can't raise."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(found)
