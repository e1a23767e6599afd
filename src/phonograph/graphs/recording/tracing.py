"""Tracing of instructions: a callback before each instruction of the functions that are looked into."""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from phonograph.graphs.recording.bytecode import Read, reads_of

LooksInto = Callable[[str], bool]


@dataclass(frozen=True)
class Callbacks:
    """What is called while code runs. What they raise is raised where the code runs."""

    enter: Callable[[FrameType], None]
    """A function begins on this thread."""
    step: Callable[[FrameType, Read], None]
    """An instruction is about to read."""
    leave: Callable[[FrameType, Any], None]
    """A function returns a value, or yields one."""


class TracingUnavailableError(Exception):
    """Another tracer is active: a debugger, or coverage."""


def traced(callbacks: Callbacks, looks_into: LooksInto) -> AbstractContextManager[None]:
    """Inside, functions in files that are looked into are followed."""
    if sys.gettrace() is not None:
        raise TracingUnavailableError("a debugger, or coverage, has Python's trace function")
    if sys.version_info >= (3, 12):
        return _monitored(callbacks, looks_into)
    return _traced(callbacks, looks_into)


@contextmanager
def _traced(callbacks: Callbacks, looks_into: LooksInto) -> Iterator[None]:
    steps: dict[int, tuple[CodeType, Any]] = {}  # the code is kept, so that its identity is not given to another

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        found = steps.get(id(code))
        if found is None:
            is_left_out = not looks_into(code.co_filename) or code.co_name == "<module>"
            found = steps[id(code)] = code, None if is_left_out else _stepping(reads_of(code), callbacks)
        if found[1] is not None:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            callbacks.enter(frame)
        return found[1]

    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(None)


def _stepping(reads: dict[int, Read], callbacks: Callbacks) -> Any:
    def on_step(frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            read = reads.get(frame.f_lasti)
            if read is not None:
                callbacks.step(frame, read)
        elif event == "return":
            callbacks.leave(frame, arg)
        return on_step

    return on_step


@contextmanager
def _monitored(callbacks: Callbacks, looks_into: LooksInto) -> Iterator[None]:
    """Python 3.12 and later. Events are enabled for all code at once: code that is instrumented while it begins would
    miss its first instructions. A generator is entered at each resumption, as by a trace."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    handlers = _handlers(monitoring, callbacks, looks_into)
    with _own_tool(monitoring) as tool:
        try:
            for event, handler in handlers.items():
                monitoring.register_callback(tool, event, handler)
            monitoring.restart_events()
            monitoring.set_events(tool, functools.reduce(operator.or_, handlers))
            yield
        finally:
            monitoring.set_events(tool, 0)
            for event in handlers:
                monitoring.register_callback(tool, event, None)


def _handlers(monitoring: Any, callbacks: Callbacks, looks_into: LooksInto) -> dict[int, Callable[..., Any]]:
    """By event, what is called for it; code that is left out is not asked about again."""
    thread, events = threading.get_ident(), monitoring.events

    def is_left_out(code: CodeType) -> bool:
        return not looks_into(code.co_filename) or code.co_name == "<module>"

    def on_start(code: CodeType, offset: int) -> Any:
        if is_left_out(code):
            return monitoring.DISABLE
        if threading.get_ident() == thread:
            callbacks.enter(sys._getframe(1))
        return None

    def on_instruction(code: CodeType, offset: int) -> Any:
        read = None if is_left_out(code) else reads_of(code).get(offset)
        if read is None:
            return monitoring.DISABLE
        if threading.get_ident() == thread:
            callbacks.step(sys._getframe(1), read)
        return None

    def on_return(code: CodeType, offset: int, value: Any) -> Any:
        if is_left_out(code):
            return monitoring.DISABLE
        if threading.get_ident() == thread:
            callbacks.leave(sys._getframe(1), value)
        return None

    ends = {events.PY_RETURN: on_return, events.PY_YIELD: on_return}
    starts = {events.PY_START: on_start, events.PY_RESUME: on_start}
    return {**starts, **ends, events.INSTRUCTION: on_instruction}


_one_at_a_time = threading.Lock()
"""Events belong to the whole process: where another tool comes and goes, code that is running misses some of its own.
Nobody waits for it: captures of several threads may wait for each other."""


@contextmanager
def _own_tool(monitoring: Any) -> Iterator[int]:
    """A tool number of `sys.monitoring` that nobody else has."""
    if not _one_at_a_time.acquire(blocking=False):
        raise TracingUnavailableError("another capture in this process is being traced")
    try:
        # The others are for debuggers, coverage, profilers and optimizers.
        tool = next((one for one in (3, 4) if monitoring.get_tool(one) is None), None)
        if tool is None:
            raise TracingUnavailableError("no tool number of sys.monitoring is free")
        monitoring.use_tool_id(tool, "phonograph facts")
        try:
            yield tool
        finally:
            monitoring.free_tool_id(tool)
    finally:
        _one_at_a_time.release()
