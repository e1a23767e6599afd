"""Bodies that torch.fx has written: what their generated code reads is a fact like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from phonograph import Reason, Slot, graphed


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.a(x)) * self.w


def other_layer(module: torch.fx.GraphModule) -> None:
    module.a = nn.Linear(4, 4)


def other_weight(module: torch.fx.GraphModule) -> None:
    module.w = nn.Parameter(torch.randn(4))


def assigned(module: torch.fx.GraphModule) -> None:
    module.load_state_dict(Body().state_dict(), assign=True)


@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize("change", [other_layer, other_weight, assigned])
def test_a_change_of_a_traced_module_is_seen(change: Callable[[torch.fx.GraphModule], None], is_method: bool) -> None:
    module = torch.fx.symbolic_trace(Body())
    body = module.forward if is_method else module
    run = graphed(body, slots=[Slot("x", ("rows", 4), torch.float32)], bucketed="rows", buckets=[4, 8], device="cpu")
    run.capture()
    x = torch.randn(3, 4)
    for _ in range(70):
        torch.testing.assert_close(run(x=x), module(x))
    assert run.stats.eager.total() == 0
    change(module)
    torch.testing.assert_close(run(x=x), module(x))
    assert run.stats.eager[Reason.STALE] == 1
