"""Rotation of halves: rotary positions as models of transformers apply them, and kernels that do it in one launch."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class RotatesHalves(Protocol):
    """Kernels that rotate queries and keys together."""

    def rotate_halves(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Heads ([1, num_heads, num_tokens, head_dim]) by the angles of their tokens ([1, num_tokens, head_dim]):
        x · cos + (-second half, first half) · sin, where each product and the sum are rounded to the dtype of all four.

        Results are laid out as torch's ops would. None for shapes, dtypes or layouts that they don't know. Nothing is
        changed.
        """
        ...


def rotate_halves(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What it is, in torch's ops."""

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return rotated(q), rotated(k)
