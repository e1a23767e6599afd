"""What verify tries besides the full and the smallest batch: sizes between, absent inputs, gaps after another batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phonograph import Graphed, Slot, graph_break, graphed
from phonograph.graphs.progress import silent

X = Slot("x", ("rows", 4), torch.float32)


def made(body: Callable[..., Any], *slots: Slot, **options: Any) -> Graphed:
    run = graphed(body, slots=[X, *slots], bucketed="rows", buckets=[4, 8], device="emulated", **options)
    assert not run.capture(silent).failures
    return run


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_a_size_between_that_takes_another_path_fails(size: int) -> None:
    report = made(lambda x: x * (2 if x.shape[0] == size else 3)).verify()
    assert [(check.used, check.name) for check in report.checks if not check.passed] == [(size, "unpadded")]


@pytest.mark.parametrize(("absent", "is_ok"), [(0.0, True), (1.0, False)])
def test_the_value_for_an_absent_input_must_be_what_none_gives(absent: float, is_ok: bool) -> None:
    def body(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x if bias is None else x + bias[:, None]

    report = made(body, Slot("bias", ("rows",), torch.float32, absent=absent)).verify()
    assert report.ok is is_ok
    assert is_ok or "absent=1.0 in the place of None" in str(report)


def test_a_body_that_needs_the_value_for_an_absent_input_may_rely_on_it() -> None:
    def body(x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return x + bias[:, None]

    assert made(body, Slot("bias", ("rows",), torch.float32, absent=1.0)).verify().ok


@pytest.mark.parametrize("by_identity", [True, False])
def test_a_gap_that_remembers_by_identity_fails_and_one_that_counts_does_not(by_identity: bool) -> None:
    memo: dict[str, Any] = {"of": None, "made": None, "calls": 0}

    @graph_break
    def attend(x: torch.Tensor) -> Any:
        memo["calls"] += 1
        if memo["of"] is not x or not by_identity:
            memo.update(of=x, made=x.sin())
        return memo["made"]

    report = made(lambda x: attend(x + 1) * 2, backend="breakable").verify()
    assert report.ok is not by_identity
    assert not by_identity or "after another batch" in str(report)


def test_state_that_only_its_own_start_shows_fails_with_the_line_that_writes_it() -> None:
    largest = torch.full((4,), -100.0)

    def body(x: torch.Tensor) -> torch.Tensor:
        torch.maximum(largest, x.amax(0), out=largest)
        return x * 2

    report = made(body).verify()
    assert not report.ok
    assert "the state largest" in str(report)
    assert "test_verify_further.py:" in str(report)
