"""A decode step of Qwen3-8B's shape in plain torch ops, with random weights and a contiguous KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    hidden: int = 4096
    intermediate: int = 12288
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936


TINY = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=512)


class Decoder:
    """One token per sequence in, the next token out; sequence i owns row i of the cache."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, max_seqs: int, max_len: int) -> None:
        self.shape = shape
        self.max_len = max_len

        def weight(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype) * 0.02

        s = shape
        self.embedding, self.head = weight(s.vocab, s.hidden), weight(s.vocab, s.hidden)
        self.norm = torch.ones(s.hidden, device=device, dtype=dtype)
        self.layers = [
            (
                weight((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
                weight(s.hidden, s.heads * s.head_dim),
                weight(2 * s.intermediate, s.hidden),
                weight(s.hidden, s.intermediate),
            )
            for _ in range(s.layers)
        ]
        self.head_norm = torch.ones(s.head_dim, device=device, dtype=dtype)
        cache = (s.layers, max_seqs, s.kv_heads, max_len, s.head_dim)
        self.keys = torch.zeros(cache, device=device, dtype=dtype)
        self.values = torch.zeros(cache, device=device, dtype=dtype)
        self.places = torch.arange(max_len, device=device)
        self.rows = torch.arange(max_seqs, device=device)
        angles = torch.outer(self.places.float(), 1e6 ** -torch.linspace(0, 1, s.head_dim // 2, device=device))
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        s, num_seqs = self.shape, tokens.shape[0]
        x = self.embedding[tokens]
        hidden_mask = (self.places[None] > positions[:, None])[:, None, None]  # [num_seqs, 1, 1, max_len]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, (qkv, out, gate_up, down) in enumerate(self.layers):
            h = functional.rms_norm(x, (s.hidden,), self.norm)
            q, k, v = (h @ qkv.T).split([s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim], -1)
            q = self._rope(q.view(num_seqs, s.heads, s.head_dim), cos, sin)
            k = self._rope(k.view(num_seqs, s.kv_heads, s.head_dim), cos, sin)
            keys, values = self.keys[index, :num_seqs], self.values[index, :num_seqs]
            keys[self.rows[:num_seqs], :, positions] = k
            values[self.rows[:num_seqs], :, positions] = v.view(num_seqs, s.kv_heads, s.head_dim)
            grouped = q.view(num_seqs, s.kv_heads, -1, s.head_dim)
            scores = grouped @ keys.transpose(-1, -2) * s.head_dim**-0.5  # [num_seqs, kv_heads, group, max_len]
            mixed = scores.masked_fill(hidden_mask, float("-inf")).softmax(-1) @ values
            x = x + mixed.reshape(num_seqs, -1) @ out.T
            h = functional.rms_norm(x, (s.hidden,), self.norm)
            gate, up = (h @ gate_up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ down.T
        return (functional.rms_norm(x, (s.hidden,), self.norm) @ self.head.T).argmax(-1)

    def _rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = functional.rms_norm(x, (self.shape.head_dim,), self.head_norm)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
