"""DraftHead: an EAGLE-3 head, decoder layers that read the target's hidden states and draft a chain of tokens.

What it computes at position i is made of two things: the embedding of token i + 1, by the target's own table, and a
hidden state: of the target, three tapped layers fused by `fc`; or, further down the chain, its own of the position
before. Keys and values of a layer need the layers before it alone: with one layer, prompts are taken in without
attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.draft_layers import DraftLayers
from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.projections import linear, norm_linear
from phonograph.engine.ops.queries import Queries


@dataclass(frozen=True)
class DraftConfig:
    """The numbers of a head."""

    layer: ModelConfig
    """Of its layers; the vocabulary is the target's."""
    taps: tuple[int, ...]
    """Layers of the target, from 0, after which hidden states are taken."""
    vocab: int
    """Tokens that it can draft."""
    norms_features: bool = False
    """Whether each tapped state is divided by its root mean square before they are fused."""


@dataclass(frozen=True)
class DraftWeights:
    """What a head consists of, besides its layers; `embedding` and, where none is stored, `head` are the target's."""

    embedding: torch.Tensor  # [target's vocabulary, hidden]
    fc: Matrix  # [hidden, len(taps) * hidden]
    token_norm: Norm
    norm: Norm
    head: Matrix  # [draft vocabulary, hidden]
    ids: torch.Tensor  # [draft vocabulary]: the token that each row of the head stands for


@dataclass(frozen=True)
class DraftHead:
    """Weights and the arithmetic over them; it has no state of its own."""

    config: DraftConfig
    weights: DraftWeights
    layers: DraftLayers
    """The first projects twice as many numbers: of token, then hidden state."""

    def features(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """[num_tokens, hidden]: the tapped states of some tokens, fused."""
        if self.config.norms_features:
            eps = self.config.layer.rms_eps
            taps = [functional.rms_norm(state, state.shape[-1:], eps=eps) for state in taps]
        joined = torch.cat([state.to(self.weights.fc.dtype) for state in taps], dim=-1)
        return linear(self.layers.kernels, joined, self.weights.fc)

    def store(
        self, tokens: torch.Tensor, hidden: torch.Tensor, queries: Queries, cache: CacheGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what is kept of these positions. Returns the last layer's attention queries, [num_tokens, num_heads,
        head_dim], and the residual stream before it.

        `tokens` are those that come after the positions.
        """
        kernels, (first, *others) = self.layers.kernels, self.layers.weights
        embedded = functional.embedding(tokens, self.weights.embedding).to(hidden.dtype)
        parts = [
            kernels.add_norm(part, None, norm)[0]
            for part, norm in ((embedded, self.weights.token_norm), (hidden, first.input_norm))
        ]
        step, x = self.layers.at(queries, cache), hidden
        q = step.store(0, linear(kernels, torch.cat(parts, dim=-1), first.qkv))
        for index, layer in enumerate(others, 1):
            x = step.attend(index - 1, q, x)
            q = step.store(index, norm_linear(kernels, x, None, layer.input_norm, layer.qkv)[0])
        return q, x

    def step(self, q: torch.Tensor, x: torch.Tensor, queries: Queries, cache: CacheGroup) -> torch.Tensor:
        """The head's own hidden states at these positions, from what `store` returned of them."""
        return self.layers.at(queries, cache).attend(len(self.layers.weights) - 1, q, x)

    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """The token that is most likely to come after each, in the target's numbers."""
        normed = self.layers.kernels.add_norm(hidden, None, self.weights.norm)[0]
        return self.weights.ids[linear(self.layers.kernels, normed, self.weights.head).argmax(-1)]
