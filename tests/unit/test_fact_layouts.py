"""Facts of tensors whose memory begins where it did, and that lie in it otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from phonograph import Reason, Slot, graphed
from phonograph.graphs.recording.fact_check import LAYOUT_WINDOW, WINDOW

Change = Callable[[torch.Tensor], object]


def shortened(w: torch.Tensor) -> None:
    w.data = w.data[:2]


def turned(w: torch.Tensor) -> None:
    w.data = w.data.t()


def as_numbers(w: torch.Tensor) -> None:
    w.data = w.data.view(torch.int32)


def conjugated(w: torch.Tensor) -> None:
    w.data = w.data.conj()


def every_other(w: torch.Tensor) -> None:
    w.set_(w.untyped_storage(), 0, (4, 4), (1, 4))


CHANGES: dict[str, tuple[Change, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "t_": (lambda w: w.t_(), lambda x, w: x @ w),
    "data.t()": (turned, lambda x, w: x @ w),
    "transpose_": (lambda w: w.transpose_(0, 1), lambda x, w: x @ w),
    "unsqueeze_": (lambda w: w.unsqueeze_(0), lambda x, w: x * w.dim()),
    "set_": (every_other, lambda x, w: x @ w),
    "shorter": (shortened, lambda x, w: x * w.shape[0]),
    "another dtype": (as_numbers, lambda x, w: x * w[0].float()),
}


@pytest.mark.parametrize("num_others", [0, 30, 200])
@pytest.mark.parametrize("name", CHANGES)
def test_another_layout_in_the_same_memory_is_seen_within_the_window(name: str, num_others: int) -> None:
    change, compute = CHANGES[name]
    w, others = torch.randn(4, 4), [torch.randn(4) for _ in range(num_others)]

    def body(x: torch.Tensor) -> torch.Tensor:
        found = compute(x, w)
        for other in others:
            found = found + other
        return found

    run = graphed(body, slots=[Slot("x", ("rows", 4), torch.float32)], bucketed="rows", buckets=[4], device="cpu")
    run.capture()
    x = torch.randn(4, 4)
    for _ in range(2 * WINDOW):
        run(x=x)
    assert run.stats.eager.total() == 0
    change(w)
    for _ in range(WINDOW if num_others < WINDOW else LAYOUT_WINDOW):
        run(x=x)
    assert run.stats.eager[Reason.STALE] > 0
    torch.testing.assert_close(run(x=x), body(x))
    assert "w" in run.explain()


def test_a_conjugated_weight_is_seen() -> None:
    w = torch.randn(4, dtype=torch.complex64)
    run = graphed(
        lambda x: (x * w).imag.contiguous(),
        slots=[Slot("x", ("rows", 4), torch.float32)], bucketed="rows", buckets=[4], device="cpu",
    )  # fmt: skip
    run.capture()
    conjugated(w)
    x = torch.randn(4, 4)
    for _ in range(WINDOW):
        run(x=x)
    torch.testing.assert_close(run(x=x), (x * w).imag)
