"""DraftLayers: decoder layers of a drafter, which keep keys in a cache group of their own beside the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.engine.cache.groups import CacheGroup, Paged
from phonograph.engine.models.decoder import LayerWeights
from phonograph.engine.ops.attention.prepared import PreparedAttention
from phonograph.engine.ops.kernels import Angles, Kernels, Places
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

    def at(self, queries: Queries, cache: CacheGroup, places: Places | None = None) -> DraftStep:
        """The layers over these tokens; their places are found here, unless they are known already."""
        return DraftStep(self, queries, cache, places)


class DraftStep:
    """Layers over some tokens: what depends on their places alone is found once."""

    def __init__(self, layers: DraftLayers, queries: Queries, cache: CacheGroup, places: Places | None) -> None:
        self._layers = layers
        self._cache = cache
        self._found = places
        self._queries = queries
        self._attention = PreparedAttention(layers.attention, cache, queries)

    @property
    def _places(self) -> Places:
        if self._found is None:
            self._found = self._layers.kernels.places(self._layers.rope, self._queries, self._cache.page_size)
        return self._found

    def store(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write what a layer keeps; returns its attention queries, [num_tokens, num_heads, head_dim]."""
        heads = self._layers.weights[index].heads
        return self._layers.kernels.rotate_and_store(qkv, heads, self._places, *self._cache.places[index])

    def attend(self, index: int, q: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after a layer, from that before it and the queries that `store` returned: the sum of the
        pair. x may be changed."""
        return self._mixed(index, self._attention.attend(index, q, self._layers.weights[index].window), x)

    def run(self, index: int, qkv: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`store`, then `attend`."""
        layer = self._layers.weights[index]
        if not self._attention.rotates(index, layer.heads.num_heads):
            return self.attend(index, self.store(index, qkv), x)
        mixed = self._attention.rotate_and_attend(index, qkv, layer.heads, self._places, layer.window)
        return self._mixed(index, mixed, x)

    def _mixed(self, index: int, mixed: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer, kernels = self._layers.weights[index], self._layers.kernels
        added = linear(kernels, mixed.flatten(1), layer.out)
        gated, x = norm_gated(kernels, x, added, layer.mlp_norm, layer.gate_up)
        return x, linear(kernels, gated, layer.down)
