"""The kernels of a layer on the CPU: matrices packed at load, and as few passes over small tensors as torch allows."""

from __future__ import annotations

from functools import cache as memo

import torch
from torch.nn import functional

from phonograph.engine.attention.base import PagedCache
from phonograph.engine.kernels.base import Heads, Norm, Places
from phonograph.engine.kernels.packing import Int4Matrix, OneDnnMatrix, PackedMatrix
from phonograph.engine.kernels.reference import ReferenceKernels

MOST_BYTES = 4 << 30
"""What matrices packed in float32 may take together; they stand beside the plain ones."""


class CpuKernels:
    """The protocol `Kernels`, for steps that are not recorded: a packed matrix is closed to whoever records."""

    name = "cpu"

    def __init__(self, *, int4: bool = False, most_bytes: int = MOST_BYTES) -> None:
        self.places = ReferenceKernels().places
        self._int4 = int4
        self._most_bytes = most_bytes
        self._num_matrices = 0
        self._num_bytes = 0
        self._packed: dict[int, tuple[torch.Tensor, PackedMatrix]] = {}
        """By the id of the plain matrix, which is held so that it keeps its id."""

    def prepare(self, matrix: torch.Tensor) -> None:
        self._num_matrices += 1
        packed = self._in_4_bits(matrix) or self._for_onednn(matrix)
        if packed is not None:
            self._packed[id(matrix)] = matrix, packed

    def _in_4_bits(self, matrix: torch.Tensor) -> PackedMatrix | None:
        asked = self._int4 and not Int4Matrix.obstacle() and matrix.dtype == torch.float32
        return Int4Matrix.of(matrix) if asked else None

    def _for_onednn(self, matrix: torch.Tensor) -> PackedMatrix | None:
        fits = matrix.dtype == torch.float32 and self._num_bytes + matrix.nbytes <= self._most_bytes
        if not fits or OneDnnMatrix.obstacle():
            return None
        self._num_bytes += matrix.nbytes
        return OneDnnMatrix.of(matrix)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self._int4:
            why = Int4Matrix.obstacle() or "the others are not stored so"
            notes.append(f"{self._count(Int4Matrix)} are multiplied in 4 bits, x in bfloat16; {why}")
        why = OneDnnMatrix.obstacle() or f"float32 ones are, up to {self._most_bytes / 2**30:.1f} GiB"
        notes.append(f"{self._count(OneDnnMatrix)} are packed for oneDNN; {why}")
        return tuple(notes)

    def _count(self, kind: type[PackedMatrix]) -> str:
        found = sum(isinstance(packed, kind) for _, packed in self._packed.values())
        few, many = kind.tokens[0], kind.tokens[-1]
        return f"{found} of {self._num_matrices} matrices, for {few} to {many} tokens,"

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if delta is None else x + delta
        return _normed(x, norm), x

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, x = self.add_norm(x, delta, norm)
        found = self._product(h, weight).to(x.dtype)
        return found if bias is None else found.add_(bias), x

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, x = self.add_norm(x, delta, norm)
        gate, up = self._product(h, gate_up).chunk(2, -1)
        return functional.silu(gate).mul_(up), x

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._product(x, weight)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        _, packed = self._packed.get(id(weight), _PLAIN)
        if packed is None or x.shape[0] not in packed.tokens:
            return functional.linear(x, weight)
        return packed.product(x)

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, places: Places, cache: PagedCache, layer: int
    ) -> torch.Tensor:
        num_heads, kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        mixed = qkv.view(qkv.shape[0], -1, head_dim)
        turned = mixed[:, :-kv_heads]  # queries and keys
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = turned[:, :num_heads], turned[:, num_heads:]
            turned = torch.cat([_normed(q, heads.q_norm), _normed(k, heads.k_norm)], 1)
        swapped = turned.view(*turned.shape[:2], 2, head_dim // 2).flip(2).flatten(2)
        cos, sin = places.cos[:, None].to(turned.dtype), places.sin[:, None].to(turned.dtype)
        turned = (turned * cos).addcmul_(swapped, sin)
        cache.keys[layer].flatten(0, 1).index_copy_(0, places.slots, turned[:, num_heads:])
        cache.values[layer].flatten(0, 1).index_copy_(0, places.slots, mixed[:, -kv_heads:])
        return turned[:, :num_heads]


_PLAIN = (None, None)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if x.dtype != torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(norm.eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(norm.weight)


@memo
def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)
