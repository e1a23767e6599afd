"""Rotary positions: the table of cosines and sines that a config describes."""

from __future__ import annotations

import torch

from phonograph.engine.models.config import ModelConfig
from phonograph.engine.ops.kernels import Angles


def rope_table(config: ModelConfig, length: int, device: torch.device) -> Angles:
    """cos and sin for every position, [length, head_dim]."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.inv_freq())
    cos, sin = angles.cos() * config.rope_attention_factor, angles.sin() * config.rope_attention_factor
    return Angles(torch.cat([cos, cos], -1).to(device), torch.cat([-sin, sin], -1).to(device))
