"""Trial runs: what a body keeps from call to call is recorded right, or refused by name with everything put back."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import linecache
import logging
import queue
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from phonograph import Graphed, Slot, graph_break, graphed
from phonograph.graphs.progress import silent
from phonograph.graphs.trust.guard import guard
from runners import WIDTH

SIZES = (3, 2, 4, 7, 8, 5, 9, 1)
Body = Callable[[torch.Tensor], torch.Tensor]


class Plain:
    """An object without a purpose of its own."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


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


class LazyState(nn.Module):
    """Makes its state itself, in the way of recurrent caches."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.make = make
        self.h: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.h is None:
            self.h = self.make()
        self.h.mul_(2).add_(1)
        return x + self.h


def from_empty() -> torch.Tensor:
    h = torch.empty(WIDTH)
    h.fill_(3)
    h[0] = 7
    return h


class MovingAverage(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(torch.ones(WIDTH), 0.1)
        return x - self.mean


class Ring:
    """The index is a Python number, the ring a tensor."""

    def __init__(self) -> None:
        self.at, self.ring = 0, torch.zeros(3, WIDTH)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.ring[self.at] = x[0]
        self.at = (self.at + 1) % 3
        return x + self.ring.sum(0)


class Memo:
    """A table for each shape."""

    def __init__(self) -> None:
        self.tables: dict[int, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n not in self.tables:
            self.tables[n] = torch.tensor([float(i) for i in range(n)])
        return x + self.tables[n][:, None]


class LastMemo:
    """A table for the last shape only, made in place."""

    def __init__(self) -> None:
        self.n, self.table = 0, torch.zeros(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.n != x.shape[0]:
            self.n, self.table = x.shape[0], torch.zeros(x.shape[0])
            self.table[::2] = torch.tensor(2.0)
        return x + self.table[:, None]


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


def in_a_plain_object() -> Body:
    held = Plain(inner=Plain(t=torch.zeros(WIDTH)))

    def body(x: torch.Tensor) -> torch.Tensor:
        held.inner.t.add_(1)
        return x + held.inner.t

    return body


def per_shape_state() -> Body:
    held = {n: torch.zeros(WIDTH) for n in range(10)}

    def body(x: torch.Tensor) -> torch.Tensor:
        held[x.shape[0]].add_(1)
        return x * 2

    return body


def remembered() -> Body:
    @functools.lru_cache
    def table(n: int) -> torch.Tensor:
        return torch.tensor([1.0] * n)

    return lambda x: x * table(x.shape[0])[:, None]


_TABLES: dict[int, torch.Tensor] = {}


def globally_remembered() -> Body:
    _TABLES.clear()

    def body(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n not in _TABLES:
            _TABLES[n] = torch.tensor(range(n))
        return x + _TABLES[n][:, None]

    return body


def logging_in_a_gap() -> Body:
    held = Plain(n=0, log=None)

    @graph_break
    def log(x: torch.Tensor) -> None:
        held.n += 1
        held.log = [*(held.log or ()), held.n]
        logging.getLogger("test").debug("%d calls", held.n)

    def body(x: torch.Tensor) -> torch.Tensor:
        log(x)
        return x + 1

    return body


class Cached:
    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.tensor([2.0] * WIDTH)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes = (x.shape[1], "wide")  # made anew by every call, and equal
        self.view = self.table[:2]
        return x * self.table


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


class Sized:
    """Keeps the size of its last call, for others to read."""

    def __init__(self, read: Callable[[torch.Tensor], Any], then: Any = None) -> None:
        self.read = read
        self.n = then

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.n = self.read(x)
        return x * 2


class SizedCache:
    """Makes its table anew where the size is another."""

    def __init__(self) -> None:
        self.n = 0
        self.is_small = False
        self.table = torch.ones(0, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.n != x.shape[0]:
            self.n = x.shape[0]
            self.table = torch.arange(float(self.n))[:, None]
        if self.n < 4 and not self.is_small:
            self.is_small = True
        return x + self.table


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
    "a global": (globally, "test_trial_runs._calls"),
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
    "random numbers": (drawn, "random"),
    "numpy's random numbers": (drawn_from_numpy, "numbers"),
    "torch's random numbers": (drawn_from_torch, "numbers"),
    "a generator": (generator, "the iterator stream"),
    "an iterator": (counting, "the iterator Plain.stream"),
}
RECORDED: dict[str, Callable[[], Body]] = {
    "state that the body makes": lambda: LazyState(lambda: torch.zeros(WIDTH)),
    "state that the body makes in steps": lambda: LazyState(from_empty),
    "a moving average": MovingAverage,
    "a tensor in a plain object": in_a_plain_object,
    "state for each shape": per_shape_state,
    "a table for each shape": Memo,
    "a table for the last shape": LastMemo,
    "a table for the last size": SizedCache,
    "an lru_cache": remembered,
    "a global table": globally_remembered,
    "a cached property": Cached,
    "a log in a gap": logging_in_a_gap,
    "batch norm that learns": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm that does not": lambda: nn.BatchNorm1d(WIDTH).eval(),
}


def made_from(body: Body, **more: Any) -> Graphed:
    def call(x: torch.Tensor) -> torch.Tensor:
        return body(x)

    slots = [Slot("x", ("seqs", WIDTH), torch.float32)]
    return graphed(
        call, slots=slots, bucketed="seqs", buckets=[1, 2, 4, 8], device="emulated", backend="breakable", **more
    )


def outputs_of(call: Body, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    torch.manual_seed(3)
    random.seed(3)
    inputs = [torch.randn(n, WIDTH) for n in sizes]
    with torch.no_grad():
        return [call(x) for x in inputs]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


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


@pytest.mark.parametrize("name", RECORDED)
def test_state_in_tensors_and_constants_are_recorded_and_left_as_they_were(name: str) -> None:
    make = RECORDED[name]
    # BatchNorm would count padded rows, as a note of verify says: sizes that are buckets have none.
    sizes = tuple(n for n in SIZES if n in (2, 4, 8)) * 2 if "batch norm" in name else SIZES
    wanted = outputs_of(make(), sizes)
    made = made_from(make())
    report = made.capture(silent)
    refused = [str(row.error) for row in report.failures if row.key.size > 1 or "learns" not in name]
    assert not refused
    made.verify()
    equal(outputs_of(made, sizes), wanted)
    assert made.stats.replays.total() == sum(n <= 8 for n in sizes)


def test_a_log_in_a_gap_has_one_entry_for_each_call() -> None:
    held = Plain(n=0)

    @graph_break
    def log(x: torch.Tensor) -> None:
        held.n += 1

    def body(x: torch.Tensor) -> torch.Tensor:
        log(x)
        return x + 1

    made = made_from(body)
    assert not made.capture(silent).failures
    assert made.verify().ok
    assert held.n == 0
    outputs_of(made, (2, 3, 9))
    assert held.n == 3


class Attention:
    """Keeps what it has seen in a list, which only its gap reads."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    @graph_break
    def attend(self, q: torch.Tensor) -> torch.Tensor:
        self.seen.append(q.sum(0))
        return q + torch.stack(self.seen).sum(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x + 1) * 2

    @contextlib.contextmanager
    def kept(self, batch: Any) -> Iterator[None]:
        before = list(self.seen)
        try:
            yield
        finally:
            self.seen[:] = before


def test_a_list_that_a_gap_moves_is_refused_with_the_way_out_which_works() -> None:
    attention = Attention()
    error = str(made_from(attention).capture(silent).failures[0].error)
    assert "a @graph_break, host_plan or the sample has changed" in error
    assert "Attention.seen" in error
    assert "preserve=" in error
    assert not attention.seen
    made = made_from(attention, preserve=attention.kept)
    assert not made.capture(silent).failures
    assert not attention.seen
    sizes = (2, 4, 1, 8)  # the gap sees padded rows too
    equal(outputs_of(made, sizes), outputs_of(Attention(), sizes))
    assert made.stats.replays.total() == 4


def test_running_statistics_are_written_by_calls_only() -> None:
    """Batch norm writes them without its op's schema saying so."""
    norm, eager = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
    made = made_from(norm)
    made.capture(silent)
    made.verify()
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
    assert norm.num_batches_tracked == 0
    outputs_of(made, (2, 4, 8, 2))
    outputs_of(eager, (2, 4, 8, 2))
    assert made.stats.replays.total() == 4
    torch.testing.assert_close(dict(norm.named_buffers()), dict(eager.named_buffers()))


def test_what_an_op_writes_without_a_word_is_put_back() -> None:
    """A custom op that declares no writes, on memory that nothing but its arguments shows."""
    with torch.library._scoped_library("phonograph_tests", "DEF") as library:
        library.define("bump(Tensor x, Tensor state) -> Tensor")

        def bump(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            return x + state

        library.impl("bump", bump, "CompositeExplicitAutograd")
        state = torch.zeros(WIDTH)
        made = made_from(lambda x: torch.ops.phonograph_tests.bump(x, state))
        assert not made.capture(silent).failures
        made.verify()
        assert not state.any()
        x = torch.randn(2, WIDTH)
        torch.testing.assert_close(made(x), x + 1)
        torch.testing.assert_close(made(x), x + 2)


def test_state_of_every_shape_is_put_back() -> None:
    held = {n: torch.zeros(WIDTH) for n in range(10)}

    def body(x: torch.Tensor) -> torch.Tensor:
        held[x.shape[0]].add_(1)
        return x * 2

    made = made_from(body)
    assert not made.capture(silent).failures
    made.verify()
    assert not any(bool(one.any()) for one in held.values())


@pytest.mark.parametrize("used", [0, 2])
def test_every_trial_run_begins_with_the_same_state(used: int) -> None:
    """A cache with place for one token more: each run takes it, and leaves it to the next."""
    cache, length = torch.zeros(3, WIDTH), torch.tensor(used)

    def step(x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, length[None], x.sum(0, keepdim=True))
        length.add_(1)
        return x + cache.sum(0)

    run = made_from(step)
    assert not run.capture(silent).failures
    assert guard(run.runner).ok
    assert int(length) == used
    x = torch.ones(4, WIDTH)
    for index in range(3 - used):
        torch.testing.assert_close(run(x), x + 4 * (index + 1))
    with pytest.raises(IndexError):
        run(x)
    assert run.stats.replays.total() == 3 - used


class Lazily(nn.Module):
    """Makes something at its first call, and reads it at all."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make, self.kept = make, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.make(x)
        kept: Any = self.kept["deep"][0] if isinstance(self.kept, dict) else self.kept
        return x * kept


OF_THE_BATCH: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x.abs().amax(),
    "number": lambda x: float(x.abs().amax()),
    "in containers": lambda x: {"deep": [x.abs().amax()]},
    "written in place": lambda x: torch.zeros(WIDTH).copy_(x[0]),
}
OF_NO_BATCH: dict[str, Callable[[torch.Tensor], Any]] = {
    "table": lambda x: torch.arange(WIDTH) / WIDTH,
    "number": lambda x: float(x.shape[1]),
    "in containers": lambda x: {"deep": [torch.ones(WIDTH)], "size": x.shape[1]},
    "not a number": lambda x: torch.tensor([float("nan"), 1.0]).repeat(WIDTH // 2),
    "draws": lambda x: torch.rand(WIDTH),
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_what_the_first_run_makes_of_its_batch_is_refused_until_a_call_has_made_it(name: str) -> None:
    body = Lazily(OF_THE_BATCH[name])
    made = made_from(body)
    failures = made.capture(silent).failures
    assert len(failures) == 4
    assert all("Lazily.kept of its inputs" in str(one.error) for one in failures)
    assert all("test_trial_runs.py:" in str(one.error) for one in failures)
    assert body.kept is None
    x = torch.randn(4, WIDTH)
    wanted = Lazily(OF_THE_BATCH[name])(x)
    torch.testing.assert_close(made(x), wanted)
    assert not made.capture(silent).failures
    torch.testing.assert_close(made(x), wanted)
    assert made.stats.replays.total() == 1


@pytest.mark.parametrize("name", OF_NO_BATCH)
def test_what_the_first_run_makes_of_no_batch_is_a_constant(name: str) -> None:
    body = Lazily(OF_NO_BATCH[name])
    made = made_from(body)
    assert not made.capture(silent).failures
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(made(x), body(x), equal_nan=True)
    assert made.stats.replays.total() == 1


def test_what_the_first_run_makes_of_its_batch_may_be_ignored() -> None:
    body = Lazily(OF_THE_BATCH["tensor"])
    assert not made_from(body, ignore=["Lazily.kept"]).capture(silent).failures


def test_constants_outlive_their_owner() -> None:
    """A recording reads the table of its shape, which the body replaces with that of another."""
    body = LastMemo()
    made = made_from(body)
    assert not made.capture(silent).failures
    for key in made.runner.captured:
        assert any(held.numel() == 4 * key.size for held in made.runner.recording(key).holds)  # bytes of a table


def test_what_fails_leaves_nothing_that_it_made() -> None:
    """A first call that takes another way than all later ones still takes it after a capture that made nothing."""
    body = Plain(ready=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        body.ready = True
        return x * x.sum().item()

    made = made_from(run)
    assert len(made.capture(silent).failures) == 4
    assert body.ready is False


class CountingModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x * self.n


class InitialisedByData(nn.Module):
    """Its first call is another than all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.get_buffer("shift").copy_(-x.mean(0))
            self.ready = True
        return x + self.get_buffer("shift")


class KeepingInAGap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    @graph_break
    def sum_up(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x.sum())
        return x + torch.stack(self.kept).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum_up(x * 2)


@pytest.mark.parametrize("make", [CountingModule, InitialisedByData, KeepingInAGap])
def test_a_module_is_looked_into_as_a_function_is(make: type[nn.Module]) -> None:
    """Given to `graphed` itself, not in a function around it."""
    slots = [Slot("x", ("seqs", WIDTH), torch.float32)]
    made = graphed(make(), slots=slots, bucketed="seqs", buckets=[1, 2, 4, 8], device="emulated", backend="breakable")
    made.capture(silent)
    made.verify()
    for found, wanted in zip(outputs_of(made), outputs_of(make()), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_host_read_that_the_body_catches_is_no_way_out() -> None:
    """A recording would hold what the body does when the read fails, which it does in no eager call."""

    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.abs() if bool((x < 0).any()) else x
        except Exception:
            return x

    made = made_from(body)
    report = made.capture(silent)
    assert len(report.failures) == 4
    assert "reads the device from the host" in str(report.failures[0].error)
    x = -torch.ones(3, WIDTH)
    torch.testing.assert_close(made(x), x.abs())


def test_a_module_that_the_first_run_makes_is_a_constant() -> None:
    class Lazy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = None
            self.kept: Any = None

        def forward(self, x: torch.Tensor) -> Any:
            if self.inner is None:
                self.inner, self.kept = torch.nn.Linear(4, 4, bias=False), {"module": torch, "of": torch.nn.ReLU()}
                torch.nn.init.ones_(self.inner.weight)
            return self.inner(x)

    slots = [Slot("x", ("rows", 4), torch.float32)]
    run = graphed(Lazy(), slots=slots, bucketed="rows", buckets=[4], device="emulated")
    assert not run.capture().failures


def test_an_event_that_is_set_later_is_seen() -> None:
    """What a body asks of an event is compared at every call."""
    steering = threading.Event()
    run = made_from(lambda x: x * 2 if steering.is_set() else x)
    run.capture(silent)
    x = torch.ones(2, WIDTH)
    assert torch.equal(run(x), x)
    steering.set()
    assert torch.equal(run(x), x * 2)


def test_a_lazy_module_is_refused_before_its_first_call_and_left_as_it_was() -> None:
    layer = nn.LazyLinear(3)
    run = made_from(layer)
    failures = run.capture(silent).failures
    assert len(failures) == 4
    assert "LazyLinear.weight has no shape yet" in str(failures[0].error)
    assert "once with a real batch before capture()" in str(failures[0].error)
    assert isinstance(layer.weight, nn.UninitializedParameter)
    x = torch.ones(2, WIDTH)
    first = run(x)
    run.capture(silent)
    assert torch.equal(run(x), first)
    assert run.stats.replays.total() == 1


def test_a_value_that_is_set_by_size_is_named_with_its_line_unless_it_is_ignored() -> None:
    body = Sized(len, then=0)
    error = made_from(body).capture(silent).failures[0].error
    assert error is not None
    assert error.frame is not None
    assert linecache.getline(__file__, error.frame.line).strip() == "self.n = self.read(x)"
    assert body.n == 0
    made = made_from(body, ignore=("Sized.n",))
    assert not made.capture(silent).failures


@pytest.mark.parametrize("copies", [False, True])
def test_a_gap_that_collects_what_it_is_passed_must_copy_it(copies: bool) -> None:
    """Replays pass the same memory again."""
    hidden: list[torch.Tensor] = []
    last = Plain(q=None)

    @graph_break
    def collect(q: torch.Tensor) -> None:
        last.q = q  # for the rest of the step
        hidden.append(q.clone() if copies else q)
        del hidden[:-2]

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        collect(y)
        return y + 1

    made = made_from(body)
    failures = made.capture(silent).failures
    assert bool(failures) is not copies
    assert all("keeps in hidden a tensor that it was passed" in str(row.error) for row in failures)
    for n in (1.0, 5.0):
        made(torch.full((4, WIDTH), n))
    assert [one[0, 0].item() for one in hidden] == [2.0, 10.0]
