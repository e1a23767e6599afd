"""Garbage collection: off while a capture lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen(collect: bool) -> Iterator[None]:
    """Keep the garbage collector from running: a collection in the middle of a capture may free device memory.

    Where the caller has turned it off, collecting is left to the caller.
    """
    if collect or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
