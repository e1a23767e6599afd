"""What torch answers where nothing is captured for real: whether the current stream is in a capture.

Libraries ask in order to leave out checks that read the device. A rehearsal must run what the capture will run, and a
recording on the emulated device what one on a GPU would.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.cuda.graphs as torch_graphs

_lock = threading.Lock()
_num_inside = 0
# The function that all of torch's names for the question call.
_ASKED = "_cuda_isCurrentStreamCapturing"
_ask_driver = getattr(torch_graphs, _ASKED)


class _Here(threading.local):
    depth = 0


_here = _Here()


def _answer() -> bool:
    return _here.depth > 0 or bool(_ask_driver())


@contextmanager
def said_to_capture() -> Iterator[None]:
    """Inside, and on this thread only, `torch.cuda.is_current_stream_capturing()` is True."""
    global _num_inside  # noqa: PLW0603 - other threads may be inside too
    with _lock:
        _num_inside += 1
        setattr(torch_graphs, _ASKED, _answer)
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                setattr(torch_graphs, _ASKED, _ask_driver)
