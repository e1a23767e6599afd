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

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.draft_layers import DraftLayers, DraftStep
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
    """Whether each tapped state is divided by its root mean square before they are fused, by `feature_norm`."""


@dataclass(frozen=True)
class DraftWeights:
    """What a head consists of, besides its layers; `embedding` and, where none is stored, `head` are the target's."""

    embedding: torch.Tensor  # [target's vocabulary, hidden]
    fc: Matrix  # [hidden, len(taps) * hidden]
    token_norm: Norm
    norm: Norm
    head: Matrix  # [draft vocabulary, hidden]
    ids: torch.Tensor  # [draft vocabulary]: the token that each row of the head stands for
    feature_norm: Norm | None = None  # of each tapped state, with a weight of ones


@dataclass(frozen=True)
class DraftHead:
    """Weights and the arithmetic over them; it has no state of its own."""

    config: DraftConfig
    weights: DraftWeights
    layers: DraftLayers
    """The first projects twice as many numbers: of token, then hidden state."""

    def features(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """[num_tokens, hidden]: the tapped states of some tokens, fused."""
        kernels, norm = self.layers.kernels, self.weights.feature_norm
        if norm is not None and 1 < len(taps) < 4:
            joined = kernels.joined_norms(taps, [norm] * len(taps))
        else:
            normed = taps if norm is None else [kernels.add_norm(state, None, norm)[0] for state in taps]
            joined = torch.cat([state.to(self.weights.fc.dtype) for state in normed], dim=-1)
        return linear(kernels, joined, self.weights.fc)

    def store(
        self, tokens: torch.Tensor, hidden: torch.Tensor, queries: Queries, cache: CacheGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what is kept of these positions. Returns the last layer's attention queries, [num_tokens, num_heads,
        head_dim], and the residual stream before it.

        `tokens` are those that come after the positions.
        """
        (step, qkv), x = self._projected(tokens, hidden, queries, cache), hidden
        q = step.store(0, qkv)
        for index, layer in enumerate(self.layers.weights[1:], 1):
            # The layers of kernels may change what they are given.
            x, delta = step.attend(index - 1, q, x.clone() if x is hidden else x)
            qkv, x = norm_linear(self.layers.kernels, x, delta, layer.input_norm, layer.qkv)
            q = step.store(index, qkv)
        return q, x

    def first(
        self, q: torch.Tensor, x: torch.Tensor, queries: Queries, cache: CacheGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the head's own hidden states at these positions, the tokens that are likeliest after the ones that were
        stored with them), from what `store` returned of them. x may be changed."""
        return self._likeliest(*self.layers.at(queries, cache).attend(len(self.layers.weights) - 1, q, x))

    def next(
        self, tokens: torch.Tensor, hidden: torch.Tensor, queries: Queries, cache: CacheGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`store`, then `first`, in fewer launches: down the chain. Hidden states may be changed."""
        step, qkv = self._projected(tokens, hidden, queries, cache)
        x, delta = step.run(0, qkv, hidden)
        for index, layer in enumerate(self.layers.weights[1:], 1):
            qkv, x = norm_linear(self.layers.kernels, x, delta, layer.input_norm, layer.qkv)
            x, delta = step.run(index, qkv, x)
        return self._likeliest(x, delta)

    def _projected(
        self, tokens: torch.Tensor, hidden: torch.Tensor, queries: Queries, cache: CacheGroup
    ) -> tuple[DraftStep, torch.Tensor]:
        """The layers over these positions, and what goes into the attention of the first."""
        kernels, rope, first = self.layers.kernels, self.layers.rope, self.layers.weights[0]
        embedded, places = kernels.embed_tokens(
            self.weights.embedding, tokens, rope, queries, cache.page_size, hidden.dtype
        )
        joined = kernels.joined_norms((embedded, hidden), (self.weights.token_norm, first.input_norm))
        return self.layers.at(queries, cache, places), linear(kernels, joined, first.qkv)

    def _likeliest(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and the token that is most likely to come after each, in the target's numbers."""
        normed, hidden = self.layers.kernels.add_norm(x, delta, self.weights.norm)
        return hidden, self.weights.ids[linear(self.layers.kernels, normed, self.weights.head).argmax(-1)]
