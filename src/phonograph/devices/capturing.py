"""Capture queries: torch's answer to `is_current_stream_capturing` where no stream is really capturing.

Libraries query it to skip checks that read the device. A rehearsal must run what the capture will run, and a
recording on the emulated device what one on a GPU would. Seeds are refused here too: they are set by Python, which a
replay does not run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.cuda.graphs as torch_graphs

from phonograph.devices.refused import Refused
from phonograph.devices.trace import user_frame
from phonograph.errors import CaptureError

_lock = threading.Lock()
_num_inside = 0
# The function that all of torch's capture queries call.
_ASKED = "_cuda_isCurrentStreamCapturing"
_ask_driver = getattr(torch_graphs, _ASKED)

QUERY = torch.cuda.is_current_stream_capturing
"""The functions that libraries call to query it."""


class _Here(threading.local):
    depth = 0
    refused: Refused | None = None


_here = _Here()


class _Unseeded:
    """Wraps torch's host generator: seeding it is refused on a thread that captures."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        if name in _SEEDS and _here.depth > 0 and not _is_compiler(sys._getframe(2)):
            problem = f"{_SEEDS[name]} sets the random numbers, and a replay draws its own"
            error = CaptureError(problem, _SEED_OUTSIDE, op=_SEEDS[name], frame=user_frame())
            if _here.refused is not None:
                _here.refused.note(error)
            raise error
        return getattr(self._generator, name)


def _is_compiler(caller: FrameType | None) -> bool:
    """Whether Dynamo is the caller: after every compilation it restores the generator's state."""
    return caller is not None and caller.f_globals.get("__name__", "").startswith("torch._dynamo.")


_SEEDS = {"manual_seed": "torch.manual_seed", "seed": "torch.seed", "set_state": "torch.set_rng_state"}
_SEED_OUTSIDE = "Seed outside of the body, or draw there and put the numbers in a slot"
# The global that the functions of torch.random read, however these were imported.
_SEEDED = "default_generator"
_generator: torch.Generator = getattr(torch.random, _SEEDED)


def _answer() -> bool:
    return _here.depth > 0 or bool(_ask_driver())


@contextmanager
def said_to_capture(refused: Refused | None = None) -> Iterator[None]:
    """Inside, and on this thread only, `torch.cuda.is_current_stream_capturing()` is True, and seeding is refused."""
    global _num_inside  # noqa: PLW0603 - other threads may be inside too
    with _lock:
        _num_inside += 1
        setattr(torch_graphs, _ASKED, _answer)
        setattr(torch.random, _SEEDED, _Unseeded(_generator))
    _here.depth += 1
    before, _here.refused = _here.refused, refused
    try:
        yield
    finally:
        _here.depth -= 1
        _here.refused = before
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                setattr(torch_graphs, _ASKED, _ask_driver)
                setattr(torch.random, _SEEDED, _generator)
