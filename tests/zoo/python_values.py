"""Bugs of Python values: the body reads one that is changed after capture, and a replay has what was there before."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.animals import WIDTH, Make, Mechanism, Run, Subject, calling, rows
from zoo.judge import bug

VALUES = Mechanism.VALUES


def changed(body: Callable[..., Any], on: torch.device, *changes: Callable[[], object]) -> Subject:
    """Calls before and after each change, in buckets that go up and down."""

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        for index, change in enumerate(changes):
            change()
            run(x=rows(on, 3, 2 + index))
            run(x=rows(on, 7, 3 + index))
            run(x=rows(on, 2, 4 + index))

    return Subject(body, calls)


class Scaled(nn.Module):
    """Multiplies by what a function finds when it is called."""

    def __init__(self, scale: Callable[[Any], float], **held: Any) -> None:
        super().__init__()
        self.find = scale
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.find(self)


@bug(VALUES, names="window")
def baked_python_int(on: torch.device) -> Subject:
    """An attention window is a Python int of the module, and is lowered after capture."""

    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.window = 3

        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.arange(WIDTH, device=x.device) < self.window)

    model = Windowed()
    return changed(model, on, lambda: setattr(model, "window", 1))


@bug(VALUES, names="scale")
def closure_changed(on: torch.device) -> Subject:
    """A variable around the function is given another value."""
    scale = 2.0

    def step(x: Tensor) -> Tensor:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = 3.0

    return changed(step, on, change)


@dataclass
class NormConfig:
    eps: float = 0.1


@dataclass
class Config:
    scale: float = 2.0
    norm: NormConfig = field(default_factory=NormConfig)


@bug(VALUES, names="eps")
def config_field_changed(on: torch.device) -> Subject:
    """A number two levels deep in the config is set after capture."""
    config = Config()
    model = Scaled(lambda self: 1 / self.config.norm.eps, config=config)
    return changed(model, on, lambda: setattr(config.norm, "eps", 0.5))


@bug(VALUES, names="config")
def config_replaced(on: torch.device) -> Subject:
    """The whole config is replaced by a copy with another value."""
    model = Scaled(lambda self: self.config.scale, config=Config())
    return changed(model, on, lambda: setattr(model, "config", replace(Config(), scale=0.5)))


_factor = 2.0


@bug(VALUES, names="_factor")
def global_changed(on: torch.device) -> Subject:
    """A global number of the module is set between calls."""
    globals()["_factor"] = 2.0

    def step(x: Tensor) -> Tensor:
        return x * _factor

    return changed(step, on, lambda: globals().update(_factor=5.0))


@bug(VALUES, names="alpha")
def class_attribute_changed(on: torch.device) -> Subject:
    """A default that stands on the class is set there."""

    class Leaky(nn.Module):
        alpha = 0.1

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x, x * self.alpha)

    return changed(Leaky(), on, lambda: setattr(Leaky, "alpha", 0.9))


_context = SimpleNamespace(lens=None)


@bug(VALUES, names="lens")
def forward_context(on: torch.device) -> Subject:
    """The engine sets a new metadata tensor in a global forward context before each step."""
    _context.lens = torch.tensor(1.0, device=on)

    def step(x: Tensor) -> Tensor:
        return x * _context.lens

    return changed(step, on, lambda: setattr(_context, "lens", torch.tensor(7.0, device=on)))


_mode: ContextVar[float] = ContextVar("zoo_mode", default=2.0)


@bug(VALUES, names="zoo_mode|_mode")
def context_variable_changed(on: torch.device) -> Subject:
    """A context variable is set around later calls."""

    def step(x: Tensor) -> Tensor:
        return x * _mode.get()

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        token = _mode.set(5.0)
        try:
            run(x=rows(on, 3, 2))
        finally:
            _mode.reset(token)

    return Subject(step, calls)


class Schedule:
    """Decays with the number of steps, which its user advances."""

    def __init__(self) -> None:
        self.num_steps = 0

    @property
    def value(self) -> float:
        return 1.0 / (1 + self.num_steps)


@bug(VALUES, names="num_steps")
def float_from_a_schedule(on: torch.device) -> Subject:
    """A coefficient comes from a schedule that advances between calls."""
    schedule = Schedule()
    model = Scaled(lambda self: self.schedule.value, schedule=schedule)
    return changed(model, on, lambda: setattr(schedule, "num_steps", 3))


@bug(VALUES, names="banned")
def set_of_banned_tokens(on: torch.device) -> Subject:
    """The logits of tokens in a Python set are masked, and the set grows."""
    banned = {0}

    def step(x: Tensor) -> Tensor:
        x = x.clone()
        for token in sorted(banned):
            x[:, token] = -1e9
        return x

    return changed(step, on, lambda: banned.add(2))


@bug(VALUES, names="ZOO_SCALE|environ")
def environment_variable(on: torch.device) -> Subject:
    """The body reads a variable of the environment, which is set later."""
    os.environ.pop("ZOO_SCALE", None)

    def step(x: Tensor) -> Tensor:
        return x * float(os.environ.get("ZOO_SCALE", "2"))

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        os.environ["ZOO_SCALE"] = "5"
        try:
            run(x=rows(on, 3, 2))
        finally:
            del os.environ["ZOO_SCALE"]

    return Subject(step, calls)


@bug(VALUES, names="scales")
def numpy_content_changed(on: torch.device) -> Subject:
    """A scale is read from a numpy array, which is written in place later."""
    scales = np.array([2.0, 3.0])
    model = Scaled(lambda self: float(self.scales[1]), scales=scales)
    return changed(model, on, lambda: np.multiply(scales, 2, out=scales))


@bug(VALUES, names="alpha|__defaults__|negative")
def default_argument_changed(on: torch.device) -> Subject:
    """The default of a helper's argument is patched."""

    def negative(x: Tensor, alpha: float = 0.1) -> Tensor:
        return torch.where(x > 0, x, x * alpha)

    def step(x: Tensor) -> Tensor:
        return negative(x)

    return changed(step, on, lambda: setattr(negative, "__defaults__", (0.7,)))


@bug(VALUES, names="activation|partial")
def partial_replaced(on: torch.device) -> Subject:
    """The activation is a functools.partial in an attribute, replaced by one with another value."""
    leaky = functools.partial(functional.leaky_relu, negative_slope=0.1)
    model = SimpleNamespace(activation=leaky)

    def step(x: Tensor) -> Tensor:
        return model.activation(x)

    return changed(step, on, lambda: setattr(model, "activation", functools.partial(leaky, negative_slope=0.8)))


@bug(VALUES, names="temperature")
def attribute_read_by_name(on: torch.device) -> Subject:
    """The body reads an attribute by getattr with a name that it puts together."""
    model = Scaled(lambda self: getattr(self, "temp" + "erature"), temperature=2.0)
    return changed(model, on, lambda: setattr(model, "temperature", 4.0))


@bug(VALUES, names="scale")
def attribute_read_through_vars(on: torch.device) -> Subject:
    """The body reads a config through vars()."""
    config = Config()
    model = Scaled(lambda self: vars(self.config)["scale"], config=config)
    return changed(model, on, lambda: setattr(config, "scale", 4.0))


@bug(VALUES, names="factor|rope")
def nested_dict_changed(on: torch.device) -> Subject:
    """A number three dicts deep in a Hugging Face style config is changed."""
    config = {"rope": {"scaling": {"factor": 2.0}}}
    model = Scaled(lambda self: self.config["rope"]["scaling"]["factor"], config=config)
    return changed(model, on, lambda: config["rope"]["scaling"].update(factor=8.0))


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


@bug(VALUES, names="scale")
def slotted_object_changed(on: torch.device) -> Subject:
    """The value stands in an object with __slots__, which lies in a list."""
    layers = [Slotted(), Slotted()]
    model = Scaled(lambda self: sum(layer.scale for layer in self.layers), layers=layers)
    return changed(model, on, lambda: setattr(layers[1], "scale", 9.0))


@bug(VALUES, names="mode")
def word_changed(on: torch.device) -> Subject:
    """A mode is a word, and another word picks another branch."""

    class Pooled(nn.Module):
        mode = "mean"

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(-1) if self.mode == "mean" else x.amax(-1)

    model = Pooled()
    return changed(model, on, lambda: setattr(model, "mode", "max"))


@bug(VALUES, names="mask")
def stale_optional_mask(on: torch.device) -> Subject:
    """An optional mask is an attribute that the caller sets for one step and takes away after it."""

    class Masked(nn.Module):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            return x if self.mask is None else x.masked_fill(self.mask, 0.0)

    model = Masked()

    def set_mask() -> None:
        model.mask = torch.tensor([True, False, True, False], device=on)

    return changed(model, on, set_mask, lambda: setattr(model, "mask", None))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "ab"})
        self.active = ["a"]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        for name in self.active:
            y = y + self.adapters[name](x)
        return y


def adapters(change: Callable[[Adapted], object]) -> Make:
    def make(on: torch.device) -> Subject:
        model = Adapted().to(on)
        return changed(model, on, lambda: change(model))

    return make


@bug(VALUES, names="active")
def active_adapter_switched(on: torch.device) -> Subject:
    """Another LoRA adapter is made the active one."""
    return adapters(lambda model: setattr(model, "active", ["b"]))(on)


@bug(VALUES, names="active")
def adapter_added(on: torch.device) -> Subject:
    """A second LoRA adapter is appended to the list of active ones."""
    return adapters(lambda model: model.active.append("b"))(on)


@bug(VALUES, names="act")
def submodule_replaced(on: torch.device) -> Subject:
    """The activation module is replaced by another one."""
    model = nn.Sequential()
    model.add_module("act", nn.ReLU())
    return changed(calling(model), on, lambda: setattr(model, "act", nn.Tanh()))


@bug(VALUES, names="layers|1")
def layer_dropped(on: torch.device) -> Subject:
    """The last layer is cut off a ModuleList, for early exit."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).to(on)

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return changed(step, on, lambda: layers.pop(1))


_ops = SimpleNamespace(activation=torch.relu)


@bug(VALUES, names="activation")
def library_function_patched(on: torch.device) -> Subject:
    """A function in a library's namespace is patched with a faster one that rounds."""
    _ops.activation = torch.relu

    def step(x: Tensor) -> Tensor:
        return _ops.activation(x)

    return changed(step, on, lambda: setattr(_ops, "activation", torch.round))
