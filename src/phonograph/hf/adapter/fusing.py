"""Fusing: layers of an adapted model whose norms and rotations are one launch each, where the kernels have one."""

from __future__ import annotations

from typing import Any

from phonograph.engine.ops.kernels import Kernels
from phonograph.engine.ops.rotation import RotatesHalves
from phonograph.engine.ops.row_norm import NormsRows
from phonograph.hf.adapter.norms import fused_norms
from phonograph.hf.adapter.rotations import fused_rotations
from phonograph.hf.adapter.twins import Fused


def fused(layers: Any, kernels: Kernels) -> Fused:
    """A twin of the layers, which stay as they are; or the layers themselves, where nothing can be fused."""
    found = Fused(layers, ())
    # Rotations last: a module with a `forward` of its own hides what is below it.
    if isinstance(kernels, NormsRows):
        found = fused_norms(layers, kernels)
    if isinstance(kernels, RotatesHalves):
        rotations = fused_rotations(found.layers, kernels)
        found = Fused(rotations.layers, (*found.notes, *rotations.notes))
    return found
