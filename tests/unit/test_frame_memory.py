"""Frame memory: the stack of a frame is read as it is, on every Python that is served."""

from __future__ import annotations

import contextlib
import dis
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from phonograph.graphs.recording import frame_memory
from phonograph.graphs.recording.bytecode import Read, reads_of
from phonograph.graphs.recording.frame_memory import EMPTY, is_in_passing, memory_of
from phonograph.graphs.recording.stack_depths import depths_of
from phonograph.graphs.recording.tracing import Callbacks, traced


@dataclass
class Point:
    x: int = 1
    y: list[int] = field(default_factory=list)


def patterns(value: Any) -> Any:
    match value:
        case Point(x=1, y=[]):
            return 1
        case {"a": found, **rest}:
            return found, rest
        case [first, *middle, last]:
            return first, middle, last
        case "one" | "two":
            return 2
    return value


KEPT, NAMED = [1, 2], {"k": 1}


def counted(*values: int, **named: int) -> int:
    return len(values) + len(named)


def handlers(wanted: int) -> int:
    for index in range(4):
        try:
            with contextlib.suppress(KeyError):
                if index == wanted:
                    raise KeyError(index)
                if index == 2:
                    return index
            continue
        finally:
            wanted += counted(*KEPT, **{**NAMED, "more": index})
    return wanted


def inner() -> Iterator[int]:
    yield from (one for one in (1, 2))
    yield 3


def generators() -> list[int]:
    return [*inner(), *(one * two for one in inner() for two in range(one) if 0 < two < 3)]


def expressions(one: int, two: str) -> Any:
    text = f"{one!r:>4}{two}" if one and two else two or one
    *rest, last = [text, {"k": one}, (two,)]
    return [rest, last, {**NAMED, "b": two}, sorted([3, one], key=lambda x: -x), (kept := two) * len(kept)]


def body() -> None:
    for value in (Point(), {"a": 1, "b": 2}, [1, 2, 3, 4], "two", 5):
        patterns(value)
    handlers(1)
    handlers(7)
    generators()
    expressions(3, "x")


def test_locals_lie_on_the_stack_where_depths_say() -> None:
    """After an instruction that puts a local there, the next one finds that very object on top."""
    compared, wrong = set[str](), list[str]()

    def after_loads(code: Any) -> Iterator[tuple[int, str, str]]:
        lines = list(dis.get_instructions(code))
        for one, after in itertools.pairwise(lines):
            if one.opname == "LOAD_FAST" and not after.is_jump_target and one.argval not in code.co_cellvars:
                yield after.offset, one.argval, after.opname

    def step(frame: FrameType, read: Read) -> None:
        memory = memory_of(frame)
        assert memory is not None
        depths = depths_of(frame.f_code)
        for offset, name, opname in after_loads(frame.f_code):
            if offset == read.offset and name in frame.f_locals:
                compared.add(opname)
                if memory.on_stack(depths[offset] - 1) is not frame.f_locals[name]:
                    wrong.append(f"{frame.f_code.co_name} {opname} {name}")

    with traced(Callbacks(lambda frame: None, step, lambda frame, value: None), lambda file: file == __file__):
        body()
    assert not wrong
    assert len(compared) >= 3, compared


def test_depths_are_known_of_all_that_runs() -> None:
    missed = list[str]()

    def step(frame: FrameType, read: Read) -> None:
        if read.offset not in depths_of(frame.f_code):
            missed.append(f"{frame.f_code.co_name} {read}")

    with traced(Callbacks(lambda frame: None, step, lambda frame, value: None), lambda file: file == __file__):
        body()
    assert not missed


def operands_of(function: Any, kind: str) -> list[tuple[Any, bool]]:
    """What instructions of a kind find on the stack, and whether nobody else has it."""
    found = list[tuple[Any, bool]]()

    def step(frame: FrameType, read: Read) -> None:
        memory = memory_of(frame)
        assert memory is not None
        if read.kind == kind and read.base is not None:
            is_alone = is_in_passing(memory, read.base.at)
            found.append((memory.on_stack(read.base.at), is_alone))

    with traced(Callbacks(lambda frame: None, step, lambda frame, value: None), lambda file: file == __file__):
        function()
    return found


def test_results_of_calls_are_found_and_told_from_what_others_hold() -> None:
    kept = Point(x=7)

    def make() -> Point:
        return Point(x=5)

    def get() -> Point:
        return kept

    def read() -> int:
        return make().x + get().x + (kept if kept else make()).x

    found = operands_of(read, "attribute")
    assert [(one.x, is_alone) for one, is_alone in found if isinstance(one, Point)] == [
        (5, True),
        (7, False),
        (7, False),
    ]


def test_a_frame_has_its_function_and_its_cells() -> None:
    def made(number: int) -> Any:
        def get() -> Any:
            memory = memory_of(sys._getframe())
            assert memory is not None
            return memory.function, memory.cells("number"), memory.cells("other"), number

        return get

    one, two = made(1), made(2)
    assert one()[0] is one
    assert two()[0] is two
    assert one()[1] == [one.__closure__[0]]
    assert two()[1] == [two.__closure__[0]]
    assert one()[2] == []


def test_an_empty_place_is_told() -> None:
    found = list[Any]()

    def step(frame: FrameType, read: Read) -> None:
        memory = memory_of(frame)
        if memory is not None and read.kind == "call" and read.base is not None:
            found.extend([memory.on_stack(read.base.at), memory.on_stack(read.base.at + 1)])

    with traced(Callbacks(lambda frame: None, step, lambda frame, value: None), lambda file: file == __file__):
        patterns(5)
        expressions(1, "x")
    assert sum(one is EMPTY for one in found) >= 1


def test_instructions_with_large_arguments_are_read() -> None:
    names = "\n".join(f"    thing.a{index} = {index}" for index in range(300))
    space: dict[str, Any] = {}
    exec(f"def many(thing):\n{names}\n    *rest, last = thing.items\n    return thing.zzz", space)
    read = [str(one) for one in reads_of(space["many"].__code__).values()]
    assert "thing.zzz" in read
    prefixed = [one for one in dis.get_instructions(space["many"].__code__) if one.opname == "EXTENDED_ARG"]
    assert {one.offset for one in prefixed} & set(reads_of(space["many"].__code__))


def test_a_python_with_other_frames_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frame_memory._layout.cache_clear()
    monkeypatch.setattr(frame_memory, "_HEADER", object.__basicsize__ + 8)
    try:
        assert memory_of(sys._getframe()) is None
    finally:
        frame_memory._layout.cache_clear()
