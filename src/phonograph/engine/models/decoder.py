"""Decoder: the arithmetic of the dense family, with fused projections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from phonograph.engine.cache.groups import CacheGroup, Paged, PagedCache
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.interface import Hidden
from phonograph.engine.ops.attention.prepared import PreparedAttention
from phonograph.engine.ops.kernels import Angles, Heads, Kernels, Norm, Places
from phonograph.engine.ops.layers.reference import TracedKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.projections import linear, norm_gated, norm_linear
from phonograph.engine.ops.queries import Attention, Queries
from phonograph.engine.state.column import Column

PIECE = 2048
"""Tokens that go through a layer's widest part at a time: so many keep a device busy; all of a long step would set
the memory's peak."""
_STEP = 128
"""Pieces have a multiple of it, as products like it."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer; projections that read the same input are one matrix."""

    input_norm: Norm
    qkv: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    heads: Heads
    out: Matrix
    mlp_norm: Norm
    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix
    window: int | None


@dataclass(frozen=True)
class Weights:
    """All weights of a model."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Matrix


@dataclass(frozen=True)
class Decoder:
    """The protocol `Model`: from token ids and their places to hidden states, and from those to logits."""

    config: ModelConfig
    weights: Weights
    attention: Attention
    kernels: Kernels
    rope: Angles
    residual: torch.dtype
    """Of the residual stream."""

    def __post_init__(self) -> None:
        for layer, kept in zip(self.weights.layers, self.keeps, strict=True):
            columns, angles = layer.qkv.shape[0], self.rope.cos.shape[1]
            layer.heads.check(columns, angles, (kept.num_kv_heads, kept.head_dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def max_len(self) -> int:
        return self.rope.cos.shape[0]

    @property
    def keeps(self) -> tuple[Paged, ...]:
        return tuple(Paged(layer.heads.num_kv_heads, layer.heads.head_dim) for layer in self.weights.layers)

    @property
    def columns(self) -> tuple[Column, ...]:
        return ()

    @property
    def matrices(self) -> list[Matrix]:
        layers = self.weights.layers
        return [m for layer in layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [self.weights.head]

    def with_attention(self, attention: Attention) -> Self:
        return replace(self, attention=attention)

    def with_kernels(self, kernels: Kernels) -> Self:
        return replace(self, kernels=kernels)

    def hidden(
        self,
        inputs: torch.Tensor,
        queries: Queries,
        cache: CacheGroup,
        wanted: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        kernels, delta = self.kernels, None
        tapped: dict[int, torch.Tensor] = {}
        x, places = self._embedded(inputs, queries, cache.page_size)
        attention = PreparedAttention(self.attention, cache, queries)
        for index, layer in enumerate(self.weights.layers):
            is_tapped = index - 1 in taps and not self._is_cut(x)
            if attention.rotates(index, layer.heads.num_heads):
                qkv, x = norm_linear(kernels, x, delta, layer.input_norm, layer.qkv)
                mixed = attention.rotate_and_attend(index, qkv, layer.heads, places, layer.window).flatten(1)
            else:
                q, x = self._queries(layer, x, delta, places, cache.places[index])
                del delta  # else it would be alive together with the widest tensors of the layer
                mixed = attention.attend(index, q, layer.window).flatten(1)
                del q
            if is_tapped:
                tapped[index - 1] = x  # the sum that the first norm after a layer makes is what a tap wants
            delta, x = self._mlp(layer, x, mixed, keeps=is_tapped)
            del mixed
            if index in taps and (self._is_cut(x) or (wanted is not None and layer is self.weights.layers[-1])):
                tapped[index] = x + delta
        if wanted is not None:
            x, delta = x[wanted], None if delta is None else delta[wanted]
        states, x = kernels.add_norm(x, delta, self.weights.norm)
        tapped.setdefault(len(self.weights.layers) - 1, x)
        return Hidden(states, tuple(tapped[index] for index in taps))

    def _is_cut(self, x: torch.Tensor) -> bool:
        """Whether tokens go through in pieces; not where one program is compiled for every number of tokens."""
        return not isinstance(self.kernels, TracedKernels) and x.shape[0] > PIECE

    def _embedded(self, inputs: torch.Tensor, queries: Queries, page_size: int) -> tuple[torch.Tensor, Places]:
        """The residual stream before the first layer, and where its tokens stand."""
        if inputs.is_floating_point():
            # The layers change x in place; what was given stays as it is.
            return inputs.to(self.residual, copy=True), self.kernels.places(self.rope, queries, page_size)
        return self.kernels.embed_tokens(self.weights.embedding, inputs, self.rope, queries, page_size, self.residual)

    def _queries(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        places: Places,
        kept: tuple[PagedCache, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(a layer's queries, x with what the layer before adds). With many tokens x is changed in place."""
        kernels = self.kernels
        if not self._is_cut(x):
            qkv, x = norm_linear(kernels, x, delta, layer.input_norm, layer.qkv)
            return kernels.rotate_and_store(qkv, layer.heads, places, *kept), x
        shape = (x.shape[0], layer.heads.num_heads, layer.heads.head_dim)
        q = torch.empty(shape, dtype=self.dtype, device=x.device)
        for part in _pieces(x.shape[0]):
            added = None if delta is None else delta[part]
            qkv, total = norm_linear(kernels, x[part], added, layer.input_norm, layer.qkv)
            _put(total, x[part])
            kernels.rotate_and_store(qkv, layer.heads, places[part], *kept, out=q[part])
            del qkv, total
        return q, x

    def _mlp(
        self, layer: LayerWeights, x: torch.Tensor, mixed: torch.Tensor, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what is to be added to x, x with what attention adds). With many tokens x is changed in place."""
        kernels = self.kernels
        if not self._is_cut(x):
            added = linear(kernels, mixed, layer.out, self.residual)
            gated, x = norm_gated(kernels, x, added, layer.mlp_norm, layer.gate_up, keeps=keeps)
            return linear(kernels, gated, layer.down, self.residual), x
        # A piece of what attention gave is read before its place is written.
        fits = mixed.shape == x.shape and mixed.dtype == x.dtype
        delta = mixed if fits else torch.empty_like(x)
        for part in _pieces(x.shape[0]):
            added = linear(kernels, mixed[part], layer.out, self.residual)
            gated, total = norm_gated(kernels, x[part], added, layer.mlp_norm, layer.gate_up)
            _put(total, x[part])
            delta[part] = linear(kernels, gated, layer.down, self.residual)
            del added, gated, total
        return delta, x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(self.kernels, hidden, self.weights.head)


def _pieces(num_tokens: int) -> list[slice]:
    """All tokens in as few pieces as can be, all but the last of one size."""
    count = -(-num_tokens // PIECE)
    size = min(PIECE, -(-num_tokens // (count * _STEP)) * _STEP)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _put(found: torch.Tensor, place: torch.Tensor) -> None:
    """Kernels may have put it there already."""
    if found.data_ptr() != place.data_ptr():
        place.copy_(found)
