"""Rotary positions: the table of cosines and sines that a config asks for."""

from __future__ import annotations

import torch

from phonograph.engine.models.config import ModelConfig


def rope_table(config: ModelConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for every position, [length, head_dim], in float32; sin carries the sign of the rotation."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.inv_freq())
    cos, sin = angles.cos() * config.rope_attention_factor, angles.sin() * config.rope_attention_factor
    return torch.cat([cos, cos], -1).to(device), torch.cat([-sin, sin], -1).to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x ([num_tokens, heads, head_dim]) turned by its positions' angles."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
