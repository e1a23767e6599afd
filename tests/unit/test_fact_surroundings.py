"""Facts that a body finds around it: builtins, imported modules, methods of tensors, getters in C, caches of torch."""

from __future__ import annotations

import builtins
import importlib
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fact_bodies import X, made
from phonograph import Graphed, Reason, Replay, RunEagerly

SETTINGS = "settings_around_a_test"
PACKAGE = "package_around_a_test"


def assert_stale(run: Graphed, body: Callable[[torch.Tensor], Any]) -> None:
    """The next call is eager, counted as stale, and right."""
    with torch.no_grad():
        found = run(X)
        assert isinstance(run.runner.last, RunEagerly)
        assert run.runner.last.reason is Reason.STALE
        assert torch.equal(found, body(X))


def assert_replayed(run: Graphed, body: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad():
        assert torch.equal(run(X), body(X))
    assert isinstance(run.runner.last, Replay)


# -- builtins -------------------------------------------------------------------------------------------------


def of_a_name(x: torch.Tensor) -> Any:
    return x * SCALE_OF_A_TEST  # type: ignore[name-defined]  # noqa: F821


def of_a_function(x: torch.Tensor) -> Any:
    return x * min(2.0, 5.0)


def of_a_missing_name(x: torch.Tensor) -> Any:
    try:
        return x * MISSING_IN_A_TEST  # type: ignore[name-defined]
    except NameError:
        return x * 2


BUILTINS: dict[str, tuple[Callable[[torch.Tensor], Any], str, Any]] = {
    "a value": (of_a_name, "SCALE_OF_A_TEST", 9.0),
    "a function": (of_a_function, "min", max),
    "a name that nobody had": (of_a_missing_name, "MISSING_IN_A_TEST", 9.0),
}


@pytest.mark.parametrize(("body", "name", "value"), BUILTINS.values(), ids=BUILTINS)
def test_a_builtin_that_the_body_reads_is_a_fact(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[torch.Tensor], Any], name: str, value: Any
) -> None:
    monkeypatch.setattr(builtins, "SCALE_OF_A_TEST", 2.0, raising=False)
    run = made(body)
    assert_replayed(run, body)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, name, value, raising=False)
        assert_stale(run, body)
    assert_replayed(run, body)


def test_other_builtins_are_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(of_a_function)
    monkeypatch.setattr(builtins, "max", min)
    for count in range(5):  # as an interactive Python stores its last result
        monkeypatch.setattr(builtins, "_", count, raising=False)
        assert_replayed(run, of_a_function)


# -- imports --------------------------------------------------------------------------------------------------


def by_import(x: torch.Tensor) -> Any:
    import settings_around_a_test  # type: ignore[import-not-found]

    return x * settings_around_a_test.scale


def by_import_from(x: torch.Tensor) -> Any:
    from settings_around_a_test import scale

    return x * scale


def by_import_as(x: torch.Tensor) -> Any:
    import package_around_a_test.settings as mine  # type: ignore[import-not-found]

    return x * mine.scale


def by_dotted_import(x: torch.Tensor) -> Any:
    import package_around_a_test.settings

    return x * package_around_a_test.settings.scale


def by_import_module(x: torch.Tensor) -> Any:
    return x * importlib.import_module(SETTINGS).scale


def settings(scale: float, name: str = SETTINGS) -> ModuleType:
    found: Any = ModuleType(name)
    found.scale = scale
    return found


def package(scale: float) -> ModuleType:
    found: Any = ModuleType(PACKAGE)
    found.__path__ = []
    found.settings = settings(scale, f"{PACKAGE}.settings")
    return found


def put_in_place(patch: pytest.MonkeyPatch, scale: float) -> None:
    patch.setitem(sys.modules, SETTINGS, settings(scale))
    patch.setitem(sys.modules, PACKAGE, held := package(scale))
    patch.setitem(sys.modules, f"{PACKAGE}.settings", held.settings)


IMPORTS = [by_import, by_import_from, by_import_as, by_dotted_import, by_import_module]


@pytest.mark.parametrize("body", IMPORTS)
def test_a_module_that_an_import_gives_is_a_fact(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[torch.Tensor], Any]
) -> None:
    put_in_place(monkeypatch, 2.0)
    run = made(body)
    assert_replayed(run, body)
    with monkeypatch.context() as patch:
        put_in_place(patch, 9.0)
        assert_stale(run, body)
    assert_replayed(run, body)


@pytest.mark.parametrize("body", IMPORTS)
def test_imports_of_other_modules_are_no_alarm(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[torch.Tensor], Any]
) -> None:
    put_in_place(monkeypatch, 2.0)
    run = made(body)
    for count in range(5):
        monkeypatch.setitem(sys.modules, f"another_module_of_a_test_{count}", ModuleType("another"))
        assert_replayed(run, body)


# -- methods of tensors ---------------------------------------------------------------------------------------


def activated(x: torch.Tensor) -> Any:
    return (x - 2).relu()


def by_a_new_method(x: torch.Tensor) -> Any:
    return x.scaled_by_a_test()  # type: ignore[attr-defined]


WEIGHT = nn.Parameter(torch.full((4,), -2.0))


def of_a_parameter(x: torch.Tensor) -> Any:
    return x * WEIGHT.relu()


TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "torch's own": (activated, "relu"),
    "one that was added": (by_a_new_method, "scaled_by_a_test"),
    "of a parameter": (of_a_parameter, "relu"),
}


@pytest.mark.parametrize(("body", "name"), TENSORS.values(), ids=TENSORS)
def test_a_method_of_tensors_that_the_body_calls_is_a_fact(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[torch.Tensor], Any], name: str
) -> None:
    monkeypatch.setattr(torch.Tensor, "scaled_by_a_test", lambda x: x * 2, raising=False)
    run = made(body)
    assert_replayed(run, body)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, name, lambda x: x * 9)
        assert_stale(run, body)
    assert_replayed(run, body)


@pytest.mark.parametrize(("body", "name"), TENSORS.values(), ids=TENSORS)
def test_other_methods_of_tensors_are_no_alarm(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[torch.Tensor], Any], name: str
) -> None:
    monkeypatch.setattr(torch.Tensor, "scaled_by_a_test", lambda x: x * 2, raising=False)
    run = made(body)
    for count in range(5):
        monkeypatch.setattr(torch.Tensor, f"other_{count}_of_a_test", lambda x: x * 9, raising=False)
        assert_replayed(run, body)


class Large(nn.Module):
    """So many facts that versions of dicts are looked at, not values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x).relu() * min(2.0, 5.0)


@pytest.mark.parametrize(
    ("owner", "name", "value"), [(torch.Tensor, "relu", lambda x: x.exp()), (builtins, "min", max)]
)
def test_of_many_facts_these_are_seen_at_once_too(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    model = Large()
    run = made(model)
    assert "dict versions" in run.facts().method
    for count in range(4):
        monkeypatch.setattr(owner, f"other_{count}_of_a_test", count, raising=False)
        assert_replayed(run, model)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert_stale(run, model)
    assert_replayed(run, model)


# -- getters, and torch's own caches --------------------------------------------------------------------------


class Tied(nn.Module):
    """Has the weight of a layer as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hits = 0

    weight = property(operator.attrgetter("linear.weight"))

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight.T


def test_what_a_property_gets_by_an_attrgetter_is_a_fact() -> None:
    model = Tied()
    run = made(model)
    model.hits = 1
    model.linear.bias = nn.Parameter(torch.ones(4))
    assert_replayed(run, model)
    model.linear.weight = nn.Parameter(torch.full((4, 4), 3.0))
    assert_stale(run, model)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized() -> nn.Linear:
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Twice())
    return model


def test_whether_parametrized_weights_are_cached_is_a_fact() -> None:
    model = parametrized()

    def body(x: torch.Tensor) -> Any:
        return model(x)

    run = made(body)
    assert_replayed(run, body)
    with parametrize.cached(), torch.no_grad():
        model(X)
        model.parametrizations.weight.original.mul_(3)  # type: ignore[union-attr,operator]
        assert_stale(run, body)
    assert_replayed(run, body)


def test_a_cache_is_no_alarm_for_a_model_without_parametrizations() -> None:
    model = nn.Linear(4, 4)

    def body(x: torch.Tensor) -> Any:
        return model(x)

    run = made(body)
    with parametrize.cached():
        assert_replayed(run, body)
