"""DraftLayers: decoder layers of a drafter, which keep keys in a cache group of their own beside the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.engine.cache.groups import CacheGroup, Paged
from phonograph.engine.models.decoder import LayerWeights
from phonograph.engine.ops.attention.prepared import PreparedAttention
from phonograph.engine.ops.kernels import Angles, Kernels
from phonograph.engine.ops.projections import linear, norm_gated
from phonograph.engine.ops.queries import Attention, Queries


@dataclass(frozen=True)
class DraftLayers:
    """Weights and the arithmetic over them; what goes into a layer's projections is its owner's to say."""

    weights: tuple[LayerWeights, ...]
    attention: Attention
    kernels: Kernels
    rope: Angles

    @property
    def keeps(self) -> tuple[Paged, ...]:
        """What each keeps of every token, in pages."""
        return tuple(Paged(layer.heads.num_kv_heads, layer.heads.head_dim) for layer in self.weights)

    def at(self, queries: Queries, cache: CacheGroup) -> DraftStep:
        """The layers over these tokens."""
        return DraftStep(self, queries, cache)


class DraftStep:
    """Layers over some tokens: what depends on their places alone is found once."""

    def __init__(self, layers: DraftLayers, queries: Queries, cache: CacheGroup) -> None:
        self._layers = layers
        self._cache = cache
        self._places = layers.kernels.places(layers.rope, queries, cache.page_size)
        self._attention = PreparedAttention(layers.attention, cache, queries)

    def store(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write what a layer keeps; returns its attention queries, [num_tokens, num_heads, head_dim]."""
        heads = self._layers.weights[index].heads
        return self._layers.kernels.rotate_and_store(qkv, heads, self._places, *self._cache.places[index])

    def attend(self, index: int, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The residual stream after a layer, from that before it and the queries that `store` returned."""
        layer, kernels = self._layers.weights[index], self._layers.kernels
        mixed = self._attention.attend(index, q, layer.window).flatten(1)
        added = linear(kernels, mixed, layer.out)
        # The layers of kernels may change what they are given.
        gated, x = norm_gated(kernels, x.clone(), added, layer.mlp_norm, layer.gate_up)
        return x + linear(kernels, gated, layer.down)
