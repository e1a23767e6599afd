"""Matrix: what kernels multiply with, as it was stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of a projection, out = x · valuesᵀ + bias, and all that kernels may want to know about them."""

    data: torch.Tensor  # [rows, columns]
    bias: torch.Tensor | None = None  # [rows], in the dtype of the values
    scales: torch.Tensor | None = None  # [rows, 1]: what the data of a row are multiplied with
    stored: tuple[str, ...] = ()
    """The formats that its parts have in the checkpoint (BF16, Q4_1, …), each once; the data are unpacked from them."""
    prepared: object = None
    """What the kernels that it was prepared for keep besides: theirs alone to read."""

    def __post_init__(self) -> None:
        rows = self.data.shape[0]
        if self.bias is not None and self.bias.shape != (rows,):
            raise ValueError(f"a matrix of {rows} rows has a bias of shape {list(self.bias.shape)}; expected [{rows}].")
        if self.scales is not None and self.scales.shape != (rows, 1):
            raise ValueError(
                f"a matrix of {rows} rows has scales of shape {list(self.scales.shape)}; expected [{rows}, 1]."
            )
        if self.scales is None and self.data.dtype.itemsize < 2:
            raise ValueError(f"a matrix in {self.data.dtype} has no scales; expected one for each row.")

    @property
    def is_plain(self) -> bool:
        """Whether the data are the values."""
        return self.scales is None

    @property
    def dtype(self) -> torch.dtype:
        """Of the values, and of what is projected with them."""
        return self.data.dtype if self.scales is None else self.scales.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """What a product reads; without what kernels keep besides."""
        return sum(part.nbytes for part in (self.data, self.bias, self.scales) if part is not None)

    def values(self) -> torch.Tensor:
        """The data, or, where they are scaled, new memory with what they stand for."""
        return self.data if self.scales is None else self.data.to(self.scales.dtype) * self.scales
