"""Trial bodies: what tests of trial runs make recordings from and call, with what they give."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from phonograph import Graphed, Slot, graphed
from runners import WIDTH

SIZES = (3, 2, 4, 7, 8, 5, 9, 1)
Body = Callable[[torch.Tensor], torch.Tensor]


class Plain:
    """An object without a purpose of its own."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def made_from(body: Body, **more: Any) -> Graphed:
    def call(x: torch.Tensor) -> torch.Tensor:
        return body(x)

    slots = [Slot("x", ("seqs", WIDTH), torch.float32)]
    return graphed(
        call, slots=slots, bucketed="seqs", buckets=[1, 2, 4, 8], device="emulated", backend="breakable", **more
    )


def outputs_of(call: Body, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    torch.manual_seed(3)
    random.seed(3)
    inputs = [torch.randn(n, WIDTH) for n in sizes]
    with torch.no_grad():
        return [call(x) for x in inputs]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
