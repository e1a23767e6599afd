"""The dense decoder: Llama, Qwen2, Qwen3, Mistral, SmolLM and their kin, with fused projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from phonograph.engine.attention.base import Attention, PagedCache, Queries
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.rope import rope_table, rotate


@dataclass(frozen=True)
class LayerWeights:
    """One layer; projections that read the same input are one matrix."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor
    window: int | None


@dataclass(frozen=True)
class Weights:
    """All tensors of a model."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


class Decoder:
    """From token ids and their places to hidden states, and from those to logits."""

    def __init__(self, config: ModelConfig, weights: Weights, attention: Attention, max_len: int) -> None:
        self.config = config
        self.weights = weights
        self.attention = attention
        self.dtype = weights.embedding.dtype
        self.cos, self.sin = rope_table(config, max_len, weights.embedding.device)

    def hidden(self, tokens: torch.Tensor, queries: Queries, cache: PagedCache) -> torch.Tensor:
        """Hidden states of every token, [num_tokens, hidden]; the cache gets their keys and values."""
        config = self.config
        x = functional.embedding(tokens, self.weights.embedding)
        cos = self.cos[queries.positions][:, None].to(self.dtype)
        sin = self.sin[queries.positions][:, None].to(self.dtype)
        attention = self.attention.prepare(cache, queries, config.num_heads)
        for index, layer in enumerate(self.weights.layers):
            h = functional.rms_norm(x, (config.hidden,), layer.input_norm, config.rms_eps)
            q, k, v = self._projected(layer, h)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self.attention.store(cache, index, queries, k, v)
            mixed = attention.attend(index, q, layer.window)
            x = x + functional.linear(mixed.flatten(1), layer.out)
            h = functional.rms_norm(x, (config.hidden,), layer.mlp_norm, config.rms_eps)
            gate, up = functional.linear(h, layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in float32 of these rows."""
        config = self.config
        normed = functional.rms_norm(hidden, (config.hidden,), self.weights.norm, config.rms_eps)
        return functional.linear(normed, self.weights.head).float()

    def _projected(self, layer: LayerWeights, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        mixed = functional.linear(h, layer.qkv, layer.qkv_bias).view(h.shape[0], -1, config.head_dim)
        kv = config.num_kv_heads
        q, k, v = mixed[:, : config.num_heads], mixed[:, -2 * kv : -kv], mixed[:, -kv:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = functional.rms_norm(q, (config.head_dim,), layer.q_norm, config.rms_eps)
            k = functional.rms_norm(k, (config.head_dim,), layer.k_norm, config.rms_eps)
        return q, k, v
