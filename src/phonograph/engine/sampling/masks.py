"""Masks: logits limited to what a grammar allows, from a bit for every token."""

from __future__ import annotations

import torch


def mask(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits with what is not allowed at minus infinity; what is no logit stays, for the sampler to see.

    `allowed` has a row of int32 words for each row of logits, a bit for every token, the lowest first.
    """
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    unpacked = ((allowed[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(unpacked.bool() | ~(logits < float("inf")), logits, float("-inf"))
