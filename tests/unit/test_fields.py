"""Reading and replacing fields: batches of every kind are copied, never modified."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from phonograph.errors import LoadError
from phonograph.graphs.inputs.fields import expose, fetch


@dataclass
class Plain:
    ids: Any
    other: Any = "kept"

    def doubled(self) -> Any:
        return self.ids * 2


@dataclass(frozen=True)
class Frozen:
    ids: Any
    other: Any = "kept"


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    ids: Any
    other: Any = "kept"


class Slotted:
    __slots__ = ("ids", "other")

    def __init__(self, ids: Any, other: Any = "kept") -> None:
        self.ids, self.other = ids, other


class DictAndSlots(Slotted):
    """Has `other` in a slot and, being a subclass without __slots__, the rest in a __dict__."""


class DictSubclass(dict[str, Any]):
    label = "mine"


class Tuple(NamedTuple):
    ids: Any
    other: Any = "kept"


class NeedsArguments:
    def __new__(cls, *args: Any, **more: Any) -> NeedsArguments:
        assert args or more, "made without its arguments"
        return super().__new__(cls)

    def __init__(self, ids: Any, other: Any = "kept") -> None:
        self.ids, self.other = ids, other

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.ids,)


class Watchful(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        assert name not in vars(self), "changed after it was made"
        super().__setattr__(name, value)


KINDS: dict[str, Callable[..., Any]] = {
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "frozen dataclass with slots": FrozenSlots,
    "namespace": SimpleNamespace,
    "dict": dict,
    "dict subclass": DictSubclass,
    "ordered dict": OrderedDict,
    "user dict": UserDict,
    "slots": Slotted,
    "dict and slots": DictAndSlots,
    "named tuple": Tuple,
    "read-only mapping": lambda **fields: MappingProxyType(fields),
    "a class whose __new__ wants arguments": NeedsArguments,
    "a class that guards its attributes": Watchful,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_gets_the_field_and_the_template_keeps_its_own(kind: str) -> None:
    batch = KINDS[kind](ids=1, other="kept")
    view = expose(batch, {("ids",): 2})
    assert (fetch(batch, {}, ("ids",)), fetch(batch, {}, ("other",))) == (1, "kept")
    assert (fetch(view, {}, ("ids",)), fetch(view, {}, ("other",))) == (2, "kept")
    if kind != "read-only mapping":
        assert type(view) is type(batch)


def test_the_copy_has_the_methods_of_the_batch() -> None:
    assert expose(Plain(1), {("ids",): 4}).doubled() == 8
    assert expose(DictSubclass(ids=1), {("ids",): 4}).label == "mine"


def test_no_constructor_runs() -> None:
    class Counting:
        made = 0

        def __init__(self) -> None:
            Counting.made += 1
            self.ids = 1

    assert expose(Counting(), {("ids",): 2}).ids == 2
    assert Counting.made == 1


def test_a_class_that_says_how_it_is_copied_is_asked() -> None:
    class Copies:
        def __init__(self, ids: int, log: list[str]) -> None:
            self.ids, self.log = ids, log

        def __copy__(self) -> Copies:
            return Copies(self.ids, [*self.log, "copied"])

    assert expose(Copies(1, []), {("ids",): 2}).log == ["copied"]


@pytest.mark.parametrize("kind", [dict, SimpleNamespace, Plain, DictSubclass, Slotted, Frozen])
def test_dotted_fields_copy_the_holders_on_the_way(kind: Any) -> None:
    inner = kind(ids=1, other="inner")
    outer = kind(ids=inner, other="outer")
    before = copy.deepcopy(inner) if kind is not Slotted else None
    view = expose(outer, {("ids", "ids"): 5, ("ids", "other"): 6})
    assert fetch(view, {}, ("ids", "ids")) == 5
    assert fetch(view, {}, ("ids", "other")) == 6
    assert fetch(view, {}, ("other",)) == "outer"
    assert fetch(outer, {}, ("ids",)) is inner
    assert fetch(inner, {}, ("ids",)) == 1
    assert before is None or inner == before


def test_what_is_missing_or_none_reads_as_none() -> None:
    batch = SimpleNamespace(a=None, b={"c": SimpleNamespace(d=3)})
    assert fetch(batch, {}, ("a", "x", "y")) is None
    assert fetch(batch, {}, ("z",)) is None
    assert fetch(batch, {}, ("b", "z")) is None
    assert fetch(batch, {}, ("b", "c", "d")) == 3


def test_a_path_starts_beside_the_batch_where_its_first_part_is_there() -> None:
    batch = SimpleNamespace(pp=SimpleNamespace(hidden=1), other=2)
    kwargs = {"pp": {"hidden": 3}}
    assert fetch(batch, kwargs, ("pp", "hidden")) == 3
    assert fetch(batch, kwargs, ("other",)) == 2


def test_a_holder_that_is_none_stays_none() -> None:
    assert expose(SimpleNamespace(a=None), {("a", "b"): 1}).a is None


def test_a_cached_property_may_be_replaced() -> None:
    class Cached:
        @cached_property
        def ids(self) -> int:
            return 1

    batch = Cached()
    assert expose(batch, {("ids",): 2}).ids == 2
    assert batch.ids == 1


def test_a_field_that_can_not_be_set_is_refused_not_lost() -> None:
    class ReadOnly:
        @property
        def ids(self) -> int:
            return 1

    with pytest.raises(LoadError, match=r"'ids': ReadOnly .*read-only property"):
        expose(ReadOnly(), {("ids",): 2})
    with pytest.raises(LoadError, match=r"'more': Slotted .*__slots__"):
        expose(Slotted(1), {("more",): 2})
