"""Streams a checkpoint's tensors to their places, and makes the model of them."""

from __future__ import annotations

import torch

from phonograph.engine.checkpoints.base import Checkpoint
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.models.registry import family_of
from phonograph.engine.models.tensors import allocate
from phonograph.errors import CheckpointError
from phonograph.graphs.progress import Progress, silent


def load_model(
    checkpoint: Checkpoint, parts: ModelParts, dtype: torch.dtype, device: torch.device, progress: Progress = silent
) -> Model:
    """The model of a checkpoint, on the device and in this precision; its kernels know its matrices."""
    weights = load_weights(checkpoint, dtype, device, progress)
    model = family_of(checkpoint.config).build(checkpoint.config, weights, parts)
    for number, matrix in enumerate(matrices := model.matrices, 1):
        parts.kernels.prepare(matrix)
        progress("preparing matrices", number, len(matrices))
    return model


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress = silent
) -> dict[str, torch.Tensor]:
    """All weights by place; one stored tensor at a time is held besides."""
    refuse_unsupported(checkpoint)
    made = allocate(family_of(checkpoint.config).tensors(checkpoint.config), dtype, device)
    total = len(checkpoint.names)
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for index, (name, tensor) in enumerate(checkpoint.tensors(device=device)):
            if name in made.parts:
                sums[name] = made.parts[name].copy_(tensor).sum()
            progress("loading weights", index + 1, total)
        _refuse_not_finite(checkpoint.source, made.parts, sums)
    return made.weights


def refuse_unsupported(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose weights have no place in the model, before any of them is read."""
    for tensor in family_of(checkpoint.config).tensors(checkpoint.config):
        if tensor.unsupported:
            raise CheckpointError(
                f"loading {checkpoint.source}: {tensor.unsupported} are not supported ({tensor.name})."
            )


def _refuse_not_finite(source: str, places: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]) -> None:
    """Refuse NaN and infinite weights; a sum that is finite, as nearly all are, shows that every weight is."""
    if not sums or bool(torch.stack(list(sums.values())).isfinite().all()):
        return
    for name, total in sums.items():
        if not total.isfinite() and (num_bad := int((~places[name].isfinite()).sum())):
            dtype = str(places[name].dtype).removeprefix("torch.")
            raise CheckpointError(
                f"loading {source}: {num_bad:,} of the {places[name].numel():,} values of {name} are NaN or infinite "
                f"in {dtype}. The file is damaged, or its values are too large for {dtype}: get it again, or ask for "
                "another dtype."
            )
