"""TritonKernels: the operations of a layer on a GPU: Triton where it wins, the vendor's library for large products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.kernels import Angles, Heads, Norm, Op, Places
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.row_norm import RowNorm
from phonograph.engine.ops.triton import norm_rows, rotate, rotate_halves, rows, steps
from phonograph.engine.ops.triton.dependent_launch import resume
from phonograph.engine.ops.triton.products import Products
from phonograph.engine.ops.triton.rounds import TritonRounds
from phonograph.engine.ops.tuning import Choice, Overlap, Product, Tuning

_REFERENCE = ReferenceKernels()


class TritonKernels:
    """The protocol `Kernels`. `overlap` is for the kernels that nothing is measured for; it needs sm_90 or later."""

    name = "triton"

    def __init__(self, device: torch.device, tuning: Tuning, *, overlap: Overlap = "none") -> None:
        self.tuning = tuning
        self._overlap = overlap
        self._products, self._anything = Products(device), torch.empty(1, device=device)
        self.rounds = TritonRounds(overlap)
        self._chosen: dict[tuple[Op, int, torch.Size, torch.dtype], Choice] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return self.tuning.notes

    def prepare(self, matrix: Matrix) -> Matrix:
        return matrix

    def takes(self, op: Op, num_tokens: int, matrix: Matrix) -> bool:
        """Plain ones; with a bias there is no kernel that gates."""
        return matrix.is_plain and (op != "norm_gated" or matrix.bias is None)

    def resume_overlap(self) -> None:
        resume(self._anything, self._overlap)

    def embed_tokens(
        self,
        embedding: torch.Tensor,
        tokens: torch.Tensor,
        angles: Angles,
        queries: Queries,
        page_size: int,
        residual: torch.dtype,
    ) -> tuple[torch.Tensor, Places]:
        return steps.embed_tokens(embedding, tokens, angles, queries, page_size, residual, overlap=self._overlap)

    def places(self, angles: Angles, queries: Queries, page_size: int) -> Places:
        return _REFERENCE.places(angles, queries, page_size)

    def write_next_token(
        self,
        queries: Queries,
        tokens: torch.Tensor,
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> None:
        steps.write_next_token(queries, tokens, last_token, length)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.add_norm(x, delta, norm, keeps=keeps, overlap=self._overlap)

    def joined_norms(self, parts: Sequence[torch.Tensor], norms: Sequence[Norm]) -> torch.Tensor:
        return rows.joined_norms(parts, norms, overlap=self._overlap)

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor | None:
        return norm_rows.norm_rows(x, weight, norm, overlap=self._overlap)

    def rotate_halves(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return rotate_halves.rotate_halves(q, k, cos, sin, overlap=self._overlap)

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        choice = self._choice("norm_linear", x, matrix.data, matrix.shape[0])
        return self._products.norm_linear(choice, x, delta, norm, matrix)

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: Matrix, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        choice = self._choice("norm_gated", x, gate_up.data, gate_up.shape[0] // 2)
        return self._products.norm_gated(choice, x, delta, norm, gate_up, keeps=keeps)

    def linear(self, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._products.linear(self._choice("linear", x, matrix.data, matrix.shape[0]), x, matrix, dtype)

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        return rows.silu_mul(both, overlap=self._overlap)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        places: Places,
        cache: PagedCache,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return rotate.rotate_and_store(qkv, heads, places, cache, layer, out, overlap=self._overlap)

    def _choice(self, op: Op, x: torch.Tensor, weight: torch.Tensor, outputs: int) -> Choice:
        if x.stride(1) != 1 or not weight.is_contiguous():
            return Choice("library")
        key = op, x.shape[0], weight.shape, weight.dtype
        found = self._chosen.get(key)
        if found is None:
            product = Product(op, x.shape[0], outputs, weight.shape[1], weight.dtype)
            found = self._chosen[key] = self.tuning.choose(product, overlap=self._overlap)
        return found
