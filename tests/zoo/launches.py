"""Bugs of launches: numbers and memory that a user's Triton kernel is passed, which no dispatcher sees.

Where there is no GPU the kernels are interpreted. The emulated device does not replay them, so that only what is
refused can be played there.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from zoo.animals import WIDTH, Mechanism, Subject, rows
from zoo.correct import in_turn
from zoo.host_values import phase
from zoo.judge import bug, correct

HAS_GPU = torch.cuda.is_available()
_SIZE = 64


@cache
def scale_kernel() -> Any:
    """out = x * scale + bias, of a few elements."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def scale_rows(x_ptr, bias_ptr, out_ptr, scale, count, width: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, size)
        x = tl.load(x_ptr + at, mask=at < count)
        bias = tl.load(bias_ptr + at % width, mask=at < count)
        tl.store(out_ptr + at, x * scale + bias, mask=at < count)

    return scale_rows


def launched(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """A launch as users write it."""
    out = torch.empty_like(x)
    scale_kernel()[(1,)](x, bias, out, scale, x.numel(), width=WIDTH, size=_SIZE)
    return out


@torch.library.custom_op("zoo::launched", mutates_args=())
def launched_in_an_op(x: Tensor, bias: Tensor) -> Tensor:
    """Two launches with memory between them that no dispatcher sees."""
    return launched(launched(x, bias, 2.0), bias, 0.5)


@launched_in_an_op.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


if find_spec("triton") is not None:

    @bug(Mechanism.GUARD, names=r"kernel scale_rows\(scale=\)", needs_gpu=HAS_GPU)
    def number_in_a_triton_launch(on: torch.device) -> Subject:
        """A Triton kernel is passed a Python float of the batch, which the launch holds as it was at capture."""
        bias = rows(on, 1, 5)

        def body(batch: Any) -> Tensor:
            return launched(batch["x"] + 1, bias, batch["temperature"])

        batches = [{"x": rows(on, 3, seed), "temperature": 1.0 + seed} for seed in (1, 2)]
        return phase(body, on, *batches, fields={"temperature": lambda seed: 1.0 + seed})

    @bug(Mechanism.GUARD, names=r"kernel scale_rows\(bias_ptr=\)", needs_gpu=HAS_GPU)
    def tensor_in_a_triton_launch(on: torch.device) -> Subject:
        """A Triton kernel reads a table that a Python bool of the batch picks."""
        tables = [rows(on, 1, 5), rows(on, 1, 6)]

        def body(batch: Any) -> Tensor:
            return launched(batch["x"] + 1, tables[batch["is_second"]], 2.0)

        batches = [{"x": rows(on, 3, seed), "is_second": bool(seed % 2)} for seed in (1, 2)]
        return phase(body, on, *batches, fields={"is_second": lambda seed: bool(seed % 2)})

    @correct(needs_gpu=True)
    def triton_launches(on: torch.device) -> Subject:
        """Triton kernels with constant numbers, in the body and in a custom op that makes memory for itself."""
        bias = rows(on, 1, 5)
        return in_turn(lambda x: launched(x, bias, 3.0) + launched_in_an_op(x, bias), on)
