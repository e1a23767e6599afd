"""Correct models around which something changes that makes no difference to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.animals import WIDTH, Run, Subject, calling, rows
from zoo.correct_python import Net
from zoo.judge import correct


def undisturbed(body: Any, on: torch.device, *changes: Callable[[], object], **more: Any) -> Subject:
    """Calls before and after changes that make no difference to the body."""

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        for index, change in enumerate(changes):
            change()
            for count in (8, 3, 5):
                run(x=rows(on, count, count + index))

    return Subject(body, calls, **more)


@correct()
def values_set_to_equals(on: torch.device) -> Subject:
    """Numbers, lists and words that the body reads are assigned anew, with equal values."""
    model = Net().to(on)

    def change() -> None:
        model.scale = float("2.0")
        model.sizes = [1, 2]

    return undisturbed(model, on, change)


@correct()
def values_that_nobody_reads(on: torch.device) -> Subject:
    """Attributes that the body does not read are changed, added and removed."""
    model = Net().to(on)

    def change() -> None:
        model.note = "second"
        setattr(model, "hits", 1)  # noqa: B010 - no attribute that the class declares

    return undisturbed(model, on, change, lambda: delattr(model, "hits"), lambda: setattr(model, "hits", 5))


@correct()
def weights_updated_in_place(on: torch.device) -> Subject:
    """Weights are loaded by copy_, and one by load_state_dict, into the same memory."""
    model = Net().to(on)
    other = {name: value * 0.5 for name, value in model.state_dict().items()}

    def change() -> None:
        with torch.no_grad():
            model.linear.bias.copy_(torch.ones(WIDTH))

    return undisturbed(model, on, change, lambda: model.load_state_dict(other))


@correct()
def modes_entered_and_left(on: torch.device) -> Subject:
    """Between calls somebody trains, uses autocast and inference mode, and leaves all as it was."""
    model = Net().to(on).eval()

    def change() -> None:
        model.train()
        with torch.autocast(on.type, dtype=torch.float16), torch.inference_mode():
            model(rows(on, 2))
        model.eval()

    return undisturbed(model, on, change, change)


@correct()
def eager_calls_between(on: torch.device) -> Subject:
    """The model is also called directly, copied, moved to where it is, and asked for its parameters."""
    model = Net().to(on)

    def change() -> None:
        model(rows(on, 11))
        copy.deepcopy(model)(rows(on, 2))
        model.to(on).requires_grad_(False)
        sum(one.numel() for one in model.parameters())

    return undisturbed(model, on, change, change)


@correct()
def another_model_changed(on: torch.device) -> Subject:
    """Another instance of the same class is trained, hooked and thrown away."""
    model, other = Net().to(on), Net().to(on)

    def change() -> None:
        other.scale = 9.0
        other.train()
        other.linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, device=on))
        other.register_forward_hook(lambda module, args, out: out * 2)

    return undisturbed(calling(model), on, change)


@contextmanager
def unused_context() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), np.errstate(all="ignore"):
        yield


@correct()
def caller_uses_its_own_context(on: torch.device) -> Subject:
    """Calls are made inside no_grad, inference mode and contexts of the caller's own, and outside of them."""
    model = Net().to(on)

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        with torch.no_grad(), unused_context():
            run(x=rows(on, 8, 2))
        with torch.inference_mode():
            run(x=rows(on, 2, 3))
        run(x=rows(on, 5, 4))

    return Subject(model, calls)


@correct()
def optimizer_step_between_calls(on: torch.device) -> Subject:
    """Weights are updated by an optimizer, in place, between calls."""
    model = Net().to(on)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def change() -> None:
        with torch.enable_grad():
            model(rows(on, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return undisturbed(model, on, change, change)


@correct()
def other_key_of_a_dict_that_is_read(on: torch.device) -> Subject:
    """The body reads one key of a dict, and callers count in another."""
    config: dict[str, Any] = {"scale": 2.0, "hits": 0}

    def change() -> None:
        config["hits"] += 1
        config[f"request {config['hits']}"] = "served"

    return undisturbed(lambda x: x * config["scale"], on, change, change)


@correct()
def unrelated_globals(on: torch.device) -> Subject:
    """Globals of the module come and go, one of which the body reads and nobody touches."""

    def step(x: Tensor) -> Tensor:
        return x * WIDTH

    def change() -> None:
        globals()["_unrelated"] = globals().get("_unrelated", 0) + 1

    return undisturbed(step, on, change, change, lambda: globals().pop("_unrelated"))


@correct()
def config_replaced_by_an_equal(on: torch.device) -> Subject:
    """The config is replaced by a deep copy at every request, as generation configs are."""
    model = Net().to(on)
    held = {"config": SimpleNamespace(scale=2.0, names=["a"])}

    def step(x: Tensor) -> Tensor:
        return model(x) * held["config"].scale * len(held["config"].names)

    return undisturbed(step, on, lambda: held.update(config=copy.deepcopy(held["config"])))


@correct()
def hook_added_and_removed(on: torch.device) -> Subject:
    """A hook is registered for one eager call and removed before the next."""
    model = Net().to(on)

    def change() -> None:
        hook = model.linear.register_forward_hook(lambda module, args, out: out * 2)
        model(rows(on, 2))
        hook.remove()

    return undisturbed(model, on, change, change)


@correct()
def changes_that_are_put_back(on: torch.device) -> Subject:
    """A value, a weight and its memory are changed for an eager call and put back."""
    model = Net().to(on)

    def change() -> None:
        scale, weight, memory = model.scale, model.linear.weight, model.linear.bias.data
        model.scale, model.linear.weight = 7.0, nn.Parameter(torch.zeros(WIDTH, WIDTH, device=on))
        model.linear.bias.data = torch.ones(WIDTH, device=on)
        model(rows(on, 2))
        model.scale, model.linear.weight = scale, weight
        model.linear.bias.data = memory

    return undisturbed(model, on, change, change)


@correct()
def gradients_of_the_weights(on: torch.device) -> Subject:
    """Somebody trains the same weights: gradients come and go, and are switched off."""
    model = Net().to(on)

    def change() -> None:
        with torch.enable_grad():
            model(rows(on, 2)).sum().backward()

    return undisturbed(model, on, change, model.zero_grad, lambda: model.requires_grad_(False))
