"""Rotary positions: the table of cosines and sines that a config asks for."""

from __future__ import annotations

import math

import torch

from phonograph.engine.models.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for every position, [length, head_dim], in float32; sin carries the sign of the rotation."""
    half = config.head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return table[0].float().to(device), table[1].float().to(device)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: long waves are stretched, short ones kept, and those between blended.
    waves = 2 * math.pi / frequencies
    long, short = (
        scaling.original_max_len / scaling.low_freq_factor,
        scaling.original_max_len / scaling.high_freq_factor,
    )
    blend = (scaling.original_max_len / waves - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(waves > long, frequencies / scaling.factor, frequencies)
    return torch.where((waves <= long) & (waves >= short), between, stretched)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x ([num_tokens, heads, head_dim]) turned by its positions' angles."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
