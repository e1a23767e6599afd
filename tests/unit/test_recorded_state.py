"""Trial runs: state in tensors and constants of the body are recorded, and left as they were."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from phonograph import graph_break
from phonograph.graphs.progress import silent
from phonograph.graphs.trust.guard import guard
from runners import WIDTH
from trial_bodies import SIZES, Body, Plain, equal, made_from, outputs_of


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


def kept_by_a_function() -> Body:
    def body(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(body, "table"):
            body.table = torch.tensor([2.0] * WIDTH)  # type: ignore[attr-defined]
        return x * body.table  # type: ignore[attr-defined]

    return body


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
    "a table that a function keeps": kept_by_a_function,
    "a log in a gap": logging_in_a_gap,
    "batch norm that learns": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm that does not": lambda: nn.BatchNorm1d(WIDTH).eval(),
}


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


def test_constants_outlive_their_owner() -> None:
    """A recording reads the table of its shape, which the body replaces with that of another."""
    body = LastMemo()
    made = made_from(body)
    assert not made.capture(silent).failures
    for key in made.runner.captured:
        assert any(held.numel() == 4 * key.size for held in made.runner.recording(key).holds)  # bytes of a table
