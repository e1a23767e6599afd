"""The line that a failed check names: of the op that begins it, and of none where that can't be told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from phonograph import Graphed, Pad, Slot, graph_break, graphed
from phonograph.graphs.progress import silent

X = Slot("x", ("rows", 4), torch.float32)


def made(body: Callable[..., Any], *slots: Slot, **options: Any) -> Graphed:
    run = graphed(body, slots=[X, *slots], bucketed="rows", buckets=[4, 8], device="emulated", **options)
    assert not run.capture(silent).failures
    return run


def line(body: Callable[..., Any], text: str) -> str:
    """Where a body has this text, as a report says it."""
    lines, first = inspect.getsourcelines(body)
    return f"test_verify_lines.py:{first + next(n for n, one in enumerate(lines) if text in one)}, in {body.__name__}"


def failures(body: Callable[..., Any], *slots: Slot, **options: Any) -> dict[str, str]:
    """By check, the detail of the first failure."""
    found: dict[str, str] = {}
    for check in made(body, *slots, **options).verify().failures:
        found.setdefault(check.name, check.detail)
    return found


def test_a_leak_is_named_by_the_op_that_mixes_rows_and_not_by_those_before_and_after_it() -> None:
    weight = torch.randn(4, 4)

    def body(x: Tensor) -> Tensor:
        h = (x @ weight).relu()
        mean = h.mean(0)
        scaled = mean * 2
        return h - scaled

    assert f"It begins in aten.mean.dim ({line(body, 'mean(0)')})" in failures(body)["unpadded"]


def test_what_differs_but_does_not_reach_the_output_is_not_named() -> None:
    def body(x: Tensor) -> dict[str, Tensor]:
        x.sum(0)  # nobody reads it
        order = x[:, 0].argsort(descending=True)
        back = x[order][order.argsort()]  # as it was, padding or not
        return {"y": back.cumsum(0), "last": back[-1] * 2}

    said = failures(body)["unpadded"]
    assert line(body, "back[-1]") in said
    assert "cumsum" not in said
    assert "argsort" not in said


def test_unread_padding_that_is_read_is_named() -> None:
    unread = Slot("y", ("rows", 4), torch.float32, pad=Pad.unread(because="rows are independent"))

    def body(x: Tensor, y: Tensor) -> Tensor:
        doubled = y * 2
        return x + doubled.amax(0)

    assert f"aten.amax ({line(body, 'amax')})" in failures(body, unread)["poison"]


def test_memory_that_is_read_before_it_is_written_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], 8)
        out[:, :4] = x
        return out * 2

    for name in ("poison", "same view", "unpadded"):
        assert f"aten.empty.memory_format ({line(body, 'torch.empty')})" in failures(body)[name]


def test_the_write_of_padding_is_named_and_not_the_first_to_the_same_memory() -> None:
    cache = torch.zeros(32, 4)
    place = Slot("place", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 20))

    def body(x: Tensor, place: Tensor) -> Tensor:
        cache[25:30].add_(1)
        cache[place] = x
        cache[30:].mul_(2)
        return x * 2

    assert f"It is written by aten.index_put_ ({line(body, 'cache[place]')})" in failures(body, place)["state"]


def test_the_state_that_padding_moves_is_named_by_the_op_that_mixes_rows() -> None:
    mean = torch.zeros(4)

    def body(x: Tensor) -> Tensor:
        now = x.mean(0)
        mean.mul_(0.9).add_(now, alpha=0.1)
        return x * 2

    assert f"It begins in aten.mean.dim ({line(body, 'x.mean')})" in failures(body)["state"]


def test_the_draw_that_grows_with_padding_is_named() -> None:
    def body(x: Tensor) -> Tensor:
        shared = torch.rand(4)
        each = torch.rand(x.shape[0])
        return x + shared + each.sum() * 0

    assert f"Drawn by aten.rand ({line(body, 'each = ')})" in failures(body)["draws"]


def test_the_line_that_raises_with_padding_alone_is_named() -> None:
    table = torch.arange(16.0)
    lens = Slot("lens", ("rows",), torch.int64, pad=Pad.fill(4), valid=(1, 4))

    def body(x: Tensor, lens: Tensor) -> Tensor:
        ends = lens.cumsum(0)
        return x + table[ends][:, None]

    def sample(extent: Any, seed: int) -> dict[str, Tensor]:
        count = extent.used["rows"]
        return {"x": torch.randn(count, 4), "lens": torch.ones(count, dtype=torch.int64)}

    found = failures(body, lens, sample=sample)
    assert all(f"({line(body, 'table[ends]')})" in found[name] for name in ("poison", "same view", "unpadded"))


def test_another_way_by_the_size_is_named_by_both_lines() -> None:
    def body(x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return x.relu() * 3
        return x.sigmoid()

    said = failures(body)["unpadded"]
    assert f"with padding it runs aten.sigmoid ({line(body, 'sigmoid')})" in said
    assert f"without aten.relu ({line(body, 'relu')})" in said


def test_the_gap_that_remembers_is_named_and_not_the_one_before_it() -> None:
    memo: dict[str, Any] = {"of": None, "made": None}

    @graph_break
    def scale(x: Tensor) -> Tensor:
        return x * 2

    @graph_break
    def attend(x: Tensor) -> Any:
        if memo["of"] is not x:
            memo.update(of=x, made=x.sin())
        return memo["made"]

    said = failures(lambda x: attend(scale(x + 1) * 2) * 2, backend="breakable")["gaps"]
    assert "It begins in the gap test_the_gap_that_remembers" in said
    assert "attend, test_verify_lines.py:" in said


def test_a_body_that_can_t_be_traced_fails_without_a_line() -> None:
    refuses: list[bool] = []

    def body(x: Tensor) -> Tensor:
        if refuses and _get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")
        return x - x.mean(0)

    run = made(body)
    refuses.append(True)
    said = {check.name: check.detail for check in run.verify().failures}
    assert "differs by up to" in said["unpadded"]
    assert ".py:" not in said["unpadded"]


@pytest.mark.parametrize("raises", [True, False])
def test_looking_for_a_line_leaves_state_alone(raises: bool) -> None:
    state, counted = torch.zeros(4), {"calls": 0}

    @graph_break
    def count() -> None:
        counted["calls"] += 1
        if raises and _get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")

    def body(x: Tensor) -> Tensor:
        state.add_(x.mean(0))
        count()
        return x * 2

    run = made(body, backend="breakable") if not raises else None
    if run is None:
        run = graphed(
            body, slots=[X], bucketed="rows", buckets=[4], device="emulated", backend="breakable", guard="off"
        )
        run.capture(silent)
    before, calls = state.clone(), counted["calls"]
    assert not run.verify().ok
    assert torch.equal(state, before)
    assert counted["calls"] == calls


def test_with_many_failures_the_later_ones_have_no_line() -> None:
    run = graphed(lambda x: x - x.mean(0), slots=[X], bucketed="rows", buckets=range(2, 40, 2), device="emulated")
    run.capture(silent)
    lines = [".py:" in check.detail for check in run.verify().failures]
    assert all(lines[:12])
    assert len(lines) > 12
    assert not any(lines[12:])
