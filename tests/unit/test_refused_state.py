"""Trial runs: state that Python keeps from call to call is refused by name, with everything put back."""

from __future__ import annotations

import collections
import itertools
import linecache
import queue
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phonograph.graphs.progress import silent
from runners import WIDTH
from trial_bodies import Body, Plain, equal, made_from, outputs_of


class Counter:
    """Counts its calls in Python."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x * self.n


class Slotted:
    __slots__ = ("pos",)

    def __init__(self) -> None:
        self.pos = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.pos += x.shape[0]
        return x + self.pos


def in_a_class() -> Body:
    class Counted:
        total = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            Counted.total += 1
            return x + Counted.total

    return Counted()


class Recurrent(nn.Module):
    h: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.h + 1
        return x + self.h


class Ring:
    """The index is a Python number, the ring a tensor."""

    def __init__(self) -> None:
        self.at, self.ring = 0, torch.zeros(3, WIDTH)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.ring[self.at] = x[0]
        self.at = (self.at + 1) % 3
        return x + self.ring.sum(0)


class Previous:
    """Reads what the last call left, and every call leaves the same for its shape."""

    def __init__(self) -> None:
        self.size = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.size
        self.size = x.shape[0]
        return y


def generator() -> Body:
    def numbers() -> Iterator[int]:
        yield from range(1, 1000)

    stream = numbers()
    return lambda x: x * next(stream)


def counting() -> Body:
    held = Plain(stream=itertools.count(1))
    return lambda x: x * next(held.stream)


def nested() -> Body:
    held = [{"n": 0}]

    def body(x: torch.Tensor) -> torch.Tensor:
        held[0]["n"] += 1
        return x * held[0]["n"]

    return body


def rotated() -> Body:
    held = [torch.full((WIDTH,), float(i)) for i in range(3)]

    def body(x: torch.Tensor) -> torch.Tensor:
        held.append(held.pop(0))
        return x + held[0]

    return body


def queued() -> Body:
    last: deque[int] = deque([0], maxlen=3)

    def body(x: torch.Tensor) -> torch.Tensor:
        last.append(x.shape[0])
        return x + sum(last)

    return body


def flipped() -> Body:
    on = False

    def body(x: torch.Tensor) -> torch.Tensor:
        nonlocal on
        on = not on
        return x if on else -x

    return body


def drawn() -> Body:
    return lambda x: x * random.random()


def drawn_from_numpy() -> Body:
    numbers = np.random.default_rng(1)
    return lambda x: x * float(numbers.random())


def drawn_from_torch() -> Body:
    numbers = torch.Generator().manual_seed(1)
    return lambda x: x * torch.rand(WIDTH, generator=numbers)


def by_identity() -> Body:
    tables: dict[Plain, torch.Tensor] = {}

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * tables.setdefault(Plain(), torch.ones(WIDTH))

    return body


def in_an_array() -> Body:
    held = np.zeros(2)

    def body(x: torch.Tensor) -> torch.Tensor:
        held[0] += 1
        return x * float(held[0])

    return body


def default_argument() -> Body:
    def body(x: torch.Tensor, held: list[int] = []) -> torch.Tensor:  # noqa: B006 - the subject
        held.append(1)
        return x * len(held)

    return body


_calls = 0


def count_globally() -> int:
    global _calls  # noqa: PLW0603 - the subject
    _calls += 1
    return _calls


def globally() -> Body:
    global _calls  # noqa: PLW0603
    _calls = 0
    return lambda x: x * count_globally()


def lazily_counted() -> Body:
    held: dict[str, Any] = {}

    def body(x: torch.Tensor) -> torch.Tensor:
        counts = held.setdefault("counts", defaultdict(int))
        counts["n"] += 1
        return x * counts["n"]

    return body


def put_in(held: queue.Queue[int] | queue.SimpleQueue[int]) -> Body:
    def body(x: torch.Tensor) -> torch.Tensor:
        held.put(1)
        return x * held.qsize()

    return body


def taken_from(held: queue.Queue[int] | queue.SimpleQueue[int]) -> Body:
    for n in range(20):
        held.put(n)

    return lambda x: x * held.get()


def once_set() -> Body:
    warm = threading.Event()

    def body(x: torch.Tensor) -> torch.Tensor:
        factor = 3 if warm.is_set() else 2
        warm.set()
        return x * factor

    return body


def replacing_data() -> Body:
    held = torch.zeros(WIDTH)

    def body(x: torch.Tensor) -> torch.Tensor:
        held.data = held.data + 1
        return x * held

    return body


def setting_memory() -> Body:
    held = torch.zeros(WIDTH)

    def body(x: torch.Tensor) -> torch.Tensor:
        held.set_((held + 1).untyped_storage(), 0, (WIDTH,), (1,))
        return x * held

    return body


class ReplacingAWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 2
        return super().forward(x)


def in_a_function() -> Body:
    def body(x: torch.Tensor) -> torch.Tensor:
        body.last = x * 2  # type: ignore[attr-defined]
        return x * 3

    return body


class Sized:
    """Keeps the size of its last call, for others to read."""

    def __init__(self, read: Callable[[torch.Tensor], Any], then: Any = None) -> None:
        self.read = read
        self.n = then

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.n = self.read(x)
        return x * 2


REFUSED: dict[str, tuple[Callable[[], Body], str]] = {
    "an attribute": (Counter, "Counter.n"),
    "a slot of a class": (Slotted, "Slotted.pos"),
    "a class attribute": (in_a_class, "Counted.total"),
    "a number in a dict in a list": (nested, "held[0]['n']"),
    "a tensor that every call replaces": (Recurrent, "Recurrent.h"),
    "the index of a ring": (Ring, "Ring.at"),
    "a list that is rotated": (rotated, "held"),
    "a deque": (queued, "last"),
    "a flag that comes back": (flipped, "on"),
    "a global": (globally, "test_refused_state._calls"),
    "a default argument": (default_argument, "the body changes body"),
    "what a body makes and then counts in": (lazily_counted, "held['counts']['n']"),
    "an array": (in_an_array, "held"),
    "a memo that never hits": (by_identity, "tables["),
    "what the last call left": (Previous, "Previous.size"),
    "a queue": (lambda: put_in(queue.Queue()), "Queue.queue"),
    "a queue that is read": (lambda: taken_from(queue.Queue()), "Queue.queue"),
    "a simple queue": (lambda: put_in(queue.SimpleQueue()), "held"),
    "a simple queue that is read": (lambda: taken_from(queue.SimpleQueue()), "held"),
    "an event": (once_set, "Event._flag"),
    "the memory of a tensor": (replacing_data, "held.data"),
    "the memory of a tensor, by set_": (setting_memory, "held.data"),
    "the memory of a weight": (ReplacingAWeight, "ReplacingAWeight.weight.data"),
    "the size of a call": (lambda: Sized(len), "Sized.n"),
    "the shape of a call": (lambda: Sized(lambda x: x.shape), "Sized.n"),
    "whether a call is small": (lambda: Sized(lambda x: len(x) < 4, then=False), "Sized.n"),
    "the first attribute of a function": (in_a_function, "body.last"),
    "random numbers": (drawn, "random"),
    "numpy's random numbers": (drawn_from_numpy, "numbers"),
    "torch's random numbers": (drawn_from_torch, "numbers"),
    "a generator": (generator, "the iterator stream"),
    "an iterator": (counting, "the iterator Plain.stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_python_state_is_refused_by_name_and_left_as_it_was(name: str) -> None:
    make, place = REFUSED[name]
    wanted = outputs_of(make())
    made = made_from(make())
    report = made.capture(silent)
    assert len(report.failures) == len(report.rows) == 4
    for row in report.rows:
        assert place in str(row.error), row.error
    equal(outputs_of(made), wanted)
    assert made.stats.replays.total() == 0


def test_a_change_that_a_library_makes_is_named_by_the_line_that_calls_it() -> None:
    calls = collections.Counter[str]()

    def body(x: torch.Tensor) -> torch.Tensor:
        calls["missing"] += 0
        calls.update(["n"])
        return x * calls["n"]

    error = made_from(body).capture(silent).failures[0].error
    assert error is not None
    assert error.frame is not None
    assert (error.frame.file, error.frame.function) == (__file__, "body")
    assert linecache.getline(__file__, error.frame.line).strip() == 'calls.update(["n"])'


def test_an_event_that_is_set_later_is_seen() -> None:
    """What a body asks of an event is compared at every call."""
    steering = threading.Event()
    run = made_from(lambda x: x * 2 if steering.is_set() else x)
    run.capture(silent)
    x = torch.ones(2, WIDTH)
    assert torch.equal(run(x), x)
    steering.set()
    assert torch.equal(run(x), x * 2)


def test_a_value_that_is_set_by_size_is_named_with_its_line_unless_it_is_ignored() -> None:
    body = Sized(len, then=0)
    error = made_from(body).capture(silent).failures[0].error
    assert error is not None
    assert error.frame is not None
    assert linecache.getline(__file__, error.frame.line).strip() == "self.n = self.read(x)"
    assert body.n == 0
    made = made_from(body, ignore=("Sized.n",))
    assert not made.capture(silent).failures
