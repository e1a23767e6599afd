"""Projections: one call of the kernels where they take the matrix, its parts one by one where they decline it.

Models call these, not the kernels' own. So kernels need only know the matrices that they are good at.
"""

from __future__ import annotations

import torch

from phonograph.engine.ops.kernels import Kernels, Norm
from phonograph.engine.ops.layers import reference
from phonograph.engine.ops.matrix import Matrix


def linear(kernels: Kernels, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x projected, in the dtype of the matrix or in `dtype`."""
    if kernels.takes("linear", x.shape[0], matrix):
        return kernels.linear(x, matrix, dtype)
    return reference.linear(x, matrix, dtype)


def norm_linear(
    kernels: Kernels, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + delta) projected, x + delta); the sum may be x itself, changed."""
    if kernels.takes("norm_linear", x.shape[0], matrix):
        return kernels.norm_linear(x, delta, norm, matrix)
    h, x = kernels.add_norm(x, delta, norm)
    return linear(kernels, h, matrix), x


def norm_gated(
    kernels: Kernels, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: Matrix, *, keeps: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(silu(gate) · up of norm(x + delta), x + delta); the sum may be x, changed, unless the caller `keeps` it."""
    if kernels.takes("norm_gated", x.shape[0], gate_up):
        return kernels.norm_gated(x, delta, norm, gate_up, keeps=keeps)
    h, x = kernels.add_norm(x, delta, norm, keeps=keeps)
    return kernels.silu_mul(linear(kernels, h, gate_up)), x
