"""Trial runs: what the first run makes is a constant, or is refused where it is made of the batch; modules and gaps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from phonograph import Slot, graph_break, graphed
from phonograph.graphs.progress import silent
from runners import WIDTH
from trial_bodies import Plain, equal, made_from, outputs_of


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
    assert all("test_first_runs.py:" in str(one.error) for one in failures)
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
