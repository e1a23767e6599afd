"""ModelTensor: a row of the one table that says which tensors a model consists of, and where each goes.

Loading, checking, random weights and the names in GGUF files derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from phonograph.engine.ops.matrix import Matrix

Shape = tuple[int, ...]
Role = Literal["tensor", "matrix", "bias"]


@dataclass(frozen=True)
class ModelTensor:
    """A tensor as checkpoints store it."""

    name: str
    """In safetensors: what `transformers` calls it."""
    place: str
    """The weight of the model that it is, or is a part of: tensors of one place are stacked by rows, as they come."""
    shape: Shape
    role: Role = "tensor"
    """Whether something is projected with it, or it is the bias of the matrix at its place; a tensor is neither."""
    gguf: str = ""
    """In GGUF files; empty where the family has none."""
    init: Literal["normal", "ones"] = "normal"
    """What random weights hold."""
    heads: int = 0
    """The rows are of so many heads that are rotated: llama.cpp stores them in another order."""
    same_as: str | None = None
    """The name of a tensor that it must be equal to; it is not stored, or left out."""

    def in_layer(self, layer: int) -> ModelTensor:
        """The same in one of the layers."""
        return replace(
            self,
            name=f"model.layers.{layer}.{self.name}",
            place=f"layers.{layer}.{self.place}",
            gguf=f"blk.{layer}.{self.gguf}" if self.gguf else "",
        )


@dataclass(frozen=True)
class ModelWeights:
    """What a family builds a model from, by place."""

    tensors: Mapping[str, torch.Tensor]
    matrices: Mapping[str, Matrix]
    """In the order of the table."""


@dataclass(frozen=True)
class Allocated:
    """Memory for a model's weights, not filled yet."""

    weights: ModelWeights
    parts: dict[str, torch.Tensor]
    """By name: where each stored tensor is to be copied."""


def allocate(
    tensors: Sequence[ModelTensor],
    dtype: torch.dtype,
    device: torch.device,
    stored: Mapping[str, str] | None = None,
) -> Allocated:
    """One tensor for every place and role; a place whose tensor is another's is that one.

    `stored` are the formats of the tensors in the checkpoint, by name.
    """
    wholes: dict[tuple[str, Role], torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    for (place, role), stacked in _members(tensors).items():
        if (same := stacked[0].same_as) is not None:
            wholes[place, role] = parts[same]
            continue
        shape = _stacked_shape(place, stacked)
        whole = wholes[place, role] = torch.empty(shape, dtype=dtype, device=device)
        start = 0
        for tensor in stacked:
            parts[tensor.name] = whole if len(stacked) == 1 else whole[start : start + tensor.shape[0]]
            start += tensor.shape[0]
    for place, role in wholes:
        if role == "bias" and (place, "matrix") not in wholes:
            raise ValueError(f"declaring {place}: it has a bias and no matrix.")
    formats = _formats(tensors, stored or {})
    weights = ModelWeights(
        {place: whole for (place, role), whole in wholes.items() if role == "tensor"},
        {
            place: Matrix(whole, wholes.get((place, "bias")), stored=formats[place])
            for (place, role), whole in wholes.items()
            if role == "matrix"
        },
    )
    return Allocated(weights, parts)


def _members(tensors: Sequence[ModelTensor]) -> dict[tuple[str, Role], list[ModelTensor]]:
    """The tensors of every place and role; those that are another's come after it."""
    found: dict[tuple[str, Role], list[ModelTensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.same_as is not None):
        found.setdefault((tensor.place, tensor.role), []).append(tensor)
    return found


def _stacked_shape(place: str, stacked: Sequence[ModelTensor]) -> Shape:
    first = stacked[0].shape
    if any(other.shape[1:] != first[1:] for other in stacked):
        found = ", ".join(f"{other.name} {list(other.shape)}" for other in stacked)
        raise ValueError(f"declaring {place}: its tensors differ in more than their rows: {found}.")
    return sum(other.shape[0] for other in stacked), *first[1:]


def _formats(tensors: Sequence[ModelTensor], stored: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The formats that the matrix of each place was stored in, each once."""
    found: dict[str, dict[str, None]] = {}
    for tensor in tensors:
        if tensor.role == "matrix":
            names = found.setdefault(tensor.place, {})
            if (name := stored.get(tensor.same_as or tensor.name)) is not None:
                names[name] = None
    return {place: tuple(names) for place, names in found.items()}
