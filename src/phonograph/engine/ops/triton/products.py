"""Products: the matrix products of a layer, each computed in the way that a choice names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.layers.reference import linear
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.triton import matrix as tiles
from phonograph.engine.ops.triton import rows, vector
from phonograph.engine.ops.tuning import MAX_TILES, Choice, Overlap


class Products:
    """Computes by any choice; owns the counters of split products, which every launch leaves at zero.

    So launches of one instance run one after the other, as they do on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def linear(self, choice: Choice, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x projected, in the dtype of the matrix or in `dtype`."""
        if choice.kind == "vector":
            return vector.product(x, matrix.data, choice, bias=matrix.bias, dtype=dtype)[0]
        if choice.kind == "matrix":
            return tiles.product(x, matrix.data, choice, self._counters, bias=matrix.bias, dtype=dtype)[0]
        if choice.kind == "library_lt":
            with _by_cublaslt():
                return linear(x, matrix, dtype)
        return linear(x, matrix, dtype)

    def norm_linear(
        self, choice: Choice, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + delta) projected, x + delta)."""
        if choice.kind == "vector":
            return vector.product(x, matrix.data, choice, delta=delta, norm=norm, bias=matrix.bias)
        if _holds_norm(choice, matrix.dtype):
            return tiles.product(x, matrix.data, choice, self._counters, delta=delta, norm=norm, bias=matrix.bias)
        h, x = rows.add_norm(x, delta, norm, overlap=_of_companions(choice))
        return self.linear(choice, h, matrix), x

    def norm_gated(
        self,
        choice: Choice,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        norm: Norm,
        gate_up: Matrix,
        *,
        keeps: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(silu(gate) · up of norm(x + delta), x + delta), without a bias."""
        if choice.kind == "vector":
            return vector.product(x, gate_up.data, choice, delta=delta, norm=norm, gated=True)
        if _holds_norm(choice, gate_up.dtype):
            return tiles.product(x, gate_up.data, choice, self._counters, delta=delta, norm=norm, gated=True)
        h, x = rows.add_norm(x, delta, norm, keeps=keeps, overlap=_of_companions(choice))
        if choice.kind == "matrix":
            return tiles.product(h, gate_up.data, choice, self._counters, gated=True)[0], x
        return rows.silu_mul(self.linear(choice, h, gate_up), overlap=_of_companions(choice)), x


def _holds_norm(choice: Choice, dtype: torch.dtype) -> bool:
    """Whether the norm is in the kernel. It scales the sums: what is multiplied has the range of the residual stream,
    which may be beyond float16's."""
    return choice.kind == "matrix" and choice.fused and dtype != torch.float16


def _of_companions(choice: Choice) -> Overlap:
    """For a norm or gate in a launch of its own, next to a product: small, so whatever follows may come at once."""
    return "none" if choice.overlap == "none" else "early"


@contextmanager
def _by_cublaslt() -> Iterator[None]:
    """For one call; torch keeps the preference per process."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
