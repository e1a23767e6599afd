"""Inputs that are the body's own state: eager where the body reads them after it wrote that state."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from phonograph import Buckets, Graphed, Reason, Slot, graphed

X = Slot("x", ("rows", 4), torch.float32)


def made(body: Callable[[Tensor], Tensor]) -> Graphed:
    run = graphed(body, slots=[X], bucketed="rows", buckets=Buckets.of(4), device="cpu")
    run.capture()
    return run


class Counting(nn.Module):
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden[:4].add_(1)
        return x * 2


@pytest.mark.parametrize("rows", [slice(0, 4), slice(1, 3), slice(3, 4)])
def test_state_that_is_written_before_it_is_read_runs_eagerly(rows: slice, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = Counting(), Counting()
    run = made(model)
    with caplog.at_level(logging.WARNING, "phonograph"):
        for turn in range(3):
            assert torch.equal(run(x=model.hidden[rows]), twin(twin.hidden[rows])), turn
            assert torch.equal(model.hidden, twin.hidden)
    assert run.stats.eager == {Reason.STALE: 3}
    assert "hidden" in run.explain()
    (warned,) = (record.getMessage() for record in caplog.records if "eagerly" in record.getMessage())
    assert "Pass a copy" in warned


def test_other_memory_and_copies_are_replayed() -> None:
    model = Counting()
    run = made(model)
    for x in (torch.ones(3, 4), model.hidden[:2].clone(), torch.zeros(6, 4)[:4]):
        run(x=x)
    assert run.stats.eager.total() == 0
    assert run.stats.replays.total() == 3


def test_state_that_is_written_last_is_replayed() -> None:
    """A buffer that is passed, and overwritten by what comes of it: the common loop over one static buffer."""
    buffer = torch.ones(4, 4)

    def body(x: Tensor) -> Tensor:
        y = x * 2
        buffer.copy_(y)
        return y

    run = made(body)
    for turn in range(3):
        assert torch.equal(run(x=buffer), torch.full((4, 4), 2.0 ** (turn + 1)))
    assert run.stats.eager.total() == 0


def test_memory_that_took_the_place_of_freed_state_is_no_alarm() -> None:
    holder = {"hidden": torch.zeros(4, 4)}

    def body(x: Tensor) -> Tensor:
        holder["hidden"].add_(1)
        return x * 2

    run = made(body)
    del holder["hidden"]
    others = [torch.ones(4, 4) for _ in range(64)]
    for x in others:  # the state's number may be another tensor's by now
        decision = run.runner.decide({"x": x})
        assert "memory of" not in getattr(decision, "detail", "")


def test_a_view_taken_before_the_write_counts_where_it_is_read() -> None:
    hidden = torch.zeros(4, 4)

    def body(x: Tensor) -> Tensor:
        early = x[:, :2]
        hidden.add_(1)
        return early + 1

    run = made(body)
    wanted = [2.0, 3.0]
    for value in wanted:
        assert torch.equal(run(x=hidden), torch.full((4, 2), value))
    assert run.stats.eager == {Reason.STALE: 2}


def test_nothing_is_looked_for_where_facts_are_off() -> None:
    model = Counting()
    run = graphed(model, slots=[X], bucketed="rows", buckets=Buckets.of(4), device="cpu", facts="off")
    run.capture()
    run(x=model.hidden[:4])
    assert run.stats.replays.total() == 1
