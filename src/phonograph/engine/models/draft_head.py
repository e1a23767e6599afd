"""DraftHead: an EAGLE-3 head, one decoder layer that reads the target's hidden states and drafts a chain of tokens.

What it computes at position i is made of two things: the embedding of token i + 1, by the target's own table, and a
hidden state: of the target, three tapped layers fused by `fc`; or, further down the chain, its own of the position
before. Keys and values depend on these alone, so prompts are taken in without attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from phonograph.engine.cache.groups import CacheGroup, Paged
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.ops.attention.prepared import PreparedAttention
from phonograph.engine.ops.kernels import Angles, Heads, Kernels, Norm
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.projections import linear, norm_gated
from phonograph.engine.ops.queries import Attention, Queries


@dataclass(frozen=True)
class DraftConfig:
    """The numbers of a head."""

    layer: ModelConfig
    """Of its one layer; the vocabulary is the target's."""
    taps: tuple[int, ...]
    """Layers of the target, from 0, after which hidden states are taken."""
    vocab: int
    """Tokens that it can draft."""
    norms_features: bool = False
    """Whether each tapped state is divided by its root mean square before they are fused."""


@dataclass(frozen=True)
class DraftWeights:
    """What a head consists of; `embedding` and, where none is stored, `head` are the target's."""

    embedding: torch.Tensor  # [target's vocabulary, hidden]
    fc: Matrix  # [hidden, len(taps) * hidden]
    token_norm: Norm
    hidden_norm: Norm
    qkv: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, 2 * hidden]: of token, then hidden state
    heads: Heads
    out: Matrix
    mlp_norm: Norm
    gate_up: Matrix
    down: Matrix
    norm: Norm
    head: Matrix  # [draft vocabulary, hidden]
    ids: torch.Tensor  # [draft vocabulary]: the token that each row of the head stands for


@dataclass(frozen=True)
class DraftHead:
    """Weights and the arithmetic over them; it has no state of its own."""

    config: DraftConfig
    weights: DraftWeights
    attention: Attention
    kernels: Kernels
    rope: Angles

    @property
    def keeps(self) -> tuple[Paged, ...]:
        """What it keeps of every token, in pages."""
        heads = self.weights.heads
        return (Paged(heads.num_kv_heads, heads.head_dim),)

    def features(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """[num_tokens, hidden]: the tapped states of some tokens, fused."""
        if self.config.norms_features:
            eps = self.config.layer.rms_eps
            taps = [functional.rms_norm(state, state.shape[-1:], eps=eps) for state in taps]
        joined = torch.cat([state.to(self.weights.fc.dtype) for state in taps], dim=-1)
        return linear(self.kernels, joined, self.weights.fc)

    def store(self, tokens: torch.Tensor, hidden: torch.Tensor, queries: Queries, cache: CacheGroup) -> torch.Tensor:
        """Write what is kept of these positions; returns their attention queries, [num_tokens, num_heads, head_dim].

        `tokens` are those that come after the positions.
        """
        weights, kernels = self.weights, self.kernels
        embedded = functional.embedding(tokens, weights.embedding).to(hidden.dtype)
        parts = [
            kernels.add_norm(part, None, norm)[0]
            for part, norm in ((embedded, weights.token_norm), (hidden, weights.hidden_norm))
        ]
        qkv = linear(kernels, torch.cat(parts, dim=-1), weights.qkv)
        places = kernels.places(self.rope, queries, cache.page_size)
        return kernels.rotate_and_store(qkv, weights.heads, places, *cache.places[0])

    def step(self, q: torch.Tensor, hidden: torch.Tensor, queries: Queries, cache: CacheGroup) -> torch.Tensor:
        """The head's own hidden states at these positions, whose queries `store` returned."""
        weights, kernels = self.weights, self.kernels
        mixed = PreparedAttention(self.attention, cache, queries).attend(0, q, None).flatten(1)
        added = linear(kernels, mixed, weights.out)
        # The layers of kernels may change what they are given.
        gated, x = norm_gated(kernels, hidden.clone(), added, weights.mlp_norm, weights.gate_up)
        return x + linear(kernels, gated, weights.down)

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """The token that is most likely to come after each, in the target's numbers."""
        normed = self.kernels.add_norm(hidden, None, self.weights.norm)[0]
        return self.weights.ids[linear(self.kernels, normed, self.weights.head).argmax(-1)]
