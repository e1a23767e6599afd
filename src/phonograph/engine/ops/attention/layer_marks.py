"""LayerMarks: attention that ends the graph before it attends, so that a recording has a segment for every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.kernels import Heads, Places, RotatingAttention
from phonograph.engine.ops.queries import PLAIN, Attention, Queries, Scores, StepAttention
from phonograph.graphs.phases.breaks import graph_break


class LayerMarks:
    """`inner`, recorded with the rest; to find the layer at which a recording goes wrong, never to serve."""

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.name = inner.name

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        step = self._inner.prepare(cache, queries, num_heads)
        return _RotatingMarks(step, step) if isinstance(step, RotatingAttention) else _Marks(step)


@dataclass(frozen=True)
class _Marks:
    step: StepAttention

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        return self.step.attend(layer, before_attention(layer, q), window, out, scores)


@dataclass(frozen=True)
class _RotatingMarks(_Marks):
    rotating: RotatingAttention

    def rotate_and_attend(
        self, layer: int, qkv: torch.Tensor, heads: Heads, places: Places, window: int | None
    ) -> torch.Tensor:
        return self.rotating.rotate_and_attend(layer, before_attention(layer, qkv), heads, places, window)


@graph_break
def before_attention(layer: int, q: torch.Tensor) -> torch.Tensor:
    """A layer's queries, as they are."""
    return q
