"""RowNorm: a root-mean-square norm by the order of its roundings, as others' models have it; and what computes one.

Statistics are float32's. A norm that rounds elsewhere gives other bits, and now and then another token: models of
transformers are to give the tokens that they give there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class RowNorm:
    """Everything about a norm but its weight."""

    eps: float
    adds_one: bool
    """Whether rows are multiplied by 1 + weight."""
    rounds_first: bool
    """Whether rows are rounded to their dtype before they are multiplied, besides after."""


@runtime_checkable
class NormsRows(Protocol):
    """Kernels that compute such a norm in one launch."""

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor | None:
        """Of the rows that x has along its last dim, laid out as torch's ops would; None for a layout that they don't
        know. Dtypes are the same, and x is not changed."""
        ...


def norm_rows(x: torch.Tensor, weight: torch.Tensor, norm: RowNorm) -> torch.Tensor:
    """What a norm is, in torch's ops."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.rounds_first:
        wide = wide.to(x.dtype).to(torch.float32)
    factor = weight.to(torch.float32)
    return (wide * (1.0 + factor if norm.adds_one else factor)).to(x.dtype)
