"""Facts that lie behind methods of modules, tuples, classes, weak references and imports: a change of one is seen."""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn

from fact_bodies import SLOTS, Make, X, assert_seen_at_once, made, of
from phonograph import Replay, RunEagerly, graphed
from phonograph.graphs.progress import silent
from phonograph.graphs.recording import facts as recorded_facts

# -- what modules hold, by their methods ----------------------------------------------------------------------


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> Any:
        for child in self.children():
            x = child(x)
        return x


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def of_linears(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for one in model.modules():
        x = one(x) if isinstance(one, nn.Linear) else x
    return x


def replace_weight(model: nn.Module) -> None:
    model.get_submodule("1").weight = nn.Parameter(torch.full((4, 4), 3.0))


def replace_layer(model: nn.Module) -> None:
    model.get_submodule("0").register_module("extra", nn.Linear(4, 4))
    model.register_module("1", nn.Linear(4, 4))


MODULES: dict[str, Make] = {
    "parameters()": of(layers(), lambda m, x: x * sum(p.sum() for p in m.parameters()), replace_weight),
    "named_parameters()": of(layers(), lambda m, x: x @ dict(m.named_parameters())["1.weight"], replace_weight),
    "get_parameter()": of(layers(), lambda m, x: x @ m.get_parameter("1.weight"), replace_weight),
    "state_dict()": of(layers(), lambda m, x: x @ m.state_dict()["1.weight"], replace_weight),
    "data of parameters()": of(
        layers(),
        lambda m, x: x * sum(p.sum() for p in m.parameters()),
        lambda m: setattr(m[1].weight, "data", torch.full((4, 4), 3.0)),
    ),
    "children()": of(Children(), lambda m, x: m(x), lambda m: setattr(m, "act", nn.Softplus())),
    "get_submodule()": of(layers(), lambda m, x: m.get_submodule("1")(x), replace_layer),
    "modules()": of(layers(), of_linears, replace_layer),
}


# -- tuples with names ------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    scales: list[float]
    config: SimpleNamespace
    weights: list[torch.Tensor]


LAYER = Layer([2.0], SimpleNamespace(scale=2.0), [torch.ones(4)])
TUPLES: dict[str, Make] = {
    "a field's item": of(LAYER, lambda t, x: x * t.scales[0], lambda t: operator.setitem(t.scales, 0, 9.0)),
    "a field by index": of(LAYER, lambda t, x: x * t[0][0], lambda t: operator.setitem(t.scales, 0, 9.0)),
    "a field's attribute": of(LAYER, lambda t, x: x * t.config.scale, lambda t: setattr(t.config, "scale", 9.0)),
    "a field's tensor": of(
        LAYER, lambda t, x: x * t.weights[0], lambda t: operator.setitem(t.weights, 0, torch.full((4,), 9.0))
    ),
    "a field to a builtin": of(LAYER, lambda t, x: x * sum(t.scales), lambda t: t.scales.append(9.0)),
}

# -- classes ----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    scale = 2.0

    def forward(self, x: torch.Tensor) -> Any:
        return x * 2


def classes(body: Callable[[Any, torch.Tensor], Any], change: Callable[[Any], object]) -> Make:
    """A body over an object of a new class, whose parent is new too."""

    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        class Parent(Wide):
            scale = 2.0

            def forward(self, x: torch.Tensor) -> Any:
                return x * 2

            def run(self, x: torch.Tensor) -> Any:
                return x * 2

        class Child(Parent):
            scale = 50.0

            def run(self, x: torch.Tensor) -> Any:
                return super().run(x) * super().scale

            def forward(self, x: torch.Tensor) -> Any:
                return super().forward(x)

        mine = Child()
        return lambda x: body(mine, x), lambda: change(mine)

    return make


class Aliased:
    alias: ClassVar = {"heads": "n_head"}

    def __init__(self) -> None:
        self.n_head = 2.0

    def __getattribute__(self, key: str) -> Any:
        return super().__getattribute__(type(self).alias.get(key, key))


class Held:
    def __init__(self) -> None:
        self.scale = 2.0

    def scaled(self, x: torch.Tensor) -> Any:
        return x * self.scale


class OtherHeld(Held):
    def scaled(self, x: torch.Tensor) -> Any:
        return x * 9


def parent(one: Any) -> Any:
    return type(one).__mro__[1]


CLASSES: dict[str, Make] = {
    "type(self).x": classes(lambda c, x: x * type(c).scale, lambda c: setattr(type(c), "scale", 9.0)),
    "self.__class__.x": classes(lambda c, x: x * c.__class__.scale, lambda c: setattr(type(c), "scale", 9.0)),
    "super().x": classes(lambda c, x: c.run(x), lambda c: setattr(parent(c), "scale", 9.0)),
    "super().run(x)": classes(lambda c, x: c.run(x), lambda c: setattr(parent(c), "run", lambda self, x: x * 9)),
    "super().forward(x)": classes(lambda c, x: c(x), lambda c: setattr(parent(c), "forward", lambda self, x: x * 9)),
    "super().__getattribute__(…)": of(Aliased(), lambda c, x: x * c.heads, lambda c: setattr(c, "n_head", 9.0)),
    "object.__getattribute__(…)": of(
        Held(), lambda c, x: x * object.__getattribute__(c, "scale"), lambda c: setattr(c, "scale", 9.0)
    ),
    "an exchanged class": of(Held(), lambda c, x: c.scaled(x), lambda c: setattr(c, "__class__", OtherHeld)),
}

# -- threads, imports, weak references, partials ----------------------------------------------------------------


def in_thread() -> tuple[Callable[..., Any], Callable[[], object]]:
    held = threading.local()
    held.scale = 2.0
    return lambda x: x * held.scale, lambda: setattr(held, "scale", 9.0)


def imported(body: Callable[[torch.Tensor], Any]) -> Make:
    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        settings: Any = ModuleType("settings_of_a_test")
        sys.modules["settings_of_a_test"] = settings
        settings.SCALE = 2.0
        return body, lambda: setattr(settings, "SCALE", 9.0)

    return make


def from_import(x: torch.Tensor) -> Any:
    from settings_of_a_test import SCALE  # type: ignore[import-not-found]

    return x * SCALE


def by_reference(refer: Callable[[Any], Any], body: Callable[[Any, torch.Tensor], Any]) -> Make:
    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        held = Held()
        reference = refer(held)
        return lambda x: body(reference, x), lambda: setattr(held, "scale", 9.0)

    return make


def by_weak_key() -> tuple[Callable[..., Any], Callable[[], object]]:
    held = Held()
    scales = weakref.WeakKeyDictionary({held: 2.0})
    return lambda x: x * scales[held], lambda: operator.setitem(scales, held, 9.0)


def scaled(x: torch.Tensor, by: Any) -> Any:
    return x * by


WEIGHTED = functools.partial(scaled, by=torch.ones(4))
SCALED = functools.partial(scaled, by=2.0)


def of_one_code() -> tuple[Callable[..., Any], Callable[[], object]]:
    functions: list[Any] = [lambda x, by=by: x * by for by in (2.0, 3.0)]

    def body(x: torch.Tensor) -> Any:
        for function in functions:
            x = function(x)
        return x

    return body, lambda: setattr(functions[0], "__defaults__", (9.0,))


ELSEWHERE: dict[str, Make] = {
    "a thread local": in_thread,
    "from … import": imported(from_import),
    "import_module()": imported(lambda x: x * importlib.import_module("settings_of_a_test").SCALE),
    "weakref.ref": by_reference(weakref.ref, lambda r, x: x * r().scale),
    "weakref.proxy": by_reference(weakref.proxy, lambda r, x: x * r.scale),
    "WeakKeyDictionary": by_weak_key,
    "a partial's tensor": of(
        WEIGHTED, lambda p, x: p(x), lambda p: setattr(p.keywords["by"], "data", torch.full((4,), 9.0))
    ),
    "a partial's keyword": of(SCALED, lambda p, x: p(x), lambda p: p.keywords.update(by=9.0)),
    "defaults of functions of one code": of_one_code,
}

SEEN = MODULES | TUPLES | CLASSES | ELSEWHERE


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in SEEN.items()])
def test_a_change_of_what_is_read_is_seen_at_once(make: Make) -> None:
    assert_seen_at_once(make)


# -- shapes that fail, and generated code -----------------------------------------------------------------------


def test_facts_are_those_of_the_shapes_that_can_be_recorded() -> None:
    held = {"scale": 2.0}

    def body(x: torch.Tensor) -> Any:
        if not 2 < x.shape[0] < 8:  # pytest rewrites an assert into code that reaches all of pytest
            raise ValueError("a size that it can't take")
        return x * held["scale"]

    run = graphed(body, slots=SLOTS, bucketed="rows", buckets=[1, 2, 4, 8, 16], device="emulated", smallest=3)
    assert len(run.capture(silent).failures) == 4
    run(X)
    assert isinstance(run.runner.last, Replay)
    held["scale"] = 9.0
    assert torch.equal(run(X), X * 9)


@pytest.mark.parametrize("names", [{}, {"__name__": "generated"}], ids=["without a name", "with a name"])
def test_globals_of_generated_functions_are_facts(names: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {"SCALE": 2.0, **names}
    exec("def scaled(x):\n    return x * SCALE", namespace)

    def body(x: torch.Tensor) -> Any:
        return namespace["scaled"](x)

    run = made(body)
    run(X)
    assert isinstance(run.runner.last, Replay)
    namespace["SCALE"] = 9.0
    assert torch.equal(run(X), X * 9)


# -- no alarms ------------------------------------------------------------------------------------------------


def test_an_object_with_methods_may_be_replaced_by_an_equal_one() -> None:
    held = {"object": Held()}

    def body(x: torch.Tensor) -> Any:
        return held["object"].scaled(x)

    run = made(body)
    held["object"] = Held()
    run(X)
    assert isinstance(run.runner.last, Replay)
    held["object"].scale = 9.0
    assert torch.equal(run(X), X * 9)


def test_children_may_change_their_own_weights_where_only_modules_are_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def body(x: torch.Tensor) -> Any:
        return x * len(list(model.children()))

    run = made(body)
    replace_weight(model)
    run(X)
    assert isinstance(run.runner.last, Replay)


# -- one shape of several ---------------------------------------------------------------------------------------


def by_size(caches: dict[int, Any], x: torch.Tensor) -> torch.Tensor:
    return x * caches[x.shape[0]].scale


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_what_one_size_alone_reads_is_a_fact(size: int) -> None:
    caches = {one: Held() for one in (1, 2, 4, 8)}
    run = made(functools.partial(by_size, caches), buckets=[1, 2, 4, 8])
    x = torch.ones(size, 4)
    run(x)
    assert isinstance(run.runner.last, Replay)
    caches[size] = Held()  # an equal one
    run(x)
    assert isinstance(run.runner.last, Replay)
    caches[size].scale = 9.0
    assert torch.equal(run(x), x * 9)
    assert isinstance(run.runner.last, RunEagerly)


def test_a_size_that_makes_its_own_entry_is_no_alarm_in_another() -> None:
    caches: dict[int, torch.Tensor] = {}

    def body(x: torch.Tensor) -> Any:
        size = x.shape[0]
        if size not in caches:
            caches[size] = torch.ones(size, 1)
        return x * caches[size]

    run = made(body, buckets=[1, 2, 4, 8])
    for size in (1, 2, 4, 8, 3, 20, 2):
        run(torch.ones(size, 4))
        assert size == 20 or isinstance(run.runner.last, Replay)
    caches[2] = torch.full((2, 1), 9.0)
    assert torch.equal(run(torch.ones(2, 4)), torch.full((2, 4), 9.0))


def test_shapes_that_take_too_long_to_look_at_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_facts, "MAX_SECONDS", 0.0)
    caches = {one: Held() for one in (1, 2, 4, 8)}
    run = made(functools.partial(by_size, caches), buckets=[1, 2, 4, 8])
    assert any("[rows=2]" in note and "[rows=4]" in note for note in run.facts().notes)
    for size in (1, 8):
        caches[size].scale = 9.0
        assert torch.equal(run(torch.ones(size, 4)), torch.full((size, 4), 9.0))
        caches[size].scale = 2.0


@contextmanager
def preserved(batch: Any) -> Iterator[None]:
    yield


def raising(x: torch.Tensor) -> None:
    raise ValueError("a size that it can't take")


def reading(x: torch.Tensor) -> None:
    """Fails in a rehearsal, and not in a free run."""
    x.sum().item()


@pytest.mark.parametrize("declared", [{}, {"preserve": preserved}], ids=["searched", "preserve"])
@pytest.mark.parametrize("fails", [{8}, {8, 4}, {8, 1}], ids=str)
@pytest.mark.parametrize("fail", [raising, reading])
def test_with_facts_verify_the_next_shape_that_runs_is_looked_at(
    fail: Callable[[torch.Tensor], None], fails: set[int], declared: dict[str, Any]
) -> None:
    held = {"scale": 2.0}

    def body(x: torch.Tensor) -> Any:
        if x.shape[0] in fails:
            fail(x)
        return x * held["scale"]

    buckets = [1, 2, 4, 8]
    run = graphed(body, slots=SLOTS, bucketed="rows", buckets=buckets, device="emulated", facts="verify", **declared)
    assert len(run.capture(silent).failures) == len(fails)
    assert any(fact.name == "held['scale']" for fact in run.facts())
    assert run.runner.stale.find() is None
    held["scale"] = 9.0
    found = run.runner.stale.find()
    assert found is not None
    assert found.name == "held['scale']"
