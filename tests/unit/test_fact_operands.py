"""Facts that are read of what lies on the stack: objects made in passing, results of calls, patterns, missing names."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fact_bodies import Make, X, assert_seen_at_once, made, of
from phonograph import Replay
from phonograph.graphs.recording import frame_memory
from phonograph.graphs.recording.functions import Functions
from phonograph.graphs.recording.reads import Reads


class Config:
    """Values that a body reads."""

    extra: float

    __match_args__ = ("scale",)

    def __init__(self) -> None:
        self.scale, self.mode, self.index = 2.0, "a", 1
        self.sizes, self.table = [1.0, 2.0, 3.0], {"k1": 2.0}
        self.below = SimpleNamespace(value=2.0)
        self.parts = [SimpleNamespace(order=1, value=2.0), SimpleNamespace(order=2, value=3.0)]
        self.flag, self.other = True, SimpleNamespace(value=5.0)

    def itself(self) -> Config:
        return self

    @classmethod
    def over(cls, config: Config) -> Wrapper:
        return Wrapper(config)


class Wrapper:
    def __init__(self, config: Config) -> None:
        self.config, self.scale = config, config.scale

    def value(self) -> float:
        return self.config.scale


def config(body: Callable[[Config, torch.Tensor], Any], change: Callable[[Config], object]) -> Make:
    return of(Config(), body, change)


def scale(c: Config) -> None:
    c.scale = 9.0


def below(c: Config) -> None:
    c.below.value = 9.0


def part(c: Config) -> None:
    c.parts[1].value = 9.0


def size(c: Config) -> None:
    c.sizes[1] = 9.0


def entry(c: Config) -> None:
    c.table["k1"] = 9.0


def generated(c: Config) -> Iterator[Config]:
    yield c


def reduced(c: Any) -> Any:
    return functools.reduce(getattr, ["below", "value"], c)


OTHER = Config()
OTHER.sizes, OTHER.scale = [2.0], 5.0
PASSING: dict[str, Make] = {
    "a method of a temporary": config(lambda c, x: x * Wrapper(c).value(), scale),
    "an attribute of a temporary": config(lambda c, x: x * Wrapper(c).scale, scale),
    "below a temporary": config(lambda c, x: x * Wrapper(c).config.scale, scale),
    "a temporary of a classmethod": config(lambda c, x: x * Config.over(c).config.scale, scale),
    "a namespace": config(lambda c, x: x * SimpleNamespace(c=c).c.scale, scale),
    "an item of a list that is made": config(lambda c, x: x * [c][0].scale, scale),
    "an item of a tuple that is made": config(lambda c, x: x * (c, x)[0].scale, scale),
    "an item of a dict that is made": config(lambda c, x: x * {"c": c}["c"].scale, scale),
    "a copy": config(lambda c, x: x * copy.copy(c).scale, scale),
    "a deep copy": config(lambda c, x: x * copy.deepcopy(c).table["k1"], entry),
    "what a partial calls": config(lambda c, x: x * functools.partial(getattr, c)("scale"), scale),
    "__getattribute__": config(lambda c, x: x * c.__getattribute__("scale"), scale),
    "the first of an iterator": config(lambda c, x: x * next(iter([c, c])).scale, scale),
    "what a generator yields": config(lambda c, x: x * next(generated(c)).scale, scale),
    "the largest": config(lambda c, x: x * max(c.parts, key=lambda p: p.order).value, part),
    "the last in an order": config(lambda c, x: x * sorted(c.parts, key=lambda p: p.order)[-1].value, part),
    "an item of a slice": config(lambda c, x: x * c.parts[1:][0].value, part),
    "an item of a sum": config(lambda c, x: x * (c.parts + c.parts)[1].value, part),
    "an item of a comprehension": config(lambda c, x: x * [p for p in c.parts if p.order][1].value, part),
    "one of two": config(lambda c, x: x * (c.below if c.flag else c.other).value, below),
    "the one that is there": config(lambda c, x: x * (None or c.below).value, below),
    "an item of what is returned": config(lambda c, x: x * [c.itself()][0].itself().below.value, below),
    "lists in a list that is made": config(lambda c, x: x * len(str([c.sizes, 1])), lambda c: c.sizes.append(1.0)),
    "lists in a tuple that is made": config(lambda c, x: x * len(repr((c.sizes, 1))), lambda c: c.sizes.append(1.0)),
    "by attrgetter, behind map": config(lambda c, x: x * sum(map(operator.attrgetter("value"), c.parts)), part),
    "lists that a generator yields": config(
        lambda c, x: x * sum(itertools.chain.from_iterable(one.sizes for one in [c])), size
    ),
    "lists that a key function returns": config(
        lambda c, x: x * max([c, OTHER], key=lambda one: one.sizes).scale,
        lambda c: operator.setitem(c.sizes, 0, 9.0),
    ),
    "getattr by reduce": config(lambda c, x: x * reduced(c), below),
    "a method of a getter": config(lambda c, x: x * operator.attrgetter("below.value")(c), below),
}

# -- patterns, unpacking, keys ------------------------------------------------------------------------------------


def by_class(c: Any, x: torch.Tensor) -> Any:
    match c:
        case Config(below=SimpleNamespace(value=found), mode="a"):
            return x * found
    return x


def by_place(c: Any, x: torch.Tensor) -> Any:
    match c:
        case Config(2.0):
            return x * 2
    return x * 3


def by_missing_name(c: Any, x: torch.Tensor) -> Any:
    match c:
        case Config(extra=found):
            return x * found
    return x


def by_key(c: Config, x: torch.Tensor) -> Any:
    match c.table:
        case {"extra": found}:
            return x * found
        case {"k1": found, **rest}:
            return x * found * (len(rest) + 1)
    return x


def by_sequence(c: Config, x: torch.Tensor) -> Any:
    match c.sizes:
        case [1.0, found, _]:
            return x * found
    return x * 7


def unpacked(c: Config, x: torch.Tensor) -> Any:
    first, *rest = c.sizes
    return x * first * rest[0]


def unpacked_from_the_end(c: Config, x: torch.Tensor) -> Any:
    *_, second, _last = c.sizes
    return x * second


def delegated(c: Config, x: torch.Tensor) -> Any:
    def values() -> Iterator[float]:
        yield from c.sizes

    return x * sum(values())


def gathered(c: Config, x: torch.Tensor) -> Any:
    found: list[float] = []
    found.extend(c.sizes)
    return x * found[1]


def united(c: Config, x: torch.Tensor) -> Any:
    found: dict[str, float] = {}
    found.update(c.table)
    return x * found["k1"]


SHAPES: dict[str, Make] = {
    "a pattern of a class": config(by_class, below),
    "a pattern of a class, by value": config(by_class, lambda c: setattr(c, "mode", "b")),
    "a pattern by place": config(by_place, scale),
    "a pattern of a name that is missing": config(by_missing_name, lambda c: setattr(c, "extra", 9.0)),
    "a pattern of a key": config(by_key, entry),
    "a pattern of a key that is missing": config(by_key, lambda c: c.table.update(extra=9.0)),
    "the rest of a pattern": config(by_key, lambda c: c.table.update(more=9.0)),
    "a pattern of a sequence": config(by_sequence, size),
    "a pattern of a sequence, by length": config(by_sequence, lambda c: c.sizes.append(1.0)),
    "a starred name": config(unpacked, size),
    "a starred name first": config(unpacked_from_the_end, size),
    "yield from": config(delegated, size),
    "extend": config(gathered, size),
    "update": config(united, entry),
    "a sequence of arguments": config(lambda c, x: x * max(*c.sizes), size),
    "arguments of getattr": config(lambda c, x: x * getattr(*(c, "scale")), scale),
    "a key with a format": config(lambda c, x: x * c.table[f"k{c.index:d}"], entry),
    "a key by a call": config(lambda c, x: x * c.table[" k1".strip()], entry),
    "a key by a call, missing": config(
        lambda c, x: x * c.table.get("K2".lower(), 1.0), lambda c: c.table.update(k2=9.0)
    ),
    "a key that is a class": config(
        lambda c, x: x * c.table.get(type(x), 1.0),  # type: ignore[call-overload]
        lambda c: operator.setitem(c.table, torch.Tensor, 9.0),  # type: ignore[misc]
    ),
}

# -- names that are missing, order --------------------------------------------------------------------------------


class Empty:
    """Has nothing."""


def caught(thing: Any, x: torch.Tensor) -> Any:
    try:
        return x * thing.extra
    except AttributeError:
        return x


def missing(on: str) -> Make:
    """A name that nothing has, which is then given to an object, its class or that one's parent."""

    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        class Parent:
            pass

        class Child(Parent):
            pass

        thing = Child()
        owner = {"object": thing, "class": Child, "parent": Parent}[on]
        return (lambda x: caught(thing, x) * getattr(Child, "other", 1.0)), lambda: setattr(owner, "extra", 9.0)

    return make


def module_gets(change: Callable[[nn.Module], object]) -> Make:
    return of(nn.Tanh(), lambda m, x: x * (3 if hasattr(m, "extra") else 2), change)


def missing_global() -> tuple[Callable[..., Any], Callable[[], object]]:
    space: dict[str, Any] = {}
    exec("def step(x):\n    try:\n        return x * K\n    except NameError:\n        return x", space)
    return space["step"], lambda: space.update(K=9.0)


def hidden_builtin() -> tuple[Callable[..., Any], Callable[[], object]]:
    space: dict[str, Any] = {}
    exec("def step(x):\n    return x * max(2.0, 1.0)", space)
    return space["step"], lambda: space.update(max=min)


def reordered(d: Any) -> None:
    d["a"] = d.pop("a")


def in_order(d: Any, x: torch.Tensor) -> Any:
    for value in d.values():
        x = x * 2 + value
    return x


PAIRS = {"a": 1.0, "b": 2.0}
MISSING: dict[str, Make] = {
    **{f"an attribute that its {on} gets": missing(on) for on in ("object", "class", "parent")},
    "a parameter": module_gets(lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(1)))),
    "a buffer": module_gets(lambda m: m.register_buffer("extra", torch.ones(1))),
    "a module": module_gets(lambda m: m.register_module("extra", nn.Tanh())),
    "a global": missing_global,
    "a global that hides a builtin": hidden_builtin,
    "order of a dict": of(PAIRS, in_order, reordered),
    "first key of a dict": of(PAIRS, lambda d, x: x * d[next(iter(d))], reordered),
    "order of an OrderedDict": of(collections.OrderedDict(PAIRS), in_order, lambda d: d.move_to_end("a")),
    "first of an OrderedDict": of(
        collections.OrderedDict(PAIRS), lambda d, x: x * next(iter(d.values())), lambda d: d.move_to_end("a")
    ),
    "a map before others": of(
        collections.ChainMap({"k": 2.0}), lambda m, x: x * m["k"], lambda m: m.maps.insert(0, {"k": 9.0})
    ),
    "keys of a ChainMap": of(
        collections.ChainMap({"k": 2.0}, {}), lambda m, x: x * sum(m[k] for k in m), lambda m: m.maps[1].update(q=1.0)
    ),
}

# -- functions, classes and their methods -------------------------------------------------------------------------


def closures() -> tuple[Callable[..., Any], Callable[[], object]]:
    """Functions of one code, each with a cell of its own."""

    def scaled(number: float) -> Callable[[], float]:
        return lambda: number

    functions: list[Any] = [scaled(one) for one in (1.0, 2.0, 3.0)]
    change = functools.partial(setattr, functions[1].__closure__[0], "cell_contents", 9.0)
    return (lambda x: x * sum(one() for one in functions)), change


def passed_on() -> tuple[Callable[..., Any], Callable[[], object]]:
    """A cell that an inner function shares with the body."""
    number = 2.0

    def change() -> None:
        nonlocal number
        number = 9.0

    def step(x: torch.Tensor) -> Any:
        def inner() -> float:
            return number

        return x * inner()

    return step, change


def function_part(read: Callable[[Any], Any], change: Callable[[Any], object]) -> Make:
    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        number = 2.0

        def function(one: float = 2.0, *, two: float = 2.0) -> float:
            return one * two * number

        function.scale = 2.0  # type: ignore[attr-defined]
        return (lambda x: x * read(function)), lambda: change(function)

    return make


def replaced(name: str, new: Any, read: Callable[[Any, torch.Tensor], Any]) -> Make:
    """A special method of a class is replaced, which the body finds without its name."""

    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        class Thing:
            def __init__(self) -> None:
                self.value = 2.0

            def __add__(self, other: float) -> float:
                return 2.0

            def __call__(self) -> float:
                return 2.0

            def __len__(self) -> int:
                return 2

            def __iter__(self) -> Iterator[float]:
                return iter([2.0])

            def __enter__(self) -> float:
                return 2.0

            def __exit__(self, *_: object) -> None: ...

            def __class_getitem__(cls, key: str) -> float:
                return 2.0

        thing = Thing()
        return (lambda x: read(thing, x)), lambda: setattr(Thing, name, new)

    return make


def entered(thing: Any, x: torch.Tensor) -> Any:
    with thing as value:
        return x * value


def classes_of_a_kind() -> tuple[Callable[..., Any], Callable[[], object]]:
    class Kind(type):
        scale = 2.0

    class Thing(metaclass=Kind):
        pass

    return (lambda x: x * Thing.scale), lambda: setattr(Kind, "scale", 9.0)


def other_class() -> tuple[Callable[..., Any], Callable[[], object]]:
    class One:
        pass

    class Two:
        pass

    thing: Any = One()
    return (lambda x: x * (3 if isinstance(thing, Two) else 2)), lambda: setattr(thing, "__class__", Two)


FUNCTIONS: dict[str, Make] = {
    "cells of functions of one code": closures,
    "a cell that is passed on": passed_on,
    "an attribute": function_part(lambda f: f.scale, lambda f: setattr(f, "scale", 9.0)),
    "defaults": function_part(lambda f: f.__defaults__[0], lambda f: setattr(f, "__defaults__", (9.0,))),
    "defaults by name": function_part(lambda f: f.__kwdefaults__["two"], lambda f: f.__kwdefaults__.update(two=9.0)),
    "a cell": function_part(
        lambda f: f.__closure__[0].cell_contents, lambda f: setattr(f.__closure__[0], "cell_contents", 9.0)
    ),
    "of an operator": replaced("__add__", lambda s, o: 9.0, lambda t, x: x * (t + 1)),
    "of a call": replaced("__call__", lambda s: 9.0, lambda t, x: x * t()),
    "of a length": replaced("__len__", lambda s: 9, lambda t, x: x * len(t)),
    "of an iteration": replaced("__iter__", lambda s: iter([9.0]), lambda t, x: x * sum(t)),
    "of with": replaced("__enter__", lambda s: 9.0, entered),
    "of a class with a key": replaced(
        "__class_getitem__", classmethod(lambda c, k: 9.0), lambda t, x: x * type(t)["k"]
    ),
    "of making one": replaced("__init__", lambda s: setattr(s, "value", 9.0), lambda t, x: x * type(t)().value),
    "of a metaclass": classes_of_a_kind,
    "another class": other_class,
}


CASES = [*PASSING.items(), *SHAPES.items(), *MISSING.items(), *FUNCTIONS.items()]


@pytest.mark.parametrize("make", [make for _, make in CASES], ids=[name for name, _ in CASES])
def test_cases_are_bodies(make: Make) -> None:
    """Each change changes what its body gives: else that it is seen would say nothing."""
    body, change = make()
    before = body(X)
    change()
    assert not torch.equal(before, body(X))


@pytest.mark.parametrize("name", PASSING)
def test_what_is_read_of_an_object_in_passing_is_seen(name: str) -> None:
    assert_seen_at_once(PASSING[name])


@pytest.mark.parametrize("name", SHAPES)
def test_what_patterns_and_keys_read_is_seen(name: str) -> None:
    assert_seen_at_once(SHAPES[name])


@pytest.mark.parametrize("name", MISSING)
def test_a_name_that_comes_and_an_order_that_changes_are_seen(name: str) -> None:
    assert_seen_at_once(MISSING[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_or_class_holds_is_seen(name: str) -> None:
    assert_seen_at_once(FUNCTIONS[name])


# -- what nobody reads makes nothing stale --------------------------------------------------------------------------


def counted(c: Any) -> None:
    c.hits = getattr(c, "hits", 0) + 1


BESIDE: dict[str, Make] = {
    "beside a temporary": config(lambda c, x: x * Wrapper(c).value(), counted),
    "another key": config(lambda c, x: x * c.table[" k1".strip()], lambda c: c.table.update(hits=1.0)),
    "a key beside a pattern": config(
        lambda c, x: x * operator.itemgetter("k1")(c.table), lambda c: c.table.update(hits=1.0)
    ),
    "an attribute beside a pattern": config(by_class, counted),
    "another item": config(lambda c, x: x * c.sizes[0], size),
    "another object of a list": config(lambda c, x: x * next(iter([c.parts[0]])).value, part),
    "a branch that is not taken": config(
        lambda c, x: x * (c.below if c.flag else c.other).value, lambda c: setattr(c.other, "value", 9.0)
    ),
    "what is stored, not read": config(lambda c, x: x * len([c.sizes is None, x]), size),
    "another name that is missing": config(lambda c, x: x * getattr(c, "extra", 2.0), counted),
    "what is handed on": config(
        lambda c, x: x * tuple(one.table for one in (c, c))[1]["k1"], lambda c: c.table.update(hits=1.0)
    ),
    "an equal list": config(lambda c, x: x * sum(c.sizes), lambda c: setattr(c, "sizes", [1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_read_makes_nothing_stale(name: str) -> None:
    body, change = BESIDE[name]()
    run = made(body)
    for _ in range(3):
        found = run(X)
        assert isinstance(run.runner.last, Replay), run.runner.last
        assert torch.equal(found, body(X))
        change()


def test_what_a_list_in_passing_holds_is_let_go() -> None:
    """Else a warm-up would keep the activations of every layer until the next one is over."""
    made_of: list[weakref.ref[Any]] = []

    def noted(one: torch.Tensor) -> torch.Tensor:
        made_of.append(weakref.ref(one))
        return one

    def step(x: torch.Tensor) -> Any:
        return torch.cat([noted(x * 2), x]) + sum(one.sum() for one in [noted(x * 3)])

    reads = Reads(Functions(), looks_into=lambda file: file == __file__)
    with reads.recording():
        step(X)
    assert [one() for one in made_of] == [None, None]


def test_without_frame_memory_expressions_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Python whose frames are not known less is seen, and that is said."""
    monkeypatch.setattr(frame_memory, "_layout", lambda: None)
    kept = Config()
    run = made(lambda x: x * kept.scale * kept.itself().below.value, buckets=(4,))
    assert any("frames of this Python" in note for note in run.facts().notes)
    run(X)
    assert isinstance(run.runner.last, Replay)
    kept.below.value = 9.0
    run(X)
    assert not isinstance(run.runner.last, Replay)
