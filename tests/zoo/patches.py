"""Bugs of patches: code is replaced, and attributes appear that were not there when the recording was made."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from zoo.addresses import Net
from zoo.animals import WIDTH, Mechanism, Subject, calling, rows
from zoo.judge import bug
from zoo.python_values import Scaled, changed

VALUES = Mechanism.VALUES


@bug(VALUES, names="forward")
def forward_patched_on_an_instance(on: torch.device) -> Subject:
    """A layer's forward is wrapped on the instance, as offloading libraries do."""
    model = Net().to(on)

    def change() -> None:
        inner = model.linear.forward
        setattr(model.linear, "forward", types.MethodType(lambda self, x: inner(x) * 2, model.linear))  # noqa: B010

    return changed(model, on, change)


@bug(VALUES, names="forward")
def forward_patched_on_the_class(on: torch.device) -> Subject:
    """A class's forward is replaced by a fused one that differs, as kernel libraries do."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.abs().mean(-1, keepdim=True) + 1)

    norm = Norm()
    return changed(calling(norm), on, lambda: setattr(Norm, "forward", lambda self, x: x * 0.5))


@bug(VALUES, names="class|Doubled")
def class_of_a_layer_swapped(on: torch.device) -> Subject:
    """Quantisation swaps the class of a layer in place."""

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = Net().to(on)
    return changed(model, on, lambda: setattr(model.linear, "__class__", Doubled))


@bug(VALUES, names="lora")
def attribute_that_appears(on: torch.device) -> Subject:
    """The body asks by getattr with a default for an attribute that is set later."""

    class Optional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            lora: Any = getattr(self, "lora", None)
            return x if lora is None else x + lora

    model = Optional()
    return changed(model, on, lambda: setattr(model, "lora", torch.ones(WIDTH, device=on)))


@bug(VALUES, names="alpha")
def instance_that_shadows_its_class(on: torch.device) -> Subject:
    """A value of the class is overridden on the instance."""

    class Leaky(nn.Module):
        alpha = 0.1

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x, x * self.alpha)

    model = Leaky()
    return changed(model, on, lambda: setattr(model, "alpha", 0.9))


@bug(VALUES, names="softcap|config")
def key_that_appears(on: torch.device) -> Subject:
    """The body asks a dict for a key that is put there later."""
    config: dict[str, float] = {}

    def step(x: Tensor) -> Tensor:
        cap = config.get("softcap")
        return x if cap is None else torch.tanh(x / cap) * cap

    return changed(step, on, lambda: config.update(softcap=0.5))


@bug(VALUES, names="biases")
def container_that_is_no_longer_empty(on: torch.device) -> Subject:
    """The body takes a branch by whether a list is empty."""
    biases: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        return x + torch.stack(biases).sum(0) if biases else x

    return changed(step, on, lambda: biases.append(torch.ones(WIDTH, device=on)))


@bug(VALUES, names="scale")
def attribute_of_a_weight_changed(on: torch.device) -> Subject:
    """A quantised weight carries its scale as an attribute, which new weights set."""
    weight: Any = rows(on, WIDTH, 3)
    weight.scale = 0.5

    def step(x: Tensor) -> Tensor:
        return x @ weight * weight.scale

    return changed(step, on, lambda: setattr(weight, "scale", 2.0))


@bug(VALUES, names="limits")
def tuple_replaced_in_a_list(on: torch.device) -> Subject:
    """Limits are tuples in a list of the module; one is replaced by another."""
    limits = [(0.0, 1.0), (0.0, 2.0)]
    model = Scaled(lambda self: self.limits[1][1], limits=limits)

    def change() -> None:
        limits[1] = (0.0, 7.0)

    return changed(model, on, change)
