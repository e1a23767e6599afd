"""Matrices in the fewest bits that hold their values exactly, laid out as the C++ kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

BLOCK = 32
"""Columns that share a step and an offset, in llama.cpp's formats and here."""
_SAMPLE = 64
"""Rows that are tried before the whole matrix is."""

Bits = Literal[4, 8, 16, 32]


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in panels of rows, padded with zeros to whole panels."""

    bits: Bits
    """4 and 8: whole numbers, in blocks with a step and, for 4, an offset; 16: bfloat16; 32: float32."""
    words: torch.Tensor  # int32 [panels, columns * bits / 32, lanes]: in a lane the next numbers of one row
    scales: torch.Tensor | None  # float16 [panels, columns / BLOCK, 1 or 2, lanes]
    rows: int
    columns: int

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """As the C++ kernels take it."""
        scales = 0 if self.scales is None else self.scales.data_ptr()
        return self.bits, self.words.data_ptr(), scales, self.rows, self.columns

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @staticmethod
    def of(matrix: torch.Tensor, lanes: int) -> PackedMatrix:
        """A float32 matrix, none of whose values is changed."""
        rows, columns = matrix.shape
        for bits, split in _SPLITS.items():
            if columns % (BLOCK if bits < 16 else 2) == 0 and split(matrix[:_SAMPLE]) and (found := split(matrix)):
                numbers, scales = found
                return PackedMatrix(bits, _words(numbers, bits, lanes), _panels(scales, lanes), rows, columns)
        words = _padded(matrix, lanes).view(-1, lanes, columns).transpose(1, 2).contiguous().view(torch.int32)
        return PackedMatrix(32, words, None, rows, columns)


_Split = tuple[torch.Tensor, torch.Tensor | None]
"""Whole numbers [rows, columns], of which the lowest bits count; and scales [rows, blocks, 1 or 2]."""


def _in_4_bits(matrix: torch.Tensor) -> _Split | None:
    """Blocks of 16 evenly spaced values: of which the least and the most occur, or of eight below zero the lowest."""
    blocks = matrix.view(matrix.shape[0], -1, BLOCK)
    least, most = blocks.aminmax(dim=-1)
    farthest = torch.where(least.abs() >= most, least, most)
    for step, offset in (((most - least) / 15, least), (farthest / -8, farthest)):
        found = _in_steps(blocks, step.half(), offset.half(), (0, 15))
        if found is not None:
            return found.view(matrix.shape), torch.stack([step.half(), offset.half()], -1)
    return None


def _in_8_bits(matrix: torch.Tensor) -> _Split | None:
    """Blocks of multiples of a step, the farthest from zero being 127 steps away."""
    blocks = matrix.view(matrix.shape[0], -1, BLOCK)
    step = (blocks.abs().amax(-1) / 127).half()
    found = _in_steps(blocks, step, torch.zeros_like(step), (-127, 127))
    return None if found is None else (found.view(matrix.shape), step[..., None])


def _in_bfloat16(matrix: torch.Tensor) -> _Split | None:
    rounded = matrix.to(torch.bfloat16)
    return (rounded.view(torch.int16).int(), None) if torch.equal(rounded.float(), matrix) else None


_SPLITS: dict[Bits, Callable[[torch.Tensor], _Split | None]] = {4: _in_4_bits, 8: _in_8_bits, 16: _in_bfloat16}


def _in_steps(
    blocks: torch.Tensor, step: torch.Tensor, offset: torch.Tensor, bounds: tuple[int, int]
) -> torch.Tensor | None:
    """How many steps every number is from the offset; None where one is not a whole number of them away."""
    size, start = step.float()[..., None], offset.float()[..., None]
    steps = ((blocks - start) / torch.where(size == 0, 1, size)).round_().clamp_(*bounds)
    return steps.int() if torch.equal(steps * size + start, blocks) else None


def _padded(rows: torch.Tensor, lanes: int) -> torch.Tensor:
    missing = -rows.shape[0] % lanes
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _words(numbers: torch.Tensor, bits: int, lanes: int) -> torch.Tensor:
    per_word = 32 // bits
    parts = _padded(numbers & (1 << bits) - 1, lanes).view(-1, lanes, numbers.shape[1] // per_word, per_word)
    word = parts[..., 0]
    for i in range(1, per_word):
        word = word | parts[..., i] << bits * i
    return word.transpose(1, 2).contiguous()


def _panels(scales: torch.Tensor | None, lanes: int) -> torch.Tensor | None:
    if scales is None:
        return None
    return _padded(scales, lanes).view(-1, lanes, *scales.shape[1:]).permute(0, 2, 3, 1).contiguous()
