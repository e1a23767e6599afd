"""A module's own `forward`, a plain function or a builtin, is a fact, whoever calls the module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phonograph import Reason, Replay, Slot, graphed
from phonograph.graphs.phases.decisions import RunEagerly
from phonograph.graphs.progress import silent

Body = Callable[[torch.Tensor], torch.Tensor]


def in_a_sequence(first: nn.Module, second: nn.Module) -> Body:
    net = nn.Sequential(first, second)
    return lambda x: net(x)  # noqa: PLW0108 - a body that calls a module, not a module


def in_a_loop(first: nn.Module, second: nn.Module) -> Body:
    layers = nn.ModuleList([first, second])

    def body(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return body


def by_a_partial(first: nn.Module, second: nn.Module) -> Body:
    last = functools.partial(second)
    return lambda x: last(first(x))


def by_map(first: nn.Module, second: nn.Module) -> Body:
    return lambda x: next(map(second, [first(x)]))


def by_closed_code(first: nn.Module, second: nn.Module) -> Body:
    def body(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(second, first(x), use_reentrant=False)
        return found

    return body


def taken_away(module: nn.Module) -> None:
    del module.forward


def replaced(module: nn.Module) -> None:
    module.forward = lambda x: x * 5


@pytest.mark.parametrize("change", [taken_away, replaced])
@pytest.mark.parametrize("own", [lambda x: x * 2, torch.sin], ids=["function", "builtin"])
@pytest.mark.parametrize("make", [in_a_sequence, in_a_loop, by_a_partial, by_map, by_closed_code])
def test_a_forward_of_its_own_that_changes_makes_calls_stale(
    make: Callable[[nn.Module, nn.Module], Body], own: Any, change: Callable[[nn.Module], None]
) -> None:
    first, second = nn.Linear(8, 8).eval(), nn.Tanh()
    second.forward = own  # type: ignore[method-assign]
    body, x = make(first, second), torch.randn(3, 8)
    slots = [Slot("x", ("rows", 8), torch.float32)]
    run = graphed(body, slots=slots, bucketed="rows", buckets=[4], device="cpu")
    assert not run.capture(silent).failures
    with torch.no_grad():
        torch.testing.assert_close(run(x=x), body(x))
        assert isinstance(run.runner.last, Replay)
        change(second)
        torch.testing.assert_close(run(x=x), body(x))
    assert isinstance(run.runner.last, RunEagerly)
    assert run.runner.last.reason is Reason.STALE
    assert "forward" in run.runner.last.detail


def test_a_module_that_is_only_named_makes_nothing_stale() -> None:
    first, second = nn.Linear(8, 8).eval(), nn.Linear(8, 8)

    def body(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = first(x)
        return found * 2 if isinstance(second, nn.Linear) and hasattr(second, "weight") else found

    slots = [Slot("x", ("rows", 8), torch.float32)]
    run = graphed(body, slots=slots, bucketed="rows", buckets=[4], device="cpu")
    assert not run.capture(silent).failures
    second.bias = nn.Parameter(torch.ones(8))
    for _ in range(70):
        run(x=torch.randn(3, 8))
        assert isinstance(run.runner.last, Replay)
