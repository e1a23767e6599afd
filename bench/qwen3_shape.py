"""A decode step of Qwen3-8B's shape in plain torch ops, with random weights and a contiguous KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense decoder."""

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
        s = shape

        def weight(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype) * 0.02

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
        # The query's norm carries the attention scale.
        self.qk_norm = torch.ones(s.heads + s.kv_heads, s.head_dim, device=device, dtype=dtype)
        self.qk_norm[: s.heads] *= s.head_dim**-0.5
        cache = (s.layers, max_seqs, s.kv_heads, max_len, s.head_dim)
        self.keys = torch.zeros(cache, device=device, dtype=dtype)
        self.values = torch.zeros(cache, device=device, dtype=dtype)
        self.places = torch.arange(max_len, device=device)
        self.rows = torch.arange(max_seqs, device=device)
        angles = torch.outer(self.places.float(), 1e6 ** -torch.linspace(0, 1, s.head_dim // 2, device=device))
        self.cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        s, num_seqs = self.shape, tokens.shape[0]
        x = self.embedding[tokens]
        unseen = (self.places[None] > positions[:, None])[:, None, None]  # [num_seqs, 1, 1, max_len]
        cos, sin, rows = self.cos[positions][:, None], self.sin[positions][:, None], self.rows[:num_seqs]
        for index, (qkv, out, gate_up, down) in enumerate(self.layers):
            mixed = (functional.rms_norm(x, (s.hidden,), self.norm) @ qkv.T).view(num_seqs, -1, s.head_dim)
            q, k = self._normed_and_rotated(mixed[:, : s.heads + s.kv_heads], cos, sin).split([s.heads, s.kv_heads], 1)
            keys, values = self.keys[index, :num_seqs], self.values[index, :num_seqs]
            keys[rows, :, positions] = k
            values[rows, :, positions] = mixed[:, s.heads + s.kv_heads :]
            scores = q.reshape(num_seqs, s.kv_heads, -1, s.head_dim) @ keys.transpose(-1, -2)
            read = scores.masked_fill_(unseen, float("-inf")).softmax(-1) @ values  # [num_seqs, kv_heads, group, dim]
            x = torch.addmm(x, read.view(num_seqs, -1), out.T)
            gate, up = (functional.rms_norm(x, (s.hidden,), self.norm) @ gate_up.T).chunk(2, -1)
            x = torch.addmm(x, functional.silu(gate).mul_(up), down.T)
        return (functional.rms_norm(x, (s.hidden,), self.norm) @ self.head.T).argmax(-1)

    def _normed_and_rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = functional.rms_norm(x, (self.shape.head_dim,)) * self.qk_norm
        return torch.addcmul(x * cos, x.roll(self.shape.head_dim // 2, -1), sin)
