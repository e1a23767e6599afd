"""Compilations by torch.compile: what to do as one begins, and as it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def around_compilations(
    begun: Callable[[], None], ended: Callable[[], None] = lambda: None, *, anywhere: bool = False
) -> Iterator[None]:
    """Inside, and on this thread or anywhere, these are called; not for compilations within or beside another one."""
    # Where nobody has imported the compiler, nothing is compiled.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    thread, handler = threading.get_ident(), dynamo.callback_handler

    def at_start(_: Any) -> None:
        if anywhere or threading.get_ident() == thread:
            begun()

    def at_end(_: Any) -> None:
        if anywhere or threading.get_ident() == thread:
            ended()

    handler.register_start_callback(at_start)
    handler.register_end_callback(at_end)
    try:
        yield
    finally:
        # torch._dynamo.reset() forgets all.
        if at_start in handler.start_callbacks:
            handler.remove_start_callback(at_start)
        if at_end in handler.end_callbacks:
            handler.remove_end_callback(at_end)
