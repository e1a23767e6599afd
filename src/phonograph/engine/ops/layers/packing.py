"""PackedMatrix: a matrix in the fewest bits that hold its values, laid out as the C++ kernels read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from phonograph.engine.ops.native.library import Library

BLOCK = 32
"""Columns that share a step and an offset, in most of llama.cpp's formats and here."""
NARROW = 16
"""The same, in its finer ones."""
_SAMPLE = 64
"""Rows that are tried before the whole matrix is."""

Bits = Literal[4, 8, 16, 32]


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in panels of rows, padded with zeros to whole panels."""

    bits: Bits
    """4 and 8: whole numbers, in blocks with a step and an offset; 16: bfloat16; 32: float32."""
    words: torch.Tensor  # int32 [panels, columns * bits / 32, lanes]: in a lane the next numbers of one row
    scales: torch.Tensor | None  # [panels, blocks, 2, lanes], float16 or float32
    rows: int
    columns: int

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """As the C++ kernels take it."""
        wide = self.scales is not None and self.scales.dtype == torch.float32
        scales = 0 if self.scales is None else self.scales.data_ptr()
        return _FORMATS[self.bits, wide], self.words.data_ptr(), scales, self.rows, self.columns

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @staticmethod
    def of(matrix: torch.Tensor, library: Library, stored: tuple[str, ...] = ()) -> PackedMatrix:
        """A float32 matrix, none of whose values changes by more than float32 rounds.

        Where it was unpacked from blocks of known formats, forms with fewer bits than those are not tried.
        """
        rows, columns = matrix.shape
        for way in _WAYS[_first_way(stored) :]:
            if columns % way.multiple == 0 and way.split(matrix[:_SAMPLE], library):
                found = way.split(matrix, library)
                if found is not None:
                    words, scales = _words(found[0], way.bits, library.lanes), _panels(found[1], library.lanes)
                    return PackedMatrix(way.bits, words, scales, rows, columns)
        panels = _padded(matrix, library.lanes).view(-1, library.lanes, columns)
        return PackedMatrix(32, panels.transpose(1, 2).contiguous().view(torch.int32), None, rows, columns)


_FORMATS: dict[tuple[Bits, bool], int] = {
    (4, False): 0,
    (4, True): 1,
    (8, False): 2,
    (8, True): 3,
    (16, False): 4,
    (32, False): 5,
}
"""The numbers that `kernels.cpp` has for bits, and whether scales are float32."""

_Split = tuple[torch.Tensor, torch.Tensor | None]
"""Whole numbers [rows, columns], of which the lowest bits count; and scales [rows, blocks, 2]."""


@dataclass(frozen=True)
class _Way:
    bits: Bits
    multiple: int
    """Of this the number of columns must be one."""
    split: Callable[[torch.Tensor, Library], _Split | None]


def _in_4_bits(matrix: torch.Tensor, library: Library) -> _Split | None:
    """Q4_1 and Q4_0: 16 evenly spaced values, of which the least and the most occur, or the farthest below zero."""
    blocks = matrix.view(matrix.shape[0], -1, BLOCK)
    least, most = blocks.aminmax(dim=-1)
    farthest = torch.where(least.abs() >= most, least, most)
    for step, offset in (((most - least) / 15, least), (farthest / -8, farthest)):
        found = _in_steps(blocks, step.half(), offset.half(), (0, 15))
        if found is not None:
            return found.view(matrix.shape), torch.stack([step.half(), offset.half()], -1)
    return None


def _in_8_bits(matrix: torch.Tensor, library: Library) -> _Split | None:
    """Q8_0: multiples of a step, the farthest from zero being 127 steps away."""
    blocks = matrix.view(matrix.shape[0], -1, BLOCK)
    step = (blocks.abs().amax(-1) / 127).half()
    found = _in_steps(blocks, step, torch.zeros_like(step), (-127, 127))
    return None if found is None else (found.view(matrix.shape), torch.stack([step, torch.zeros_like(step)], -1))


def _in_bfloat16(matrix: torch.Tensor, library: Library) -> _Split | None:
    rounded = matrix.to(torch.bfloat16)
    return (rounded.view(torch.int16).int(), None) if torch.equal(rounded.float(), matrix) else None


def _in_any_4_bits(matrix: torch.Tensor, library: Library) -> _Split | None:
    """Q4_K and whatever else has up to 16 evenly spaced values in a block."""
    return _searched(matrix, library, BLOCK, 15, 0)


def _in_any_8_bits(matrix: torch.Tensor, library: Library) -> _Split | None:
    """Q5_0 to Q6_K: up to 256 evenly spaced values in a block."""
    return _searched(matrix, library, NARROW, 255, 128)


_WAYS = (
    _Way(4, BLOCK, _in_4_bits),
    _Way(4, BLOCK, _in_any_4_bits),
    _Way(8, BLOCK, _in_8_bits),
    _Way(8, NARROW, _in_any_8_bits),
    _Way(16, 2, _in_bfloat16),
)
"""From the fewest bits on."""
_HOLDS = {
    **dict.fromkeys(("Q4_0", "Q4_1"), 0),
    "Q4_K": 1,
    "Q8_0": 2,
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K"), 3),
}
"""The first way that holds any block of a format of llama.cpp."""


def _first_way(stored: tuple[str, ...]) -> int:
    """Where parts differ, the widest decides. Other formats say little: what is in BF16 may have 16 values in all."""
    return max((_HOLDS[name] for name in stored), default=0) if all(name in _HOLDS for name in stored) else 0


def _in_steps(
    blocks: torch.Tensor, step: torch.Tensor, offset: torch.Tensor, bounds: tuple[int, int]
) -> torch.Tensor | None:
    """How many steps every number is from the offset; None where one is not a whole number of them away."""
    size, start = step.float()[..., None], offset.float()[..., None]
    steps = ((blocks - start) / torch.where(size == 0, 1, size)).round_().clamp_(*bounds)
    return steps.int() if torch.equal(steps * size + start, blocks) else None


def _searched(matrix: torch.Tensor, library: Library, block: int, most: int, zero: int) -> _Split | None:
    """Steps and offsets that are found by trying; whole numbers start at minus `zero`."""
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    levels = torch.empty(rows, columns, dtype=torch.uint8)
    step, offset = torch.empty(2, rows, columns // block).unbind(0)
    failed = library.stepped(
        *(matrix.data_ptr(), rows, columns, block, most, levels.data_ptr(), step.data_ptr(), offset.data_ptr()),
        torch.get_num_threads(),
    )
    if failed:
        return None
    return levels.int() - zero, torch.stack([step, offset + step * zero], -1)


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
