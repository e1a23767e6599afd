"""Grid: two bucketed dims; every call is a replay of the smallest recording that holds it, or has a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import (
    Buckets,
    BufferPool,
    DeclarationError,
    Dim,
    Graphed,
    GraphedGrid,
    Pad,
    Reason,
    Replay,
    RunEagerly,
    Slot,
    graphed,
    open_device,
)
from phonograph.graphs.progress import silent

SLOTS = [
    Slot("x", ("seqs", "length", 4), torch.float32),
    Slot("mask", ("seqs", "length"), torch.int64, pad=Pad.fill(0), valid=(0, 1)),
]
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def attend(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every position sees those that the mask has; and a mean over them."""
    scores = (x @ WEIGHT @ x.mT).masked_fill(mask[:, None] == 0, -1e9)
    hidden = scores.softmax(-1) @ x
    return hidden, (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def grid(function: Callable[..., Any] = attend, *, sizes: Any = (3, 8, 16), **options: Any) -> GraphedGrid:
    pool = BufferPool(open_device("emulated"))

    def by_length(length: int) -> Graphed:
        dims = [Dim("length", limit=length)]
        return graphed(
            function,
            slots=SLOTS,
            bucketed="seqs",
            buckets=[1, 2, 5],
            dims=dims,
            pool=pool,
            device="emulated",
            **options,
        )

    return GraphedGrid(by_length, dim="length", sizes=sizes)


@pytest.fixture(scope="module")
def recorded() -> GraphedGrid:
    run = grid()
    assert not any(report.failures for report in run.capture(silent).values())
    return run


def drawn(num_seqs: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    used = torch.randint(1, length + 1, (num_seqs, 1), generator=generator)
    return torch.randn(num_seqs, length, 4, generator=generator), (torch.arange(length) < used).long()


@settings(max_examples=60, deadline=None)
@given(num_seqs=st.integers(1, 5), length=st.integers(1, 16), seed=st.integers(0, 1000))
def test_every_batch_within_the_limits_is_a_replay(
    recorded: GraphedGrid, num_seqs: int, length: int, seed: int
) -> None:
    x, mask = drawn(num_seqs, length, seed)
    before = recorded.replays
    found, wanted = recorded(x, mask=mask), attend(x, mask)
    assert recorded.replays == before + 1
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("length", "size"), [(1, 3), (3, 3), (4, 8), (8, 8), (9, 16), (16, 16)])
def test_the_smallest_that_holds_it_serves(recorded: GraphedGrid, length: int, size: int) -> None:
    before = recorded.by_size[size].stats.replays.total()
    x, mask = drawn(3, length)
    decision = recorded.decide(x, mask)
    assert isinstance(decision, Replay)
    assert decision.key.size == 5
    recorded(x, mask)
    assert recorded.by_size[size].stats.replays.total() == before + 1


@pytest.mark.parametrize(("num_seqs", "length"), [(6, 4), (1, 17)])
def test_what_no_size_holds_is_eager_and_counted(num_seqs: int, length: int) -> None:
    run = grid()
    run.capture(silent)
    x, mask = drawn(num_seqs, length)
    decision = run.decide(x, mask)
    assert isinstance(decision, RunEagerly)
    assert torch.equal(run(x, mask)[0], attend(x, mask)[0])
    assert run.eager == {Reason.TOO_LARGE: 1}


def test_everything_is_verified(recorded: GraphedGrid) -> None:
    reports = recorded.verify()
    assert list(reports) == [3, 8, 16]
    assert all(report.ok for report in reports.values()), reports


def test_padding_that_leaks_along_the_second_dim_is_found() -> None:
    def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.mean(1)

    run = grid(mean)
    run.capture(silent)
    assert not any(report.ok for report in run.verify().values())


def test_it_says_what_each_size_did(recorded: GraphedGrid) -> None:
    said = recorded.explain()
    assert all(f"length={size}: attend: backend full" in said for size in (3, 8, 16))


def test_release_and_refresh() -> None:
    run = grid()
    run.capture(silent)
    run.release()
    x, mask = drawn(2, 4)
    run(x, mask)
    assert run.eager == {Reason.NOT_CAPTURED: 1}
    assert not any(report.failures for report in run.refresh(silent).values())
    run(x, mask)
    assert run.replays == 1


def test_input_buffers_are_shared() -> None:
    run = grid(sizes=Buckets.of(4, 8))
    run.capture(silent)
    small, large = (run.by_size[size].runner.pool for size in (4, 8))
    assert small is large
    assert small.report().bytes_saved > 0


@pytest.mark.parametrize("limit", [None, 7])
def test_what_is_made_must_have_the_size(limit: int | None) -> None:
    def make(length: int) -> Graphed:
        slots = SLOTS if limit else [Slot("x", ("seqs", 4), torch.float32)]
        dims = [Dim("length", limit=limit)] if limit else []
        return graphed(
            lambda **batch: batch["x"] * 2, slots=slots, bucketed="seqs", buckets=[1], dims=dims, device="cpu"
        )

    with pytest.raises(DeclarationError, match="a grid by 'length'"):
        GraphedGrid(make, dim="length", sizes=[4])
