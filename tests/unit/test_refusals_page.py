"""The page of refusals: what it says a body is refused with, and what to write instead, is what happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phonograph import (
    CaptureError,
    DataDependentShapeError,
    HostConstantError,
    HostReadError,
    InputWriteError,
    Pad,
    Slot,
    graphed,
)

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "refusals.md").read_text()
Body = Callable[[torch.Tensor, torch.Tensor], object]


class Holder:
    """State that Python keeps."""

    n = 0


held, total = Holder(), torch.zeros(1)
weight = torch.tensor([1.0, 2.0])


def counts(x: torch.Tensor, num: torch.Tensor) -> torch.Tensor:
    held.n += 1
    return x * 2


def counts_on_the_device(x: torch.Tensor, num: torch.Tensor) -> torch.Tensor:
    total.add_(1)
    return x * 2


REFUSED: list[tuple[Body, type[CaptureError], Body]] = [
    (
        lambda x, num: x / 2 if x.max().item() > 1 else x * 1,
        HostReadError,
        lambda x, num: torch.where(x.amax(1, keepdim=True) > 1, x / 2, x),
    ),
    (lambda x, num: x * x.tolist()[0][0], HostReadError, lambda x, num: x),
    (
        lambda x, num: x * 2 if torch.equal(x, x) else x,
        HostReadError,
        lambda x, num: x * (x == num[:, None]).all(1, keepdim=True),
    ),
    (
        lambda x, num: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)),
        HostReadError,
        lambda x, num: torch.where(x.sum(1, keepdim=True) > 0, x * 2, x * 3),
    ),
    (
        lambda x, num: x[x[:, 0].nonzero()].sum(),
        DataDependentShapeError,
        lambda x, num: x * torch.nonzero_static(x[0], size=2, fill_value=0).sum(),
    ),
    (
        lambda x, num: x - x[x > 0].sum(),
        DataDependentShapeError,
        lambda x, num: x - torch.where(x > 0, x, 0).sum(1, keepdim=True),
    ),
    (lambda x, num: x + x.unique().sum(), DataDependentShapeError, lambda x, num: x),
    (
        lambda x, num: x.repeat_interleave(num, 0)[: len(x)],
        DataDependentShapeError,
        lambda x, num: x.repeat_interleave(torch.ones_like(num), 0, output_size=len(x)),
    ),
    (lambda x, num: x * torch.tensor([1.0, 2.0]), HostConstantError, lambda x, num: x * weight),
    (lambda x, num: x.mul_(2), InputWriteError, lambda x, num: x * 2),
    (counts, CaptureError, counts_on_the_device),
    (lambda x, num: x * random.random(), CaptureError, lambda x, num: x + torch.rand(4)[: len(x), None]),
    (lambda x, num: (x * 2, 3.5), CaptureError, lambda x, num: (x * 2, torch.full_like(x, 3.5))),
    (lambda x, num: (x * 2).reshape(-1), CaptureError, lambda x, num: (x * 2).reshape(len(x), -1)),
]


@pytest.mark.parametrize(("body", "kind", "instead"), REFUSED)
def test_a_refusal_is_the_one_that_the_page_has(body: Body, kind: type[CaptureError], instead: Body) -> None:
    slots = [
        Slot("x", ("rows", 2), torch.float32),
        Slot("num", ("rows",), torch.int64, pad=Pad.fill(1), valid=(1, 3)),
    ]
    run = graphed(body, slots=slots, bucketed="rows", buckets=[4], device="cpu")
    (failure,) = run.capture().failures
    assert type(failure.error) is kind
    assert isinstance(failure.error, CaptureError)
    said = failure.error.problem.partition(": [8")[0]  # of an axis, the sizes
    row = next((line for line in PAGE.splitlines() if f"| {said}" in line), "")
    assert f"| `{kind.__name__}` |" in row, said
    assert ("(…)" in row) == (failure.error.frame is not None)

    run = graphed(instead, slots=slots, bucketed="rows", buckets=[4], device="cpu")
    assert run.capture().failures == ()
    assert run.verify().ok


def test_every_row_of_the_page_is_tried() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and "the driver's own" not in line]
    assert len(rows) == len(REFUSED)
