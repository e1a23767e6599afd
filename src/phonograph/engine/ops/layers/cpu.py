"""CPU kernels: the operations of a layer in C++, in float32, over matrices in as few bits as hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.kernels import Angles, Heads, Norm, Op, Places
from phonograph.engine.ops.layers.packing import Bits, PackedMatrix
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.native.library import Library
from phonograph.engine.ops.queries import Queries

MOST_BYTES = 4 << 30
"""What packed matrices may take together, in addition to the plain ones."""
MOST_TOKENS = 64
"""Beyond this many tokens torch's product with the plain matrix is as fast."""
_MOST_CHECKED = 1024
_REFERENCE = ReferenceKernels()


class CpuKernels:
    """The protocol `Kernels`, for steps that are not recorded: a recorder can't see what C++ does.

    What is not in float32 is left to the reference.
    """

    name = "cpu"
    rounds = _REFERENCE.rounds

    def __init__(self, library: Library, *, most_bytes: int = MOST_BYTES) -> None:
        self._library = library
        self._most_bytes = most_bytes
        self._num_matrices = 0
        self._num_bytes = 0
        self._num_packed: Counter[Bits] = Counter()
        self._checked: dict[int, tuple[Heads, PagedCache]] = {}
        """Heads by their identity, and the pages that they fit."""

    def prepare(self, matrix: Matrix) -> Matrix:
        self._num_matrices += 1
        least = matrix.data.numel() // 2  # bytes, with 4 bits a number
        is_float32 = matrix.is_plain and matrix.dtype == torch.float32
        if not is_float32 or self._num_bytes + least > self._most_bytes:
            return matrix
        packed = PackedMatrix.of(matrix.data, self._library, matrix.stored)
        if self._num_bytes + packed.nbytes > self._most_bytes:
            return matrix
        self._num_bytes += packed.nbytes
        self._num_packed[packed.bits] += 1
        return replace(matrix, prepared=packed)

    def takes(self, op: Op, num_tokens: int, matrix: Matrix) -> bool:
        """Packed ones, as long as that is faster than torch's product."""
        return num_tokens <= MOST_TOKENS and isinstance(matrix.prepared, PackedMatrix)

    def resume_overlap(self) -> None:
        _REFERENCE.resume_overlap()

    @property
    def notes(self) -> tuple[str, ...]:
        parts = [f"{count} in {bits} bits" for bits, count in sorted(self._num_packed.items())]
        if not parts:
            return (f"slow: none of {self._num_matrices} matrices is in float32 and fits; torch multiplies them",)
        size = f"{self._num_bytes / 1e6:.0f} MB"
        return (
            f"compiled by {self._library.compiler}",
            f"{self._num_packed.total()} of {self._num_matrices} matrices packed for up to {MOST_TOKENS} tokens "
            f"({', '.join(parts)}; {size}), as the checkpoint has them, multiplied in float32",
        )

    def embed_tokens(
        self,
        embedding: torch.Tensor,
        tokens: torch.Tensor,
        angles: Angles,
        queries: Queries,
        page_size: int,
        residual: torch.dtype,
    ) -> tuple[torch.Tensor, Places]:
        return _REFERENCE.embed_tokens(embedding, tokens, angles, queries, page_size, residual)

    def places(self, angles: Angles, queries: Queries, page_size: int) -> Places:
        return _REFERENCE.places(angles, queries, page_size)

    def write_next_token(
        self,
        queries: Queries,
        tokens: torch.Tensor,
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> None:
        _REFERENCE.write_next_token(queries, tokens, last_token, length)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if norm.weight.dtype != torch.float32:
            return _REFERENCE.add_norm(x, delta, norm)
        x = x.contiguous()
        added, delta = (x, None) if delta is None else (torch.empty_like(x), delta.contiguous())
        out = torch.empty_like(x)
        self._library.normed(
            *(x.data_ptr(), _address(delta), norm.weight.data_ptr(), norm.eps, *x.shape),
            *(added.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )
        return out, added

    def joined_norms(self, parts: Sequence[torch.Tensor], norms: Sequence[Norm]) -> torch.Tensor:
        return torch.cat([self.add_norm(part, None, norm)[0] for part, norm in zip(parts, norms, strict=True)], dim=-1)

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._projected(x, matrix, delta, norm)

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: Matrix, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._projected(x, gate_up, delta, norm, gated=True)

    def linear(self, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._projected(x, matrix)[0]

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        if both.dtype != torch.float32:
            return _REFERENCE.silu_mul(both)
        both = both.contiguous()
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        self._library.gated(both.data_ptr(), *out.shape, out.data_ptr(), torch.get_num_threads())
        return out

    def _projected(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        delta: torch.Tensor | None = None,
        norm: Norm | None = None,
        *,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product, and x + delta where there is a norm."""
        packed = matrix.prepared
        assert isinstance(packed, PackedMatrix), "only what was taken is multiplied"
        x = x.contiguous()
        added, delta = (x, None) if delta is None else (torch.empty_like(x), delta.contiguous())
        out = x.new_empty(x.shape[0], packed.rows // 2 if gated else packed.rows)
        self._library.projected(
            *(x.data_ptr(), _address(delta), *_norm(norm), added.data_ptr(), x.shape[0], *packed.arguments),
            *(_address(matrix.bias), gated, out.data_ptr(), torch.get_num_threads()),
        )
        return out, added

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        places: Places,
        cache: PagedCache,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if qkv.dtype != torch.float32 or cache.keys.dtype != torch.float32:
            return _REFERENCE.rotate_and_store(qkv, heads, places, cache, layer, out)
        checked = self._checked.get(id(heads))
        if checked is None or checked[1] is not cache:
            heads.check(qkv.shape[1], places.cos.shape[1], tuple(cache.keys.shape[-2:]))
            if len(self._checked) >= _MOST_CHECKED:
                self._checked.clear()
            self._checked[id(heads)] = heads, cache
        num_tokens, num_heads, head_dim = qkv.shape[0], heads.num_heads, heads.head_dim
        qkv, offset = qkv.contiguous(), layer * cache.keys.stride(0) * cache.keys.itemsize
        queries = qkv.new_empty(num_tokens, num_heads, head_dim) if out is None else out
        self._library.rotated(
            *(qkv.data_ptr(), num_tokens, num_heads, heads.num_kv_heads, head_dim),
            *(*_norm(heads.q_norm), *_norm(heads.k_norm)),
            *(places.cos.data_ptr(), places.sin.data_ptr(), places.slots.data_ptr()),
            *(cache.keys.data_ptr() + offset, cache.values.data_ptr() + offset, queries.data_ptr()),
            torch.get_num_threads(),
        )
        return queries


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm(norm: Norm | None) -> tuple[int | None, float]:
    return (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
