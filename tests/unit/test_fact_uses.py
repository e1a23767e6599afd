"""Facts about containers, computed names and keys, and what functions return; and objects replaced by equal ones."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import operator
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fact_bodies import Make, X, made, of
from phonograph.graphs.recording.rebinding import rebound

log = logging.getLogger("test")


@dataclass
class Config:
    scale: float = 2.0
    table: dict[str, Any] = field(default_factory=lambda: {"a": {"b": [1.0, 2.0]}})


class Owner:
    """Has what it holds by a property, a method and an index."""

    def __init__(self) -> None:
        self.held = Config()
        self.items = [2.0, 3.0]

    @property
    def config(self) -> Config:
        return self.held

    def get(self) -> Config:
        return self.held

    def __getitem__(self, index: int) -> float:
        return self.items[index]


class Keys(dict[str, Any]):
    """A dict whose keys are attributes."""

    __getattr__ = dict.__getitem__

    def __deepcopy__(self, memo: Any) -> Keys:
        return Keys(self)


class Modal(torch.nn.Module):
    """Reads an attribute whose name it puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_a, self.scale_b, self.mode = 2.0, 3.0, "a"

    def forward(self, x: torch.Tensor) -> Any:
        return x * getattr(self, f"scale_{self.mode}")


_variable: ContextVar[float] = ContextVar("test_variable", default=2.0)
_config = Config()


def current_config() -> Config:
    return _config


SEEN: dict[str, Make] = {
    "a list in dicts in a dataclass": of(
        Config(),
        lambda c, x: x * sum(c.table["a"]["b"][i] for i in range(2)),
        lambda c: operator.setitem(c.table["a"]["b"], 1, 9.0),
    ),
    "items()": of({"a": 2.0}, lambda d, x: x * sum(v for _, v in d.items()), lambda d: d.update(a=5.0)),
    "objects in values()": of(
        {"a": Config()}, lambda d, x: x * next(iter(d.values())).scale, lambda d: setattr(d["a"], "scale", 5.0)
    ),
    "get of get": of({"s": {"t": 2.0}}, lambda d, x: x * d.get("s", {}).get("t", 1.0), lambda d: d["s"].update(t=5.0)),
    "unpacked into a call": of({"alpha": 2.0}, lambda d, x: torch.add(x, x, **d), lambda d: d.update(alpha=5.0)),
    "passed to torch": of([torch.ones(4)], lambda a, x: x + torch.stack(a).sum(0), lambda a: a.append(torch.ones(4))),
    "a key that appears": of({}, lambda d, x: x * 3 if "z" in d else x, lambda d: d.update(z=1)),
    "a member that appears": of({1}, lambda s, x: x * 3 if 5 in s else x, lambda s: s.add(5)),
    "a list no longer empty": of([], lambda a, x: x * 3 if a else x, lambda a: a.append(1)),
    "len": of([1], lambda a, x: x * len(a), lambda a: a.append(1)),
    "a slice": of([2.0, 1.0], lambda a, x: x * sum(a[:1]), lambda a: operator.setitem(a, 0, 5.0)),
    "compared": of([1], lambda a, x: x * 3 if a == [1] else x, lambda a: a.append(1)),
    "a deque": of(collections.deque([1.0]), lambda q, x: x * q[-1], lambda q: q.append(4.0)),
    "numpy": of(np.array([1.0]), lambda a, x: x * float((a * 2)[0]), lambda a: operator.setitem(a, 0, 9.0)),
    "a bytearray": of(bytearray(b"a"), lambda a, x: x * a[0], lambda a: operator.setitem(a, 0, 5)),
    "vars()": of(SimpleNamespace(s=2.0), lambda n, x: x * vars(n)["s"], lambda n: setattr(n, "s", 5.0)),
    "__dict__": of(SimpleNamespace(s=2.0), lambda n, x: x * n.__dict__["s"], lambda n: setattr(n, "s", 5.0)),
    "attrgetter": of(
        SimpleNamespace(s=2.0), lambda n, x: x * operator.attrgetter("s")(n), lambda n: setattr(n, "s", 5.0)
    ),
    "asdict": of(Config(), lambda c, x: x * dataclasses.asdict(c)["scale"], lambda c: setattr(c, "scale", 5.0)),
    "a computed name": of(Modal(), lambda m, x: m(x), lambda m: setattr(m, "scale_a", 5.0)),
    "a property's object": of(Owner(), lambda o, x: x * o.config.scale, lambda o: setattr(o.held, "scale", 5.0)),
    "a method's object": of(Owner(), lambda o, x: x * o.get().scale, lambda o: setattr(o.held, "scale", 5.0)),
    "an index of its own": of(Owner(), lambda o, x: x * o[1], lambda o: operator.setitem(o.items, 1, 9.0)),
    "keys as attributes": of(Keys(s=2.0), lambda d, x: x * d.s, lambda d: d.update(s=5.0)),
    "a UserDict": of(collections.UserDict(a=2.0), lambda d, x: x * d["a"], lambda d: d.update(a=5.0)),
    "a ChainMap": of(collections.ChainMap({"a": 2.0}), lambda d, x: x * d["a"], lambda d: d.update(a=5.0)),
    "a list in a tuple": of((1, [2.0]), lambda t, x: x * t[1][0], lambda t: operator.setitem(t[1], 0, 5.0)),
}


@pytest.mark.parametrize("kind", SEEN)
def test_a_change_below_the_first_level_is_seen_at_once(kind: str) -> None:
    body, change = SEEN[kind]()
    run = made(body)
    run(X)
    assert not run.stats.eager
    change()
    torch.testing.assert_close(run(X), body(X))
    assert run.stats.eager.total() == 1


def test_what_a_function_returns_is_followed() -> None:
    run = made(lambda x: x * current_config().scale)
    run(X)
    _config.scale = 7.0
    try:
        torch.testing.assert_close(run(X), X * 7)
    finally:
        _config.scale = 2.0
    run(X)
    assert run.stats.eager.total() == 1


def test_a_mapping_proxy_and_a_context_variable_are_seen() -> None:
    source = {"a": 2.0}
    proxy = types.MappingProxyType(source)
    run = made(lambda x: x * proxy["a"] * _variable.get())
    source["a"] = 3.0
    torch.testing.assert_close(run(X), X * 6)
    token = _variable.set(5.0)
    torch.testing.assert_close(run(X), X * 15)
    _variable.reset(token)


def cached(cache: dict[Any, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    key = (x.shape[0], str(x.dtype))
    if key not in cache:
        cache[key] = torch.ones(x.shape[0], 1)
    return x * cache[key]


def logged(stats: dict[str, int], x: torch.Tensor) -> torch.Tensor:
    log.debug("%s", stats)
    return x * 2


def by_variable(table: dict[str, float], x: torch.Tensor) -> torch.Tensor:
    key = "s"
    return x * table[key]


UNSEEN: dict[str, Make] = {
    "another key, where it is computed": of({"s": 2.0, "hits": 0}, by_variable, lambda d: d.update(hits=1)),
    "a cache that grows": of({}, cached, lambda d: d.update(other=torch.ones(1))),
    "what is only logged": of({"n": 0}, logged, lambda d: d.update(n=1)),
    "truth that stays": of([1], lambda a, x: x * 3 if a else x, lambda a: a.append(1)),
    "another member": of({1}, lambda s, x: x * 3 if 5 in s else x, lambda s: s.add(6)),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_change_that_nobody_reads_is_no_alarm(kind: str) -> None:
    body, change = UNSEEN[kind]()
    run = made(body)
    change()
    torch.testing.assert_close(run(X), body(X))
    assert not run.stats.eager


# -- equal copies ---------------------------------------------------------------------------------------------


def test_an_equal_copy_is_no_alarm_and_is_watched_from_then_on() -> None:
    held = {"config": Config()}
    run = made(lambda x: x * held["config"].scale * held["config"].table["a"]["b"][0])
    for _ in range(3):
        held["config"] = copy.deepcopy(held["config"])
        run(X)
    assert not run.stats.eager
    held["config"].table["a"]["b"][0] = 4.0
    torch.testing.assert_close(run(X), X * 8)
    held["config"].table["a"]["b"][0] = 1.0
    run(X)
    assert run.stats.eager.total() == 1


def test_a_copy_with_another_value_is_stale_even_where_the_old_one_has_it_too() -> None:
    held = {"config": Config()}
    run = made(lambda x: x * held["config"].scale)
    held["config"].scale = 3.0
    held["config"] = copy.deepcopy(held["config"])
    torch.testing.assert_close(run(X), X * 3)


def test_an_object_that_is_read_in_two_places_is_not_given_up() -> None:
    config = Config()
    one, other = SimpleNamespace(config=config), SimpleNamespace(config=config)
    run = made(lambda x: x * one.config.scale * other.config.scale)
    one.config = copy.deepcopy(config)
    run(X)
    config.scale = 5.0
    torch.testing.assert_close(run(X), X * 10)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.config = Config()

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * self.config.scale


def replace_linear(model: Any) -> None:
    model.linear = torch.nn.Linear(4, 4)


COPIES: dict[str, Callable[[Any], object]] = {
    "its own value": lambda model: setattr(model, "config", Config(5.0)),
    "a value below": lambda model: setattr(model.config, "scale", 5.0),
    "a module that both have": replace_linear,
    "a parameter": lambda model: setattr(model.linear, "weight", torch.nn.Parameter(torch.ones(4, 4))),
    "a hook": lambda model: model.register_forward_hook(lambda one, given, out: out * 3),
    "its forward": lambda model: setattr(model, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", COPIES.values(), ids=COPIES)
def test_a_shallow_copy_of_a_module_is_no_alarm_and_is_watched_from_then_on(change: Callable[[Any], object]) -> None:
    held = {"model": Scaled()}

    def body(x: torch.Tensor) -> Any:
        return held["model"](x)

    run = made(body)
    for _ in range(3):
        held["model"] = copy.copy(held["model"])
        run(X)
    assert not run.stats.eager
    change(held["model"])
    with torch.no_grad():
        torch.testing.assert_close(run(X), body(X))
    assert run.stats.eager.total() == 1


def test_a_shallow_copy_of_a_module_with_another_value_is_stale() -> None:
    held = {"model": Scaled()}

    def body(x: torch.Tensor) -> Any:
        return held["model"](x)

    run = made(body)
    held["model"] = copy.copy(held["model"])
    held["model"].config = Config(5.0)
    with torch.no_grad():
        torch.testing.assert_close(run(X), body(X))
    assert run.stats.eager.total() == 1


def test_a_copy_of_a_module_is_another_module() -> None:
    held = {"model": torch.nn.Linear(4, 4)}
    run = made(lambda x: held["model"](x))  # noqa: PLW0108 - it reads the dict
    assert rebound(run.facts().facts) is not None
    held["model"] = copy.deepcopy(held["model"])
    assert rebound(run.facts().facts) is None
    run(X)
    assert run.stats.eager.total() == 1
