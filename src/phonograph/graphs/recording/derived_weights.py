"""Derived weights: attributes that a hook of torch computes anew before every call of a module (pruning, weight norm).

They are not state: a replay computes them too, in memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def is_derived(owner: Any, name: Any) -> bool:
    """Whether an attribute is one that such a hook of its module sets."""
    if not isinstance(owner, torch.nn.Module):
        return False
    return any(_set_by(hook) == name for hook in owner._forward_pre_hooks.values())


def _set_by(hook: Any) -> str | None:
    if isinstance(hook, BasePruningMethod):
        return hook._tensor_name
    return hook.name if isinstance(hook, WeightNorm | SpectralNorm) else None
