"""State that a body keeps in unusual places: attributes of containers, modules that it imports, closures of methods.

Each is refused by name, and put back."""

from __future__ import annotations

import collections
import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from phonograph import Slot, graphed
from phonograph.graphs.progress import silent

Made = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]
"""A body, and what tells its state."""


class Hits(dict[str, float]):
    hits = 0

    def __missing__(self, key: str) -> float:
        self.hits += 1
        return 2.0


class Many(list[int]):
    hits = 0


class Ordered(collections.OrderedDict[str, int]):
    hits = 0


class Pair(tuple[int, ...]):
    hits = 0


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """One that nobody but the body imports."""
    made: Any = types.ModuleType("phonograph_test_state")
    made.count, made.calls = 0, {}
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def counted(container: Any) -> Made:
    def body(x: torch.Tensor) -> torch.Tensor:
        container.hits += 1
        return x * 2

    return body, lambda: container.hits


def of_missing() -> Made:
    container = Hits()
    return lambda x: x * container["a"], lambda: container.hits


def of_a_module(module: Any) -> Made:
    def body(x: torch.Tensor) -> torch.Tensor:
        import phonograph_test_state  # type: ignore[import-not-found]

        phonograph_test_state.count += 1
        return x * 2

    return body, lambda: module.count


def of_a_name_in_a_module(module: Any) -> Made:
    def body(x: torch.Tensor) -> torch.Tensor:
        from phonograph_test_state import calls

        calls["n"] = calls.get("n", 0) + 1
        return x * 2

    return body, lambda: dict(module.calls)


def of_a_module_by_its_name(module: Any) -> Made:
    def body(x: torch.Tensor) -> torch.Tensor:
        sys.modules["phonograph_test_state"].count += 1  # type: ignore[attr-defined]
        return x * 2

    return body, lambda: module.count


def of_a_module_by_importlib(module: Any) -> Made:
    def body(x: torch.Tensor) -> torch.Tensor:
        importlib.import_module("phonograph_test_state").count += 1  # type: ignore[attr-defined]
        return x * 2

    return body, lambda: module.count


def of_a_context() -> Made:
    count = [0]

    class Context:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            count[0] += 1

    def body(x: torch.Tensor) -> torch.Tensor:
        with Context():
            return x * 2

    return body, lambda: list(count)


def of_a_constructor() -> Made:
    count = [0]

    class Scale:
        def __init__(self) -> None:
            count[0] += 1

    def body(x: torch.Tensor) -> torch.Tensor:
        Scale()
        return x * 2

    return body, lambda: list(count)


def refused(made: Made) -> None:
    body, state = made
    run = graphed(body, slots=[Slot("x", ("rows", 4), torch.float32)], bucketed="rows", buckets=[2], device="cpu")
    before = state()
    report = run.capture(silent)
    assert len(report.failures) == 1
    assert "in every run" in str(report.failures[0].error)
    assert state() == before, "and put back"
    body(torch.ones(2, 4))
    assert state() != before


@pytest.mark.parametrize("kind", [Hits, Many, Ordered, Pair])
def test_attributes_of_containers(kind: type) -> None:
    refused(counted(kind()))


def test_what_a_container_does_for_a_missing_key() -> None:
    refused(of_missing())


@pytest.mark.parametrize(
    "make", [of_a_module, of_a_name_in_a_module, of_a_module_by_its_name, of_a_module_by_importlib]
)
def test_modules_that_the_body_imports(make: Callable[[Any], Made], module: types.ModuleType) -> None:
    refused(make(module))


@pytest.mark.parametrize("make", [of_a_context, of_a_constructor])
def test_closures_of_methods_that_python_calls(make: Callable[[], Made]) -> None:
    refused(make())


def test_the_bound_method_of_an_iterator() -> None:
    """Its position can't be put back, so that nothing is run."""
    numbers = itertools.count()
    following = numbers.__next__

    def body(x: torch.Tensor) -> torch.Tensor:
        following()
        return x * 2

    run = graphed(body, slots=[Slot("x", ("rows", 4), torch.float32)], bucketed="rows", buckets=[2], device="cpu")
    assert run.capture(silent).failures
    assert next(numbers) == 0


def test_containers_that_nobody_writes_are_recorded() -> None:
    table, many = Hits({"a": 2.0}), Many([1, 2])

    def body(x: torch.Tensor) -> torch.Tensor:
        import math

        return x * table["a"] + len(many) + math.pi

    run = graphed(body, slots=[Slot("x", ("rows", 4), torch.float32)], bucketed="rows", buckets=[2], device="cpu")
    assert not run.capture(silent).failures
    x = torch.randn(2, 4)
    assert torch.equal(run(x=x), body(x))
    assert run.verify().ok
