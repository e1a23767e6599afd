"""Tensors whose memory is that of others: refused where an op takes them, and never written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.masked import masked_tensor

from phonograph import Graphed, Slot, graphed

SLOTS = [Slot("x", ("rows", 4), torch.float32)]


def recorded(body: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Graphed, str]:
    """It, and why there is no recording."""
    run = graphed(body, slots=SLOTS, bucketed="rows", buckets=[4], device="cpu")
    return run, "".join(str(row.error) for row in run.capture().failures)


def test_a_nested_tensor_is_refused_and_left_as_it_was() -> None:
    w = torch.nested.nested_tensor([torch.randn(2), torch.randn(2)], layout=torch.jagged)
    before, x = w.values().clone(), torch.randn(3, 4)
    run, why = recorded(lambda x: x * w.values())
    assert torch.equal(w.values(), before)
    assert "takes a NestedTensor, whose memory is that of other tensors" in why
    assert torch.equal(run(x=x), x * before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_masked_tensor_that_a_body_reaches() -> None:
    data, x = torch.randn(4), torch.randn(3, 4)
    w = masked_tensor(data, torch.tensor([True, True, False, True]))
    run, why = recorded(lambda x: x * w.get_data())
    assert why == ""
    assert torch.equal(run(x=x), x * data)
    assert run.verify()
    refused, why = recorded(lambda x: (w * 2.0).get_data() + x)  # type: ignore[attr-defined]
    assert "takes a MaskedTensor" in why
    assert torch.equal(refused(x=x), data * 2.0 + x)
    assert torch.equal(w.get_data(), data)
