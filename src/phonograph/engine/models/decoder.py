"""The dense decoder: Llama, Qwen2, Qwen3, Mistral, SmolLM and their kin, with fused projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.engine.attention.base import Attention, PagedCache, Queries, RotatingAttention
from phonograph.engine.kernels.base import Heads, Kernels, Norm, Places
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.rope import rope_table

PIECE = 2048
"""Tokens that go through a layer's widest part at a time: so many keep a device busy; all of a long step would set
the memory's peak."""
_STEP = 128
"""Pieces have a multiple of it, as products like it."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer; projections that read the same input are one matrix."""

    input_norm: Norm
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    heads: Heads
    out: torch.Tensor
    mlp_norm: Norm
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor
    window: int | None


@dataclass(frozen=True)
class Weights:
    """All tensors of a model."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: torch.Tensor

    @property
    def matrices(self) -> list[torch.Tensor]:
        """Every matrix that something is projected with."""
        return [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [self.head]


class Decoder:
    """From token ids and their places to hidden states, and from those to logits."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: Attention,
        kernels: Kernels,
        max_len: int,
        residual: torch.dtype | None = None,
    ) -> None:
        """`residual` is the dtype of the residual stream; default: that of the weights."""
        self.config = config
        self.weights = weights
        self.attention = attention
        self.kernels = kernels
        self.dtype = weights.embedding.dtype
        self.residual = residual or self.dtype
        self.rope = rope_table(config, max_len, weights.embedding.device)

    def hidden(
        self, tokens: torch.Tensor, queries: Queries, cache: PagedCache, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normed hidden states of the wanted tokens, or of all; the cache gets keys and values of every token.

        Where the queries go by row, `tokens` is the table of all rows' last tokens.
        """
        kernels, delta = self.kernels, None
        x, places = kernels.embed_tokens(
            self.weights.embedding, tokens, self.rope, queries, cache.page_size, self.residual
        )
        attention = self.attention.prepare(cache, queries, self.config.num_heads)
        rotating = attention if isinstance(attention, RotatingAttention) else None
        for index, layer in enumerate(self.weights.layers):
            if rotating is not None:
                qkv, x = kernels.norm_linear(x, delta, layer.input_norm, layer.qkv, layer.qkv_bias)
                mixed = rotating.rotate_and_attend(index, qkv, layer.heads, places, layer.window).flatten(1)
            else:
                q, x = self._queries(index, x, delta, places, cache)
                del delta  # what nobody needs any more would stand beside the widest tensors of the layer
                mixed = attention.attend(index, q, layer.window).flatten(1)
                del q
            delta, x = self._mlp(layer, x, mixed)
            del mixed
        if wanted is not None:
            x, delta = x[wanted], None if delta is None else delta[wanted]
        return kernels.add_norm(x, delta, self.weights.norm)[0]

    def _queries(
        self, index: int, x: torch.Tensor, delta: torch.Tensor | None, places: Places, cache: PagedCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(a layer's queries, x with what the layer before adds). With many tokens x is changed in place."""
        kernels, layer = self.kernels, self.weights.layers[index]
        if x.shape[0] <= PIECE:
            qkv, x = kernels.norm_linear(x, delta, layer.input_norm, layer.qkv, layer.qkv_bias)
            return kernels.rotate_and_store(qkv, layer.heads, places, cache, index), x
        shape = (x.shape[0], layer.heads.num_heads, layer.heads.head_dim)
        q = torch.empty(shape, dtype=self.dtype, device=x.device)
        for part in _pieces(x.shape[0]):
            added = None if delta is None else delta[part]
            qkv, total = kernels.norm_linear(x[part], added, layer.input_norm, layer.qkv, layer.qkv_bias)
            _put(total, x[part])
            kernels.rotate_and_store(qkv, layer.heads, places[part], cache, index, out=q[part])
            del qkv, total
        return q, x

    def _mlp(self, layer: LayerWeights, x: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what is to be added to x, x with what attention adds). With many tokens x is changed in place."""
        kernels = self.kernels
        if x.shape[0] <= PIECE:
            added = kernels.linear(mixed, layer.out, self.residual)
            gated, x = kernels.norm_gated(x, added, layer.mlp_norm, layer.gate_up)
            return kernels.linear(gated, layer.down, self.residual), x
        # A piece of what attention gave is read before its place is written.
        fits = mixed.shape == x.shape and mixed.dtype == x.dtype
        delta = mixed if fits else torch.empty_like(x)
        for part in _pieces(x.shape[0]):
            added = kernels.linear(mixed[part], layer.out, self.residual)
            gated, total = kernels.norm_gated(x[part], added, layer.mlp_norm, layer.gate_up)
            _put(total, x[part])
            delta[part] = kernels.linear(gated, layer.down, self.residual)
            del added, gated, total
        return delta, x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of these rows, in the model's precision."""
        return self.kernels.linear(hidden, self.weights.head)


def _pieces(num_tokens: int) -> list[slice]:
    """All tokens in as few pieces as can be, all but the last of one size."""
    count = -(-num_tokens // PIECE)
    size = min(PIECE, -(-num_tokens // (count * _STEP)) * _STEP)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _put(found: torch.Tensor, place: torch.Tensor) -> None:
    """Kernels may have put it there already."""
    if found.data_ptr() != place.data_ptr():
        place.copy_(found)
