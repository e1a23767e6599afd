"""The arithmetic of llama.cpp on quantised weights, for any torch model: activations rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BLOCK = 32
"""Neighbours that share a scale."""
LARGEST = 127


class RoundedActivations(TorchFunctionMode):
    """Inside it, what `linear` multiplies with weights is first rounded; the weights stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear:
            self.num_products += 1
            args = (rounded(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest values that blocks of 8-bit integers with a float16 scale can say."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    steps = (blocks * (LARGEST / largest)).nan_to_num(0.0).round()  # a block of zeros has no scale
    return (steps * (largest / LARGEST).half().float()).flatten(-2)
