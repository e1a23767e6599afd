"""The table of changes in docs/trust.md: what the next calls of a graphed function do after each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from phonograph import Graphed, Slot, graphed
from phonograph.graphs.recording.fact_check import WINDOW

pytestmark = pytest.mark.slow

SMALL, LARGE = 2, 200


class Residual(nn.Module):
    """As many layers as are asked for, each of which shows in the output."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x

    @property
    def middle(self) -> nn.Linear:
        found = self.layers[len(self.layers) // 2]
        assert isinstance(found, nn.Linear)
        return found


def other(model: Residual) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(tensor) / 8 for name, tensor in model.state_dict().items()}


def optimize(model: Residual) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()


def replace_module(model: Residual) -> None:
    model.layers[len(model.layers) // 2] = nn.Linear(16, 16)


def replace_parameter(model: Residual) -> None:
    model.middle.weight = nn.Parameter(torch.randn(16, 16))


def add_to_data(model: Residual) -> None:
    model.middle.weight.data += 1


def put_under(model: Residual) -> None:
    model.middle.weight.data = torch.randn(16, 16)


@torch.no_grad()
def set_memory(model: Residual) -> None:
    model.middle.weight.set_(torch.randn(16, 16).untyped_storage(), 0, (16, 16), (16, 1))


def swap(model: Residual) -> None:
    torch.utils.swap_tensors(model.middle.weight, nn.Parameter(torch.randn(16, 16)))


Change = Callable[[Residual], object]
IN_PLACE: list[Change] = [optimize, add_to_data, lambda model: model.load_state_dict(other(model))]
AT_ONCE: list[Change] = [
    lambda model: model.load_state_dict(other(model), assign=True),
    replace_parameter,
    replace_module,
    lambda model: model.double(),
    lambda model: model.middle.register_forward_hook(lambda module, args, output: output * 2),
]
UNDERNEATH: list[Change] = [put_under, set_memory, swap]


def recorded(num_layers: int) -> tuple[Residual, Graphed]:
    torch.manual_seed(0)
    model = Residual(num_layers).eval()
    slots = [Slot("x", ("rows", 16), torch.float32)]
    run = graphed(model, slots=slots, bucketed="rows", buckets=[4], device="cpu")
    run.capture()
    assert run(x=torch.randn(3, 16)).shape == (3, 16)
    assert not run.stats.eager
    return model, run


def is_right(model: Residual, run: Graphed) -> bool:
    x = torch.randn(3, 16)
    with torch.no_grad():
        return torch.allclose(run(x=x), model(x), atol=1e-4)


@pytest.mark.parametrize("num_layers", [SMALL, LARGE])
@pytest.mark.parametrize("change", IN_PLACE)
def test_values_that_are_written_in_place_are_replayed(num_layers: int, change: Change) -> None:
    model, run = recorded(num_layers)
    change(model)
    assert all(is_right(model, run) for _ in range(3))
    assert not run.stats.eager


@pytest.mark.parametrize("num_layers", [SMALL, LARGE])
@pytest.mark.parametrize("change", AT_ONCE)
def test_what_is_replaced_is_seen_at_once(num_layers: int, change: Change) -> None:
    model, run = recorded(num_layers)
    change(model)
    if model.middle.weight.dtype is torch.float64:
        assert run.decide(x=torch.randn(3, 16)).reason.value == "stale"  # type: ignore[union-attr]
        return
    assert is_right(model, run)
    assert sum(run.stats.eager.values()) == 1


@pytest.mark.parametrize("num_layers", [SMALL, LARGE])
@pytest.mark.parametrize("change", UNDERNEATH)
def test_memory_under_a_parameter_is_seen_at_once_or_within_the_window(num_layers: int, change: Change) -> None:
    model, run = recorded(num_layers)
    change(model)
    right = [is_right(model, run) for _ in range(WINDOW + 2)]
    first = right.index(True)
    assert all(right[first:]), "once it is seen, every call is right"
    assert first == 0 if num_layers == SMALL else 0 < first < WINDOW
