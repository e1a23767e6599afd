"""PreparedAttention: attention of one step over layers that may differ in shape."""

from __future__ import annotations

import torch

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.ops.kernels import Heads, Places, RotatingAttention
from phonograph.engine.ops.queries import PLAIN, Attention, Queries, Scores, StepAttention


class PreparedAttention:
    """What `Attention.prepare` makes, once for each shape that layers have: for most models that is once a step.

    Layers are those of the model; where they lie in the cache is looked up here.
    """

    def __init__(self, attention: Attention, cache: CacheGroup, queries: Queries) -> None:
        self._attention = attention
        self._cache = cache
        self._queries = queries
        self._steps: dict[tuple[int, int], tuple[StepAttention, RotatingAttention | None]] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        """As `StepAttention.attend`: q is [num_tokens, num_heads, head_dim]."""
        return self._step(layer, q.shape[1])[0].attend(self._cache.places[layer][1], q, window, out, scores)

    def rotates(self, layer: int, num_heads: int) -> bool:
        """Whether projections may go to `rotate_and_attend` as they come."""
        return self._step(layer, num_heads)[1] is not None

    def rotate_and_attend(
        self, layer: int, qkv: torch.Tensor, heads: Heads, places: Places, window: int | None
    ) -> torch.Tensor:
        """As `RotatingAttention.rotate_and_attend`."""
        rotating = self._step(layer, heads.num_heads)[1]
        assert rotating is not None
        return rotating.rotate_and_attend(self._cache.places[layer][1], qkv, heads, places, window)

    def _step(self, layer: int, num_heads: int) -> tuple[StepAttention, RotatingAttention | None]:
        cache = self._cache.places[layer][0]
        found = self._steps.get((id(cache), num_heads))
        if found is None:
            step = self._attention.prepare(cache, self._queries, num_heads)
            rotating = step if isinstance(step, RotatingAttention) else None
            found = self._steps[id(cache), num_heads] = step, rotating
        return found
