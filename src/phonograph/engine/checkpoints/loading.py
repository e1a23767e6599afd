"""Loading: a checkpoint's tensors are streamed to their places, and become a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from phonograph.engine.checkpoints.base import Checkpoint, MakesModel
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.models.registry import family_of
from phonograph.engine.models.tensors import ModelWeights, allocate
from phonograph.errors import CheckpointError
from phonograph.graphs.progress import Progress, silent


def load_model(
    checkpoint: Checkpoint, parts: ModelParts, dtype: torch.dtype, device: torch.device, progress: Progress = silent
) -> Model:
    """The model of a checkpoint, on the device and in this precision; its matrices are prepared for its kernels."""
    if isinstance(checkpoint, MakesModel):
        return checkpoint.model(parts, dtype, device, progress)
    weights = load_weights(checkpoint, dtype, device, progress)
    matrices = {}
    for number, (place, matrix) in enumerate(weights.matrices.items(), 1):
        matrices[place] = parts.kernels.prepare(matrix)
        progress("preparing matrices", number, len(weights.matrices))
    return family_of(checkpoint.config).build(checkpoint.config, replace(weights, matrices=matrices), parts)


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress = silent
) -> ModelWeights:
    """All weights, not prepared; one stored tensor at a time is held besides."""
    table, stored = family_of(checkpoint.config).tensors(checkpoint.config), checkpoint.names
    made = allocate(table, dtype, device, {name: info.stored for name, info in stored.items()})
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for index, (name, tensor) in enumerate(checkpoint.tensors(device=device)):
            if name in made.parts:
                sums[name] = made.parts[name].copy_(tensor).sum()
            progress("loading weights", index + 1, len(stored))
        refuse_not_finite(checkpoint.source, made.parts, sums)
    return made.weights


def refuse_not_finite(source: str, places: Mapping[str, torch.Tensor], sums: Mapping[str, torch.Tensor]) -> None:
    """Refuse NaN and infinite weights; a finite sum, the usual case, shows that every weight is finite."""
    if not sums or bool(torch.stack(list(sums.values())).isfinite().all()):
        return
    for name, total in sums.items():
        if not total.isfinite() and (num_bad := int((~places[name].isfinite()).sum())):
            dtype = str(places[name].dtype).removeprefix("torch.")
            raise CheckpointError(
                f"loading {source}: {num_bad:,} of the {places[name].numel():,} values of {name} are NaN or infinite "
                f"in {dtype}. The file is damaged, or its values are too large for {dtype}: get it again, or choose "
                "another dtype."
            )
