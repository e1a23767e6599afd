"""RandomCheckpoint: random weights of a shape, made on the device: for benchmarks that need no real weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch

from phonograph.engine.checkpoints.base import TensorInfo
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.registry import family_of
from phonograph.engine.models.tensors import ModelTensor
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import CheckpointError

STD = 0.02


@dataclass(frozen=True)
class RandomCheckpoint:
    """Norms are one, everything else is normal; the same seed gives the same numbers on the same kind of device."""

    config: ModelConfig
    seed: int = 0
    source: str = "random weights"
    sampling: SamplingParams = SamplingParams()

    @property
    def names(self) -> dict[str, TensorInfo]:
        dtype = self.config.dtype
        return {
            tensor.name: TensorInfo(tensor.shape, dtype, "random", math.prod(tensor.shape) * dtype.itemsize)
            for tensor in self._stored()
        }

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        numbers = torch.Generator(device).manual_seed(self.seed)
        for row in self._stored():
            tensor = torch.empty(row.shape, dtype=self.config.dtype, device=device)
            yield row.name, tensor.fill_(1.0) if row.init == "ones" else tensor.normal_(0.0, STD, generator=numbers)

    def _stored(self) -> list[ModelTensor]:
        return [tensor for tensor in family_of(self.config).tensors(self.config) if tensor.same_as is None]

    def tokenizer(self) -> NoReturn:
        raise CheckpointError("making a tokenizer: random weights have none. Give prompts as token ids.")

    def chat_template(self) -> NoReturn:
        raise CheckpointError("making a chat template: random weights have none. Give prompts as token ids.")
