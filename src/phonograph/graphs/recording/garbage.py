"""Garbage collection: off while a capture lasts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen(collect: bool) -> Iterator[None]:
    """Keep the garbage collector from running: a collection in the middle of a capture may free device memory.

    Where the caller has disabled it, collecting is left to the caller. Objects that the caller has frozen stay frozen:
    gc can only unfreeze all objects at once.
    """
    if collect or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    is_frozen = _is_frozen()
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
        gc.enable()


def _is_frozen() -> bool:
    """Whether the caller has frozen what there is, and so the oldest of all dicts too.

    gc.get_freeze_count would say so as well, by walking over all that is frozen.
    """
    return not any(one is sys.modules for one in gc.get_objects())
