"""Bugs of Python state: the body changes something at every run that a replay, which runs no Python, does not."""

from __future__ import annotations

import collections
import functools
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

from zoo.animals import WIDTH, Mechanism, Run, Subject, rows
from zoo.judge import bug

STATE = Mechanism.STATE
UNNAMED = "UNNAMED: verify finds it, and names no line"
UNSEEN = "SILENT: trial runs don't look there, so that replays begin with what these left"


def repeated(body: Callable[..., Any], on: torch.device, state: Callable[[], Any] = lambda: None) -> Subject:
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


@bug(STATE, names="zoo_depth|_depth", open=UNNAMED)
def context_variable_counted(on: torch.device) -> Subject:
    """The body counts up a context variable."""
    _depth.set(1)

    def step(x: Tensor) -> Tensor:
        _depth.set(_depth.get() + 1)
        return x * _depth.get()

    return repeated(step, on, _depth.get)


_local = threading.local()


@bug(STATE, names="count", open=UNNAMED)
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


@bug(STATE, names="calls|weight", open=UNNAMED)
def attribute_of_a_tensor(on: torch.device) -> Subject:
    """A counter is an attribute of a parameter, as quantisation libraries keep their scales."""
    weight: Any = torch.ones(WIDTH, device=on)
    weight.calls = 0

    def step(x: Tensor) -> Tensor:
        weight.calls += 1
        return x * weight * weight.calls

    return repeated(step, on, lambda: weight.calls)


@bug(STATE, names="_count|globals", open=UNNAMED)
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


@bug(Mechanism.GUARD, names="time|perf_counter|mul", open=UNNAMED)
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


class Lazy(nn.Module):
    """Makes its state at the first call."""

    def __init__(self, first: Callable[[Tensor], Tensor], later: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.first, self.later = first, later

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.first(x)
        return self.later(self.kept, x)


@bug(STATE, names="kept")
def lazily_made_state(on: torch.device) -> Subject:
    """The first call makes the state that later calls add to."""
    model = Lazy(lambda x: torch.zeros(WIDTH, device=x.device), lambda kept, x: x + kept.add_(x[0]))
    return repeated(model, on, lambda: model.kept)


@bug(STATE, names="kept", open="SILENT: what the first run makes of its inputs is made of a sample, and stays")
def calibrated_on_the_first_batch(on: torch.device) -> Subject:
    """A quantisation scale is taken from the first batch, which capture makes a random sample."""
    model = Lazy(lambda x: x[0].abs().amax(), lambda kept, x: (x / kept * 7).round())
    return repeated(model, on, lambda: model.kept)


@bug(STATE, names="kept|first", open="UNNAMED: the refusal has no line")
def first_call_returns_early(on: torch.device) -> Subject:
    """A cache for video features: the first call fills it and returns, later calls take the difference."""

    class Early(nn.Module):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = x[0].clone()
                return x
            return x - self.kept

    model = Early()
    return repeated(model, on, lambda: model.kept)


@bug(STATE, names="sums", open="SILENT: one bucket's state serves all sizes that are padded to it")
def state_per_batch_size(on: torch.device) -> Subject:
    """Running sums are kept per batch size, which with padding is the bucket's."""
    sums = {size: torch.zeros(WIDTH, device=on) for size in range(1, 9)}

    def step(x: Tensor) -> Tensor:
        return x + sums[x.shape[0]].add_(x[0])

    return repeated(step, on, lambda: sums)


@bug(STATE, names="table|means", has_line=False)
def dict_cache_keyed_by_batch(on: torch.device) -> Subject:
    """A dict remembers, by batch size, a statistic of the first batch of that size."""
    means: dict[int, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        if x.shape[0] not in means:
            means[x.shape[0]] = x[0] * 2
        return x - means[x.shape[0]]

    return repeated(step, on, lambda: sorted(means))


@bug(STATE, names="remember|cache", has_line=False)
def cached_function_of_the_size(on: torch.device) -> Subject:
    """functools.cache over the size keeps a noise vector that is drawn once per size."""

    @functools.cache
    def remember(size: int) -> Tensor:
        return torch.rand(WIDTH, device=on) * size

    return repeated(lambda x: x + remember(x.shape[0]), on)


@bug(STATE, names="optimizer|weight", open=UNSEEN)
def optimizer_inside(on: torch.device) -> Subject:
    """Test-time training: the body takes an optimizer step with momentum on its weights."""
    weight = nn.Parameter(torch.ones(WIDTH, device=on))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        weight.grad = x[0].clone()
        optimizer.step()
        return x * weight.detach()

    return repeated(step, on, weight.detach)


@bug(STATE, names="grad|weight", open="SILENT: a gradient that is made in the body is no state that trial runs see")
def gradients_accumulated(on: torch.device) -> Subject:
    """Gradients are left on in the body: backward() accumulates into `.grad` at every call."""
    weight = nn.Parameter(torch.ones(WIDTH, device=on))

    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            (x[0] * weight).sum().backward()
        assert weight.grad is not None
        return x + weight.grad

    return repeated(step, on, lambda: weight.grad)


@bug(STATE, names="last_hidden")
def output_left_on_the_module(on: torch.device) -> Subject:
    """The caller reads a hidden state that the body leaves on the module."""

    class Tapped(nn.Module):
        last_hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last_hidden = torch.tanh(x)
            return self.last_hidden + 1

    model = Tapped()
    return repeated(model, on, lambda: model.last_hidden)


@bug(STATE, names="scratch")
def scratch_made_when_needed(on: torch.device) -> Subject:
    """Scratch memory is made by the first run; a larger batch, served eagerly, frees what recordings write to."""

    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scratch: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scratch is None or self.scratch.shape[0] < x.shape[0]:
                self.scratch = torch.zeros(max(64, x.shape[0] * 16), 64, device=x.device)
            self.scratch[: x.shape[0], :WIDTH] = x * 2
            return self.scratch[: x.shape[0], :WIDTH] + 1

    others: list[Tensor] = []

    def calls(run: Run) -> None:
        run(x=rows(on, 8, 1))
        run(x=rows(on, 65, 2))
        others.extend(torch.zeros(128, 64, device=on) for _ in range(16))
        run(x=rows(on, 8, 3))

    return Subject(Scratch(), calls, state=lambda: others)
