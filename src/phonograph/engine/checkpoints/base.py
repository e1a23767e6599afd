"""Checkpoint protocol: names and shapes of the tensors before any data is read, then the data, one by one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.models.registry import family_of
from phonograph.engine.models.tensors import Shape
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text.chat import ChatTemplate
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import CheckpointError
from phonograph.graphs.progress import Progress, silent

_NAMED = 5
"""How many tensors an error names before it only counts."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as `Checkpoint.tensors` gives it, known before it is read."""

    shape: Shape
    dtype: torch.dtype
    stored: str
    """How it lies in the file: BF16, Q4_1, …"""
    num_bytes: int
    """How long it is in the file."""


class Checkpoint(Protocol):
    """The weights, configuration and text parts of a model, wherever they come from."""

    @property
    def source(self) -> str:
        """Its name in errors and logs."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters that its publishers recommend; None for the others."""

    @property
    def names(self) -> Mapping[str, TensorInfo]:
        """Every tensor that `tensors` gives, under the names that `transformers` uses for Llama. Reads no data."""

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Read the tensors one by one onto a device, in the order of the file; none is kept."""

    def tokenizer(self) -> Tokenizer:
        """Made anew on every call."""

    def chat_template(self) -> ChatTemplate:
        """Made anew on every call."""


@runtime_checkable
class MakesModel(Protocol):
    """A checkpoint that builds its model itself, where there is no native family for it."""

    def model(self, parts: ModelParts, dtype: torch.dtype, device: torch.device, progress: Progress = silent) -> Model:
        """The model with its weights, on the device; refuses one that would be wrong."""
        ...

    def check(self, max_len: int) -> None:
        """Refuse what `model` would refuse with sequences of this length, before weights are read."""
        ...

    def breaks(self) -> tuple[str, ...]:
        """Modules that no graph can hold: they run in gaps between graphs."""
        ...

    def described(self, dtype: torch.dtype, device: torch.device) -> str:
        """The implementation, in words, as known before weights are read."""
        ...


def implementation_of(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> str:
    """The implementation of the model, in words."""
    if isinstance(checkpoint, MakesModel):
        return checkpoint.described(dtype, device)
    return f"native: {checkpoint.config.architecture} in layers of our own"


def breaks_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Modules of its model that run between two graphs, besides attention."""
    return checkpoint.breaks() if isinstance(checkpoint, MakesModel) else ()


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this configuration must have."""
    return {tensor.name: tensor.shape for tensor in family_of(config).tensors(config) if tensor.same_as is None}


def refuse_missing_layers(source: str, config: ModelConfig, num_tensors: int) -> None:
    """Refuse a number of layers that the tensors can't be enough for, before as many are looked for."""
    if config.num_layers > num_tensors:
        raise CheckpointError(
            f"checking {source}: the configuration says {config.num_layers} layers, but there are {num_tensors} "
            "tensors in all. The weights and the configuration don't belong together: get the checkpoint again."
        )


def check_tensors(source: str, config: ModelConfig, found: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that are missing, unexpected, or of another shape than the configuration says."""
    refuse_missing_layers(source, config, len(found))
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    problems = []
    if missing:
        problems.append(f"missing {_some(missing)}")
    if unexpected:
        near = difflib.get_close_matches(unexpected[0], expected, 1)
        hint = f" (nearest known name: {near[0]})" if near else ""
        problems.append(f"not part of a {config.architecture}: {_some(unexpected)}{hint}")
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            problems.append(f"{name} has shape {list(found[name].shape)}, but the configuration makes it {list(shape)}")
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise CheckpointError(
            f"checking {source}: {'; '.join(problems[:_NAMED])}{more}. "
            "The weights and the configuration don't belong together, or files are missing: get the checkpoint again."
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
