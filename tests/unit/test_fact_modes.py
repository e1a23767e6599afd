"""Facts about modes that are entered later, questions that a body asks torch, and what Python keeps about tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fact_bodies import Make, X, assert_seen_at_once, made
from phonograph import Replay, RunEagerly


def versioned() -> tuple[Callable[..., Any], Callable[[], object]]:
    weight = torch.ones(4)
    cache: dict[str, Any] = {"version": weight._version, "fused": weight * 2}

    def body(x: torch.Tensor) -> Any:
        if weight._version != cache["version"]:
            cache.update(version=weight._version, fused=weight * 2)
        return x * cache["fused"]

    return body, lambda: weight.fill_(9.0)


def frozen() -> tuple[Callable[..., Any], Callable[[], object]]:
    model = nn.Linear(4, 4)
    return lambda x: x * 2 if model.weight.requires_grad else x, lambda: model.requires_grad_(False)


def leaf() -> torch.Tensor:
    found = torch.ones(4, requires_grad=True)
    found.grad = torch.ones(4)
    return found


def replaced_gradient() -> tuple[Callable[..., Any], Callable[[], object]]:
    weight = leaf()
    return lambda x: x * weight.grad, lambda: setattr(weight, "grad", torch.full((4,), 9.0))


def moved_gradient() -> tuple[Callable[..., Any], Callable[[], object]]:
    weight = leaf()
    return lambda x: x * weight.grad, lambda: setattr(weight.grad, "data", torch.full((4,), 9.0))


def no_gradient() -> tuple[Callable[..., Any], Callable[[], object]]:
    weight = leaf()
    return lambda x: x if weight.grad is None else x * 2, lambda: setattr(weight, "grad", None)


TENSORS: dict[str, Make] = {
    "_version": versioned,
    "requires_grad": frozen,
    "another grad": replaced_gradient,
    "a grad that moved": moved_gradient,
    "a grad that is gone": no_gradient,
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in TENSORS.items()])
def test_what_python_keeps_about_a_tensor_is_a_fact(make: Make) -> None:
    assert_seen_at_once(make)


def test_a_weight_may_be_written_where_nobody_asks_for_its_version() -> None:
    weight = torch.ones(4)
    run = made(lambda x: x * weight)
    weight.fill_(9.0)
    assert torch.equal(run(X), X * 9)
    assert isinstance(run.runner.last, Replay)


def test_the_order_of_attention_kernels_is_a_fact() -> None:
    kinds = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    run = made(lambda x: x * 2)
    assert not run.facts().notes
    before = torch._C._get_sdp_priority_order()
    with torch.nn.attention.sdpa_kernel(kinds, set_priority=True):
        assert torch._C._get_sdp_priority_order() != before
        run(X)
        assert isinstance(run.runner.last, RunEagerly)
    run(X)
    assert isinstance(run.runner.last, Replay)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is nn.functional.relu else found


class Tripled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 3 if func is torch.ops.aten.relu.default else found


def relu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu(x)


@pytest.mark.parametrize(("mode", "times"), [(Doubled, 2), (Tripled, 3)])
def test_calls_inside_of_a_mode_that_is_entered_later_are_eager(
    mode: Callable[[], AbstractContextManager[Any]], times: int
) -> None:
    run = made(relu)
    with mode():
        assert torch.equal(run(X), X * times)
    last = run.runner.last
    assert isinstance(last, RunEagerly)
    assert "modes of torch" in last.detail
    run(X)
    assert isinstance(run.runner.last, Replay)


def test_a_mode_that_is_entered_before_capture_is_part_of_the_recording() -> None:
    with Doubled():
        run = made(relu)
    with Doubled():  # an equal one
        found = run(X)
        assert isinstance(run.runner.last, Replay)
    assert torch.equal(found, X * 2)
    assert torch.equal(run(X), X)
    assert isinstance(run.runner.last, RunEagerly)


def test_inference_mode_is_a_fact_where_the_body_asks_for_it() -> None:
    run = made(lambda x: x * 2 if torch.is_inference_mode_enabled() else x)
    with torch.inference_mode():
        assert torch.equal(run(X), X * 2)
    assert isinstance(run.runner.last, RunEagerly)
    other = made(lambda x: x * 2)
    with torch.inference_mode():
        other(X)
    assert isinstance(other.runner.last, Replay)


def test_the_fast_path_of_attention_is_a_fact_where_the_body_asks_for_it() -> None:
    run, other = made(lambda x: x * 2 if torch.backends.mha.get_fastpath_enabled() else x), made(lambda x: x * 2)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(run(X), X)
        other(X)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert isinstance(run.runner.last, RunEagerly)
    assert isinstance(other.runner.last, Replay)


def test_a_mode_that_torch_no_longer_tells_is_another() -> None:
    run = made(lambda x: x * 2)
    mkldnn: Any = torch.backends.mkldnn
    matmul = mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        run(X)
        last = run.runner.last
    finally:
        matmul.fp32_precision = before
    assert isinstance(last, RunEagerly)
    assert "matmul_precision" in last.detail
