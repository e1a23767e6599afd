"""The kernels of a layer on a GPU: Triton where it wins, the vendor's library for the large products."""

from __future__ import annotations

import torch
from torch.nn import functional

from phonograph.engine.attention.base import PagedCache, Queries
from phonograph.engine.kernels.base import Angles, Heads, Norm
from phonograph.engine.kernels.triton import rotate, rows


class TritonKernels:
    """The protocol `Kernels`; with `pdl`, its kernels are launched as programmatic dependents (sm_90 and later)."""

    name = "triton"

    def __init__(self, *, pdl: bool = False) -> None:
        self._pdl = pdl

    def angles(self, table: Angles, positions: torch.Tensor) -> Angles:
        return table

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.add_norm(x, delta, norm, pdl=self._pdl)

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, x = self.add_norm(x, delta, norm)
        return functional.linear(h, weight, bias), x

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, x = self.add_norm(x, delta, norm)
        return rows.silu_mul(functional.linear(h, gate_up), pdl=self._pdl), x

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight)

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, angles: Angles, queries: Queries, cache: PagedCache, layer: int
    ) -> torch.Tensor:
        return rotate.rotate_and_store(qkv, heads, angles, queries, cache, layer, pdl=self._pdl)
