"""Masks: logits limited to what grammars and requests allow, from a bit for every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MaskRows:
    """The tokens that requests allow, gathered from the columns of the same names."""

    early_tokens: torch.Tensor  # [num_rows, words]
    late_tokens: torch.Tensor
    least_length: torch.Tensor  # [num_rows]
    positions: torch.Tensor  # [num_rows]: of the token that is picked

    def allowed(self) -> torch.Tensor:
        """[num_rows, words]: those that may come at these positions."""
        is_early = self.positions < self.least_length
        return torch.where(is_early[:, None], self.early_tokens, self.late_tokens)


def mask(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits with what is not allowed at minus infinity; what is no logit stays, for the sampler to see.

    `allowed` has a row of int32 words for each row of logits, a bit for every token, the lowest first.
    """
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    unpacked = ((allowed[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(unpacked.bool() | ~(logits < float("inf")), logits, float("-inf"))
