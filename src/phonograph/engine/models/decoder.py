"""The dense decoder: Llama, Qwen2, Qwen3, Mistral, SmolLM and their kin, with fused projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from phonograph.engine.attention.base import Attention, PagedCache, Queries
from phonograph.engine.kernels.base import Heads, Kernels, Norm
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.rope import rope_table


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
        self, config: ModelConfig, weights: Weights, attention: Attention, kernels: Kernels, max_len: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.attention = attention
        self.kernels = kernels
        self.dtype = weights.embedding.dtype
        self.rope = rope_table(config, max_len, weights.embedding.device)

    def hidden(self, tokens: torch.Tensor, queries: Queries, cache: PagedCache) -> torch.Tensor:
        """Normed hidden states of every token, [num_tokens, hidden]; the cache gets their keys and values."""
        kernels = self.kernels
        x, delta = functional.embedding(tokens, self.weights.embedding), None
        places = kernels.places(self.rope, queries, cache.page_size)
        attention = self.attention.prepare(cache, queries, self.config.num_heads)
        for index, layer in enumerate(self.weights.layers):
            qkv, x = kernels.norm_linear(x, delta, layer.input_norm, layer.qkv, layer.qkv_bias)
            q = kernels.rotate_and_store(qkv, layer.heads, places, cache, index)
            mixed = attention.attend(index, q, layer.window)
            delta = kernels.linear(mixed.flatten(1), layer.out)
            gated, x = kernels.norm_gated(x, delta, layer.mlp_norm, layer.gate_up)
            delta = kernels.linear(gated, layer.down)
        return kernels.add_norm(x, delta, self.weights.norm)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of these rows, in the model's precision."""
        return self.kernels.linear(hidden, self.weights.head)
