"""Correct models beside whose facts something changes: copies, hooks of torch, other entries, modes nobody asks for."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from zoo.animals import WIDTH, Run, Subject, calling, rows
from zoo.correct import in_turn
from zoo.judge import correct


def beside(body: Callable[..., Any], on: torch.device, change: Callable[[], object]) -> Subject:
    """Calls with a change between each two, which the body does not mind."""

    def calls(run: Run) -> None:
        for index, count in enumerate((3, 8, 2)):
            run(x=rows(on, count, index + 1))
            change()

    return Subject(body, calls)


@correct()
def module_copied(on: torch.device) -> Subject:
    """A module is replaced by a shallow copy of itself, which holds the same parameters."""
    held = SimpleNamespace(model=nn.Linear(WIDTH, WIDTH).to(on))

    def step(x: torch.Tensor) -> Any:
        return held.model(x)

    return beside(step, on, lambda: setattr(held, "model", copy.copy(held.model)))


def reparametrized(change: Callable[[nn.Module], object], on: torch.device) -> Subject:
    model = nn.Linear(WIDTH, WIDTH).to(on).eval()
    change(model)

    def train() -> None:
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.5)

    return beside(calling(model), on, train)


@correct()
def pruned_layer(on: torch.device) -> Subject:
    """A hook of torch masks the weight before every call, and the weight is trained in place."""
    return reparametrized(lambda model: prune.l1_unstructured(model, "weight", 0.5), on)


@correct()
def layer_with_weight_norm(on: torch.device) -> Subject:
    """A hook of torch puts the weight together before every call, and its parts are trained in place."""
    with warnings.catch_warnings(action="ignore"):  # torch would have the other way to do it
        return reparametrized(torch.nn.utils.weight_norm, on)


@correct()
def layer_with_spectral_norm(on: torch.device) -> Subject:
    """A hook of torch divides the weight by its norm before every call."""
    return reparametrized(torch.nn.utils.spectral_norm, on)


@correct()
def statistics_beside_kept_getters(on: torch.device) -> Subject:
    """Kept getters read one entry of a table in which others are counted."""
    table: dict[str, Any] = {"s": 2.0, "hits": 0}
    get, item = table.get, operator.itemgetter("s")
    return beside(lambda x: x * (get("s") or 1.0) * item(table), on, lambda: table.update(hits=table["hits"] + 1))


@correct()
def called_in_inference_mode(on: torch.device) -> Subject:
    """Recorded outside of inference mode and called inside; nobody asks for it."""

    def calls(run: Run) -> None:
        with torch.inference_mode():
            run(x=rows(on, 3, 1))
        run(x=rows(on, 8, 2))

    return Subject(lambda x: x * 2, calls)


@correct()
def weights_written_and_frozen(on: torch.device) -> Subject:
    """Weights are written in place and frozen; the body asks neither for versions nor for requires_grad."""
    model = nn.Linear(WIDTH, WIDTH).to(on)

    def change() -> None:
        with torch.no_grad():
            model.weight.mul_(0.5)
        model.requires_grad_(not model.weight.requires_grad)

    return beside(calling(model), on, change)


@correct()
def pruned_by_two(on: torch.device) -> Subject:
    """Two prunings of one weight, and one of the bias."""

    def both(model: nn.Module) -> None:
        for _ in range(2):
            prune.l1_unstructured(model, "weight", 0.3)
        prune.l1_unstructured(model, "bias", 0.5)

    model = nn.Linear(WIDTH, WIDTH).to(on)
    both(model)
    return in_turn(calling(model), on)


@correct()
def statistics_beside_objects_in_passing(on: torch.device) -> Subject:
    """A config is read through an object that each call makes, and calls are counted beside what is read."""
    config = SimpleNamespace(scale=2.0, hits=0)

    def step(x: torch.Tensor) -> Any:
        return x * SimpleNamespace(config=config).config.scale

    return beside(step, on, lambda: setattr(config, "hits", config.hits + 1))


@correct()
def entries_beside_a_pattern(on: torch.device) -> Subject:
    """A pattern reads one entry of a table in which others are counted."""
    table: dict[str, Any] = {"kind": "linear", "hits": 0}

    def step(x: torch.Tensor) -> Any:
        match table:
            case {"kind": "linear"}:
                return x * 2
        return x

    return beside(step, on, lambda: table.update(hits=table["hits"] + 1))


@correct()
def candidates_that_are_not_picked(on: torch.device) -> Subject:
    """One of several objects is picked by its rank; values of the others are trained."""

    class Candidate:
        def __init__(self, rank: int) -> None:
            self.rank, self.value = rank, 2.0

    first, best = Candidate(1), Candidate(2)

    def step(x: torch.Tensor) -> Any:
        return x * max([first, best], key=lambda one: one.rank).value

    return beside(step, on, lambda: setattr(first, "value", first.value + 1))


@correct()
def lists_made_for_every_call(on: torch.device) -> Subject:
    """Lists, tuples and dicts are made in every call, of activations and of what a config holds."""
    config = SimpleNamespace(scales=[2.0, 3.0], hits=0)

    def step(x: torch.Tensor) -> Any:
        parts = [x * scale for scale in config.scales]
        return torch.stack([*parts, x]).sum(0) + sum([one.sum(1, keepdim=True) for one in (x, parts[0])])

    return beside(step, on, lambda: setattr(config, "hits", config.hits + 1))
