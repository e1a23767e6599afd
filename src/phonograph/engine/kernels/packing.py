"""Matrices packed for products of few tokens: for oneDNN, or in the 4 bits in which a checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

BLOCK = 32
"""Columns that share a step and an offset, in llama.cpp's 4-bit formats and here."""
_LEVELS = 16
_ROWS = 16
"""The rows of a 4-bit matrix are a multiple of this."""
_TOKENS = 64
"""The number of tokens that oneDNN packs for; what it makes serves any other just as well."""
_SAMPLE = (2, 16, BLOCK)


class PackedMatrix(Protocol):
    """A matrix beside the plain one, for steps of `tokens`."""

    tokens: ClassVar[range]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x times the matrix transposed."""
        ...


@dataclass(frozen=True)
class OneDnnMatrix:
    """In blocks that fit the registers of this CPU. One to three tokens are bound by memory, and gain nothing."""

    packed: torch.Tensor
    tokens: ClassVar = range(4, 32)

    @staticmethod
    def obstacle() -> str:
        """Why this torch can't do it; empty where it can."""
        tokens, rows, columns = _SAMPLE
        matrix, x = torch.ones(rows, columns), torch.ones(tokens, columns)
        try:
            found = OneDnnMatrix.of(matrix).product(x)
        except (AttributeError, RuntimeError, TypeError) as error:
            return f"torch {torch.__version__} does not pack matrices ({error})"
        return "" if torch.equal(found, x @ matrix.t()) else f"torch {torch.__version__} multiplies them wrongly"

    @staticmethod
    def of(matrix: torch.Tensor) -> OneDnnMatrix:
        return OneDnnMatrix(torch.ops.mkldnn._reorder_linear_weight(matrix, _TOKENS))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return found


@dataclass(frozen=True)
class Int4Matrix:
    """4-bit numbers, with a step and an offset in bfloat16 for every block of a row; sums are in float32."""

    packed: torch.Tensor
    scales: torch.Tensor  # [columns / BLOCK, rows, 2]
    tokens: ClassVar = range(1, 17)

    @staticmethod
    def obstacle() -> str:
        """Why this torch can't multiply them, or not fast, on this CPU; empty where it can."""
        if not hasattr(torch, "_weight_int4pack_mm_for_cpu"):
            return f"torch {torch.__version__} has no product with them"
        capability = torch.backends.cpu.get_cpu_capability()
        return "" if capability.startswith("AVX") else f"torch has no fast product with them for {capability}"

    @staticmethod
    def of(matrix: torch.Tensor) -> Int4Matrix | None:
        """The matrix, where it consists of blocks of 16 evenly spaced values; None where 4 bits would lose some."""
        rows, columns = matrix.shape
        if columns % BLOCK or rows % _ROWS:
            return None
        blocks = matrix.view(rows, columns // BLOCK, BLOCK)
        least, most = blocks.aminmax(dim=-1, keepdim=True)
        step = (most - least) / (_LEVELS - 1)
        levels = ((blocks - least) / step.clamp_min(torch.finfo(step.dtype).tiny)).round_()
        if ((least + levels * step - blocks).abs_() > step * 0.01).any():
            return None
        packed = torch._convert_weight_to_int4pack_for_cpu(levels.view(rows, columns).int(), 1)
        scales = torch.cat([step, least + step * (_LEVELS // 2)], -1).transpose(0, 1)
        return Int4Matrix(packed, scales.to(torch.bfloat16).contiguous())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """In bfloat16."""
        found: torch.Tensor = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.packed, BLOCK, self.scales)
        return found
