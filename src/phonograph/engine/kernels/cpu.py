"""The kernels of a layer on the CPU, in float32: C++, over matrices in as few bits as hold them."""

from __future__ import annotations

from collections import Counter

import torch
from torch.nn import functional

from phonograph.engine.attention.base import Queries
from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.kernels.base import Angles, Heads, Norm, Places
from phonograph.engine.kernels.packing import PackedMatrix
from phonograph.engine.kernels.reference import ReferenceKernels
from phonograph.engine.native.library import Library

MOST_BYTES = 4 << 30
"""What packed matrices may take together; they stand beside the plain ones."""
MOST_TOKENS = 64
"""Beyond this many tokens torch's product with the plain matrix is as fast."""
_REFERENCE = ReferenceKernels()


class CpuKernels:
    """The protocol `Kernels`, for steps that are not recorded: what C++ does is closed to whoever records.

    What is not in float32 is left to the reference.
    """

    name = "cpu"

    def __init__(self, library: Library, *, most_bytes: int = MOST_BYTES) -> None:
        self._library = library
        self._most_bytes = most_bytes
        self._num_matrices = 0
        self._num_bytes = 0
        self._packed: dict[int, tuple[torch.Tensor, PackedMatrix]] = {}
        """By the id of the plain matrix, which is held so that it keeps its id."""

    def prepare(self, matrix: torch.Tensor) -> None:
        self._num_matrices += 1
        least = matrix.numel() // 2  # bytes, with 4 bits a number
        if matrix.dtype != torch.float32 or self._num_bytes + least > self._most_bytes:
            return
        packed = PackedMatrix.of(matrix, self._library)
        if self._num_bytes + packed.nbytes <= self._most_bytes:
            self._num_bytes += packed.nbytes
            self._packed[id(matrix)] = matrix, packed

    @property
    def notes(self) -> tuple[str, ...]:
        found = Counter(packed.bits for _, packed in self._packed.values())
        parts = [f"{count} in {bits} bits" for bits, count in sorted(found.items())]
        if not found:
            return (f"slow: none of {self._num_matrices} matrices is in float32 and fits; torch multiplies them",)
        size = f"{self._num_bytes / 1e6:.0f} MB"
        return (
            f"compiled by {self._library.compiler}",
            f"{len(self._packed)} of {self._num_matrices} matrices packed for up to {MOST_TOKENS} tokens "
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
        counts: torch.Tensor | None,
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> None:
        _REFERENCE.write_next_token(queries, tokens, counts, last_token, length)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
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

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self._packed_for(x, weight)
        if packed is not None:
            return self._projected(x, packed, delta, norm, bias)
        h, x = self.add_norm(x, delta, norm)
        return functional.linear(h, weight, bias), x

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self._packed_for(x, gate_up)
        if packed is not None:
            return self._projected(x, packed, delta, norm, gated=True)
        if gate_up.dtype != torch.float32:
            return _REFERENCE.norm_gated(x, delta, norm, gate_up)
        h, x = self.add_norm(x, delta, norm)
        both = functional.linear(h, gate_up)
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        self._library.gated(both.data_ptr(), *out.shape, out.data_ptr(), torch.get_num_threads())
        return out, x

    def linear(self, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        packed = self._packed_for(x, weight)
        return _REFERENCE.linear(x, weight, dtype) if packed is None else self._projected(x, packed)[0]

    def _packed_for(self, x: torch.Tensor, weight: torch.Tensor) -> PackedMatrix | None:
        return self._packed.get(id(weight), _PLAIN)[1] if x.shape[0] <= MOST_TOKENS else None

    def _projected(
        self,
        x: torch.Tensor,
        packed: PackedMatrix,
        delta: torch.Tensor | None = None,
        norm: Norm | None = None,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is asked for, and x + delta where there is a norm."""
        x = x.contiguous()
        added, delta = (x, None) if delta is None else (torch.empty_like(x), delta.contiguous())
        out = x.new_empty(x.shape[0], packed.rows // 2 if gated else packed.rows)
        self._library.projected(
            *(x.data_ptr(), _address(delta), *_norm(norm), added.data_ptr(), x.shape[0], *packed.arguments),
            *(_address(bias), gated, out.data_ptr(), torch.get_num_threads()),
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


_PLAIN: tuple[None, None] = (None, None)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm(norm: Norm | None) -> tuple[int | None, float]:
    return (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
