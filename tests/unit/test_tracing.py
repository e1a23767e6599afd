"""Tracing: the same functions and reads are seen on every Python, whatever it traces with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phonograph.graphs.recording import facts
from phonograph.graphs.recording.reads import Reads
from phonograph.graphs.recording.tracing import Callbacks, TracingUnavailableError, traced

IS_MONITORED = sys.version_info >= (3, 12)


class Thing:
    kind = 1

    def __init__(self) -> None:
        self.size = 2


THING = Thing()


def plain() -> int:
    return THING.kind


def generator() -> Iterator[int]:
    yield THING.kind
    yield THING.size


def seen(body: Callable[[], object]) -> tuple[list[str], list[str]]:
    """The functions that began, and the attributes that were read."""
    entered, read = list[str](), list[str]()
    callbacks = Callbacks(
        lambda frame: entered.append(frame.f_code.co_name),
        lambda frame, one: read.append(str(one)) if one.kind == "attribute" else None,
        lambda frame, value: None,
    )
    with traced(callbacks, lambda file: file == __file__):
        body()
    return entered, read


def test_every_run_of_a_function_is_seen() -> None:
    for _ in range(3):
        assert seen(plain) == (["plain"], ["THING.kind"])


def test_a_generator_that_goes_on_is_seen() -> None:
    begun = generator()
    next(begun)
    assert seen(lambda: next(begun)) == (["<lambda>", "generator"], ["THING.size"])


def test_reads_after_an_exception_are_seen() -> None:
    def body() -> int:
        try:
            return int(THING.nothing)  # type: ignore[attr-defined]
        except AttributeError:
            return THING.size

    assert seen(body)[1] == ["THING.nothing", "THING.size"]


def test_reads_of_a_comprehension_are_seen() -> None:
    def body(things: list[Thing]) -> list[int]:
        return [thing.size for thing in things]

    assert seen(lambda: body([THING, THING]))[1] == ["thing.size", "thing.size"]


def test_other_threads_are_not_seen() -> None:
    def body() -> None:
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()

    assert "plain" not in seen(body)[0]


def test_what_a_callback_raises_is_raised_and_tracing_ends() -> None:
    def fail(*_: Any) -> None:
        raise LookupError("here")

    callbacks = Callbacks(lambda _: None, fail, lambda *_: None)
    with pytest.raises(LookupError, match="here"), traced(callbacks, lambda file: file == __file__):
        plain()
    assert seen(plain) == (["plain"], ["THING.kind"])


@pytest.mark.skipif(not IS_MONITORED, reason="sys.monitoring came with Python 3.12")
def test_where_no_tool_number_is_free_it_says_so_and_takes_nobodys() -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    monitoring.use_tool_id(3, "another")
    try:
        assert seen(plain) == (["plain"], ["THING.kind"])
        monitoring.use_tool_id(4, "one more")
        with pytest.raises(TracingUnavailableError, match="no tool number"):
            seen(plain)
        assert (monitoring.get_tool(3), monitoring.get_tool(4)) == ("another", "one more")
    finally:
        monitoring.free_tool_id(3)
        monitoring.free_tool_id(4)


@pytest.mark.skipif(not IS_MONITORED, reason="a trace is one thread's own")
def test_what_another_thread_traces_at_the_same_time_loses_no_reads() -> None:
    refused = list[TracingUnavailableError]()

    def meanwhile() -> None:
        try:
            seen(plain)
        except TracingUnavailableError as error:
            refused.append(error)

    def body() -> int:
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        return THING.size + plain() + THING.kind

    read = [one for one in seen(body)[1] if one.startswith("THING.")]
    assert read == ["THING.size", "THING.kind", "THING.kind"]
    assert "another capture" in str(refused[0])
    assert seen(plain) == (["plain"], ["THING.kind"])


def test_the_self_test_says_no_where_the_recorder_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise IndexError("frames are unlike those that are known")

    monkeypatch.setattr(Reads, "_read", fail)
    assert not facts.records_reads.__wrapped__()
    monkeypatch.setattr(Reads, "_read", lambda *_: None)
    assert not facts.records_reads.__wrapped__()


def test_what_functions_return_is_seen() -> None:
    returned = list[object]()
    callbacks = Callbacks(lambda _: None, lambda *_: None, lambda frame, value: returned.append(value))
    with traced(callbacks, lambda file: file == __file__):
        assert plain() == THING.kind
    assert returned == [THING.kind]
