"""Bugs of Python state: the body changes something at every run that a replay, which runs no Python, does not."""

from __future__ import annotations

import collections
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.animals import WIDTH, Mechanism, Run, Subject, rows, stateless
from zoo.judge import bug

STATE = Mechanism.STATE


def repeated(body: Callable[..., Any], on: torch.device, state: Callable[[], Any] = stateless) -> Subject:
    """Calls of several sizes; what the first leaves behind shows in the second."""

    def calls(run: Run) -> None:
        for index, count in enumerate((3, 3, 7, 2, 8)):
            run(x=rows(on, count, index + 1))

    return Subject(body, calls, state=state)


@bug(STATE, names="count")
def python_counter(on: torch.device) -> Subject:
    """A step counter of the module is counted up and multiplied with."""

    class Counting(nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    model = Counting()
    return repeated(model, on, lambda: model.count)


@bug(STATE, names="history")
def python_list(on: torch.device) -> Subject:
    """Every call appends to a list, and the mean of the list is added."""
    history: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        history.append(x.mean(-1).amax())
        return x + torch.stack(history).mean()

    return repeated(step, on, lambda: len(history))


@bug(STATE, names="window")
def python_deque(on: torch.device) -> Subject:
    """A deque keeps the sizes of the last calls."""
    window: collections.deque[int] = collections.deque([1], maxlen=3)

    def step(x: Tensor) -> Tensor:
        window.append(len(window) + window[-1])
        return x * sum(window)

    return repeated(step, on, lambda: list(window))


@bug(STATE, names="numbers", has_line=False)
def python_iterator(on: torch.device) -> Subject:
    """A counter is an itertools.count that the body advances."""
    numbers = itertools.count(1)
    return repeated(lambda x: x * next(numbers), on)


@bug(STATE, names="generator|noise", has_line=False)
def python_generator(on: torch.device) -> Subject:
    """A schedule is a generator function's iterator."""

    def noise() -> Iterator[float]:
        for step in itertools.count(1):
            yield 1.0 / step

    generator = noise()
    return repeated(lambda x: x * next(generator), on)


_depth: ContextVar[int] = ContextVar("zoo_depth", default=1)


@bug(STATE, names="zoo_depth|_depth")
def context_variable_counted(on: torch.device) -> Subject:
    """The body counts up a context variable."""
    _depth.set(1)

    def step(x: Tensor) -> Tensor:
        _depth.set(_depth.get() + 1)
        return x * _depth.get()

    return repeated(step, on, _depth.get)


_local = threading.local()


@bug(STATE, names="count")
def thread_local_counted(on: torch.device) -> Subject:
    """The body counts in a threading.local."""
    _local.count = 0

    def step(x: Tensor) -> Tensor:
        _local.count += 1
        return x * _local.count

    return repeated(step, on, lambda: _local.count)


@bug(STATE, names="calls")
def function_attribute_counted(on: torch.device) -> Subject:
    """The counter is an attribute of the function itself."""

    def step(x: Tensor) -> Tensor:
        step.calls += 1  # type: ignore[attr-defined]
        return x * step.calls  # type: ignore[attr-defined]

    step.calls = 0  # type: ignore[attr-defined]
    return repeated(step, on, lambda: step.calls)  # type: ignore[attr-defined]


@bug(STATE, names="total")
def class_attribute_counted(on: torch.device) -> Subject:
    """The counter stands on the class and is shared by all instances."""

    class Counting(nn.Module):
        total = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).total += 1
            return x * type(self).total

    return repeated(Counting(), on, lambda: Counting.total)


@bug(STATE, names="calls|weight")
def attribute_of_a_tensor(on: torch.device) -> Subject:
    """A counter is an attribute of a parameter, as quantisation libraries keep their scales."""
    weight: Any = torch.ones(WIDTH, device=on)
    weight.calls = 0

    def step(x: Tensor) -> Tensor:
        weight.calls += 1
        return x * weight * weight.calls

    return repeated(step, on, lambda: weight.calls)


@bug(STATE, names="_count|globals")
def counter_in_globals_by_name(on: torch.device) -> Subject:
    """The body counts in globals() under a name that no bytecode has."""
    globals()["_zoo_count"] = 0

    def step(x: Tensor) -> Tensor:
        globals()["_zoo_count"] += 1
        return x * globals()["_zoo_count"]

    return repeated(step, on, lambda: globals()["_zoo_count"])


@bug(STATE, names="counts")
def numpy_counter(on: torch.device) -> Subject:
    """The counter is an element of a numpy array."""
    counts = np.zeros(2)

    def step(x: Tensor) -> Tensor:
        counts[0] += 1
        return x * float(counts[0])

    return repeated(step, on, counts.tolist)


@bug(STATE, names="seen|WeakKeyDictionary")
def weak_dictionary_counted(on: torch.device) -> Subject:
    """The count is kept in a WeakKeyDictionary by module."""
    model = nn.Identity()
    seen = weakref.WeakKeyDictionary({model: 0})

    def step(x: Tensor) -> Tensor:
        seen[model] += 1
        return x * seen[model]

    return repeated(step, on, lambda: seen[model])


@bug(STATE, names="random")
def host_random_numbers(on: torch.device) -> Subject:
    """Layer drop draws from Python's own random numbers."""

    def step(x: Tensor) -> Tensor:
        return x * (1.0 + random.random())

    return repeated(step, on)


@bug(STATE, names="random")
def numpy_random_numbers(on: torch.device) -> Subject:
    """Noise is scaled by a draw of numpy's global generator."""

    def step(x: Tensor) -> Tensor:
        return x * float(np.random.rand())

    return repeated(step, on)


@bug(STATE, names="dice")
def own_random_object(on: torch.device) -> Subject:
    """The body draws from a random.Random that it holds."""
    dice = random.Random(3)
    return repeated(lambda x: x * dice.random(), on)


@bug(Mechanism.GUARD, names="time|perf_counter|mul", differs_by_itself=True)
def time_dependent(on: torch.device) -> Subject:
    """The result depends on how much time has passed."""
    begun = time.monotonic_ns()

    def step(x: Tensor) -> Tensor:
        return x * float((time.monotonic_ns() - begun) // 1000)

    return repeated(step, on)


@bug(STATE, names="hidden")
def recurrent_state_replaced(on: torch.device) -> Subject:
    """A recurrent layer assigns its new hidden state in place of writing it."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = torch.zeros(WIDTH, device=on)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.tanh(self.hidden + x[0])
            return x + self.hidden

    model = Recurrent()
    return repeated(model, on, lambda: model.hidden)
