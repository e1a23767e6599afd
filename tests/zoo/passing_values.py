"""Bugs of values that no name leads to: objects made in passing, results of calls, patterns, names that are missing."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.animals import WIDTH, Mechanism, Subject
from zoo.judge import bug
from zoo.python_values import changed

VALUES = Mechanism.VALUES


class Options:
    """What a layer reads of its owner, made anew in every call."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @property
    def scale(self) -> float:
        return float(self.owner.config.scale)


@bug(VALUES, names="scale")
def options_made_in_passing(on: torch.device) -> Subject:
    """A config is read through an object that each call makes, and is changed."""
    owner = SimpleNamespace(config=SimpleNamespace(scale=2.0))
    return changed(lambda x: x * Options(owner).owner.config.scale, on, lambda: setattr(owner.config, "scale", 9.0))


@bug(VALUES, names="value")
def best_of_a_list(on: torch.device) -> Subject:
    """The best candidate is picked by its rank, and its value is changed."""
    ranked = [SimpleNamespace(rank=1, value=2.0), SimpleNamespace(rank=2, value=3.0)]
    return changed(
        lambda x: x * max(ranked, key=lambda one: one.rank).value, on, lambda: setattr(ranked[1], "value", 9.0)
    )


@bug(VALUES, names="scale")
def one_of_two_configs(on: torch.device) -> Subject:
    """A conditional expression picks a config, which is changed."""
    held = SimpleNamespace(long=None, short=SimpleNamespace(scale=2.0))
    return changed(lambda x: x * (held.long or held.short).scale, on, lambda: setattr(held.short, "scale", 9.0))


class Rope:
    def __init__(self) -> None:
        self.kind, self.factor = "linear", 2.0


@bug(VALUES, names="factor")
def kind_by_pattern(on: torch.device) -> Subject:
    """A pattern takes a factor out of a config, and it is changed."""
    rope = Rope()

    def step(x: Tensor) -> Any:
        match rope:
            case Rope(kind="linear", factor=factor):
                return x * factor
        return x

    return changed(step, on, lambda: setattr(rope, "factor", 9.0))


@bug(VALUES, names="scaling")
def entry_that_comes(on: torch.device) -> Subject:
    """A key is computed by a call, is not there at capture, and is added."""
    table: dict[str, float] = {}
    return changed(lambda x: x * table.get("SCALING".lower(), 2.0), on, lambda: table.update(scaling=9.0))


@bug(VALUES, names="extra")
def class_gets_an_attribute(on: torch.device) -> Subject:
    """An attribute that nothing has is given to a class."""

    class Layer:
        """Has none."""

    layer = Layer()
    return changed(lambda x: x * getattr(layer, "extra", 2.0), on, lambda: setattr(Layer, "extra", 9.0))


@bug(VALUES, names="adapter")
def module_gets_an_adapter(on: torch.device) -> Subject:
    """A model asks whether it has an adapter, and gets one."""
    model: Any = nn.Linear(WIDTH, WIDTH).to(on)
    adapter = nn.Linear(WIDTH, WIDTH).to(on)

    def step(x: Tensor) -> Any:
        return model.adapter(model(x)) if hasattr(model, "adapter") else model(x)

    return changed(step, on, lambda: model.register_module("adapter", adapter))


@bug(VALUES, names="stages")
def stages_in_another_order(on: torch.device) -> Subject:
    """Stages lie in an OrderedDict, and one is moved to the end."""
    stages: OrderedDict[str, Callable[[Tensor], Tensor]] = OrderedDict(
        double=lambda x: x * 2, add=lambda x: x + 1, square=lambda x: x * x
    )

    def step(x: Tensor) -> Tensor:
        for stage in stages.values():
            x = stage(x)
        return x

    return changed(step, on, lambda: stages.move_to_end("double"))


@bug(VALUES, names="number")
def closures_of_one_code(on: torch.device) -> Subject:
    """Scales lie in closures of one function, and one is changed."""

    def scaled(number: float) -> Callable[[], float]:
        return lambda: number

    scales: list[Any] = [scaled(1.0), scaled(2.0)]
    cell = scales[1].__closure__[0]
    return changed(lambda x: x * sum(one() for one in scales), on, lambda: setattr(cell, "cell_contents", 9.0))


@bug(VALUES, names="__call__")
def operator_replaced(on: torch.device) -> Subject:
    """The call of an object is replaced on its class, where no name is read."""

    class Scale:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

    scale = Scale()
    return changed(lambda x: scale(x) + 0, on, lambda: setattr(Scale, "__call__", lambda self, x: x * 9))


@bug(VALUES, names="sizes")
def starred_sizes(on: torch.device) -> Subject:
    """A list is taken apart with a star, and an item is changed."""
    sizes = [2.0, 3.0, 4.0]

    def step(x: Tensor) -> Tensor:
        first, *rest = sizes
        return x * first + rest[1]

    return changed(step, on, lambda: operator.setitem(sizes, 2, 9.0))
