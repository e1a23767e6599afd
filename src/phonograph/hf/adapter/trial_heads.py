"""Trial heads: queries, keys and angles that a rotation is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.sizes import ceil_div

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys ([1, num_heads, num_tokens, head_dim]), cosines and sines ([1, num_tokens, head_dim])."""

_TOKENS = (1, 2, 3, 8, 13, 40, 257, 2048)
_FEW = (1, 5, 8)
"""Tokens of trials of a kernel, each with other angles."""
_SCALES = (1.0, 1e-3, 1e3, 1e-7)
"""Of the tokens in turn, where angles are made up."""
_MADE_UP = -1.0
"""In the place of a factor: angles that are none."""
_FACTORS = (1.0, 1.2079)
"""Of the size of angles: none, and one of long contexts."""
_DRAWN = 61
"""Tokens that are drawn; longer trials have them again."""


def head_counts(module: Any) -> frozenset[tuple[int, int]]:
    """How many heads of queries and keys an attention module may have, by all that says so."""
    config, head_dim = getattr(module, "config", None), module.head_dim
    found = set[tuple[int, int]]()
    for owner, *names in (
        (module, "num_heads", "num_key_value_heads"),
        (module, "num_attention_heads", "num_key_value_heads"),
        (config, "num_attention_heads", "num_key_value_heads"),
    ):
        queries, keys = (getattr(owner, name, None) for name in names)
        keys = queries if keys is None else keys
        if isinstance(queries, int) and isinstance(keys, int):
            found.add((queries, keys))
    wide = [getattr(getattr(module, name, None), "out_features", None) for name in ("q_proj", "k_proj")]
    if all(isinstance(one, int) and one >= head_dim for one in wide):
        found.add((wide[0] // head_dim, wide[1] // head_dim))
    return frozenset(one for one in found if min(one) > 0)


@dataclass(frozen=True)
class TrialHeads:
    """Makes them, in one dtype on one device."""

    dtype: torch.dtype
    device: torch.device
    factors: tuple[float, ...]
    """Of the model's own angles."""

    def all(self, counts: tuple[int, int], head_dim: int) -> Iterator[Heads]:
        """Made-up angles and real ones, of one token and of many."""
        drawn = self._drawn(counts, head_dim)
        for factor in dict.fromkeys((_MADE_UP, *_FACTORS, *self.factors)):
            for num_tokens in _TOKENS:
                yield from self._laid_out(drawn, num_tokens, factor)

    def few(self, counts: tuple[int, int], head_dim: int) -> Iterator[Heads]:
        """As many as show whether a kernel does the same."""
        drawn = self._drawn(counts, head_dim)
        for num_tokens, factor in zip(_FEW, (*_FACTORS, _MADE_UP), strict=True):
            yield from self._laid_out(drawn, num_tokens, factor)

    def _drawn(self, counts: tuple[int, int], head_dim: int) -> list[torch.Tensor]:
        """Queries, keys and angles that are none, of some tokens."""
        generator = torch.Generator().manual_seed(0)
        shapes = (*((count, head_dim) for count in counts), (head_dim,), (head_dim,))
        return [torch.randn(1, _DRAWN, *shape, generator=generator).to(self.device) for shape in shapes]

    def _laid_out(self, drawn: list[torch.Tensor], num_tokens: int, factor: float) -> Iterator[Heads]:
        """Heads of a token side by side, and tokens of a head."""
        again = ceil_div(num_tokens, _DRAWN)
        q, k, cos, sin = (one.repeat(1, again, *[1] * (one.ndim - 2))[:, :num_tokens] for one in drawn)
        if factor == _MADE_UP:
            scales = torch.tensor(_SCALES).repeat(ceil_div(num_tokens, len(_SCALES)))[:num_tokens, None, None]
            q, k = ((one * scales.to(self.device)).to(self.dtype) for one in (q, k))
            cos, sin = cos.to(self.dtype), sin.to(self.dtype, copy=True)
            q[0, 0, 0, 0], k[0, -1, -1, -1], q[0, -1, -1, -1] = torch.inf, torch.nan, torch.finfo(self.dtype).max
            q[0, 0, -1], k[0, 0, 0], sin[0, -1] = 0.0, -0.0, 0.0
        else:
            q, k = q.to(self.dtype), k.to(self.dtype)
            cos, sin = self._angles(num_tokens, q.shape[-1], factor)
        yield q.transpose(1, 2), k.transpose(1, 2), cos, sin
        yield q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), cos, sin

    def _angles(self, num_tokens: int, head_dim: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As models make them, of near positions and far ones."""
        positions = torch.arange(num_tokens, device=self.device) ** 2 % (1 << 17)
        each = 1e4 ** -(torch.arange(0, head_dim, 2, device=self.device) / head_dim)
        half = positions[:, None].float() * each
        angles = torch.cat((half, half), -1)[None, :, :head_dim]
        return (angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype)
