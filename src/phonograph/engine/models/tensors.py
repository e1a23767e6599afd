"""ModelTensor: a row of the one table that says which tensors a model consists of, and where each goes.

Loading, checking, random weights and the names in GGUF files derive from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelTensor:
    """A tensor as checkpoints store it."""

    name: str
    """In safetensors: what `transformers` calls it."""
    place: str
    """The weight of the model that it is, or is a part of: tensors of one place are stacked by rows, as they come."""
    shape: Shape
    gguf: str = ""
    """In GGUF files; empty where the family has none."""
    init: Literal["normal", "ones"] = "normal"
    """What random weights hold."""
    heads: int = 0
    """The rows are of so many heads that are rotated: llama.cpp stores them in another order."""
    same_as: str | None = None
    """The name of a tensor that it must be equal to; it is not stored, or left out."""
    unsupported: str = ""
    """What is not supported, if a checkpoint that has this tensor can't be loaded."""

    def in_layer(self, layer: int) -> ModelTensor:
        """The same in one of the layers."""
        return replace(
            self,
            name=f"model.layers.{layer}.{self.name}",
            place=f"layers.{layer}.{self.place}",
            gguf=f"blk.{layer}.{self.gguf}" if self.gguf else "",
        )


@dataclass(frozen=True)
class Allocated:
    """Memory for a model's weights, not filled yet."""

    weights: dict[str, torch.Tensor]
    """By place."""
    parts: dict[str, torch.Tensor]
    """By name: where each stored tensor is to be copied."""


def allocate(tensors: Sequence[ModelTensor], dtype: torch.dtype, device: torch.device) -> Allocated:
    """One tensor for every place; a place whose tensor is another's is that one."""
    members: dict[str, list[ModelTensor]] = {}
    for tensor in tensors:
        if tensor.same_as is None:
            members.setdefault(tensor.place, []).append(tensor)
    made = Allocated({}, {})
    for place, stacked in members.items():
        first = stacked[0].shape
        if any(other.shape[1:] != first[1:] for other in stacked):
            found = ", ".join(f"{other.name} {list(other.shape)}" for other in stacked)
            raise ValueError(f"declaring {place}: its tensors differ in more than their rows: {found}.")
        shape = (sum(other.shape[0] for other in stacked), *first[1:])
        whole = made.weights[place] = torch.empty(shape, dtype=dtype, device=device)
        start = 0
        for other in stacked:
            made.parts[other.name] = whole if len(stacked) == 1 else whole[start : start + other.shape[0]]
            start += other.shape[0]
    for tensor in tensors:
        if tensor.same_as is not None:
            made.weights[tensor.place] = made.parts[tensor.same_as]
    return made
