"""Files of drafters: a folder with config.json and safetensors, whose headers are compared before weights are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open

from phonograph.engine.checkpoints.safetensors import INDEX, SINGLE, weight_files
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.features import NotComputedError
from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.matrix import Matrix
from phonograph.errors import CheckpointError

FLOATS = ("F16", "BF16", "F32")
INTEGERS = ("I32", "I64")
Shape = tuple[int, ...]


def layer_config(fields: Fields, architecture: str, what: str, also_read: Collection[str]) -> ModelConfig:
    """The configuration of a drafter's layers, which are of our own, always."""
    try:
        return ModelConfig.from_hf(fields, architecture, also_read=also_read)
    except NotComputedError as error:
        raise CheckpointError(
            f"reading {fields.source}: {error.problem} in the layers of {what}. Give --draft another, or use "
            "--speculate ngram."
        ) from None


@dataclass(frozen=True)
class DraftFiles:
    """A folder whose headers are read."""

    folder: Path
    what: str
    """As which errors call it."""
    stored: Mapping[str, tuple[Path, str, Shape]]
    """Name → (file, format, shape)."""

    @classmethod
    def open(cls, folder: Path, what: str, whose: str) -> DraftFiles:
        """`whose` says where such a folder comes from."""
        if not folder.is_dir():
            found = "it is a file" if folder.is_file() else "there is no such folder"
            raise CheckpointError(f"opening the {what} {folder}: {found}. Give a folder {whose}.")
        is_there = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
        for name, has_file in (("config.json", (folder / "config.json").is_file()), (SINGLE, is_there)):
            if not has_file:
                raise CheckpointError(f"opening the {what} {folder}: it has no {name}. Give a folder {whose}.")
        stored = {name: (path, *info) for path in weight_files(folder) for name, info in _header(path).items()}
        return cls(folder, what, stored)

    @property
    def fields(self) -> Fields:
        return Fields.from_json(self.folder / "config.json")

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(
            f"the {self.what} in {self.folder} can't draft for this model: {problem}. Give --draft a folder that was "
            "trained for it."
        )

    def expect(self, expected: Mapping[str, Shape], names: Collection[str], integers: Collection[str] = ()) -> None:
        """Refuse it unless `names`, some of those that are stored, are the expected ones, in shape and kind."""
        missing = [name for name in expected if name not in self.stored]
        strange = [name for name in names if name not in expected]
        if missing or strange:
            said = f"{missing[0]} is missing" if missing else f"{strange[0]} is no part of it"
            self.refuse(f"{said} ({len(missing)} missing, {len(strange)} unknown)")
        for name, shape in expected.items():
            _, dtype, found = self.stored[name]
            if found != shape:
                self.refuse(f"{name} has shape {list(found)}, and the configurations make it {list(shape)}")
            if dtype not in (INTEGERS if name in integers else FLOATS):
                self.refuse(f"{name} is stored as {dtype}")

    def expect_same(self, config: ModelConfig, target: ModelConfig) -> None:
        """Refuse what has another hidden size or vocabulary than the target."""
        for what, found, wanted in (
            ("hidden size", config.hidden, target.hidden),
            ("vocabulary", config.vocab, target.vocab),
        ):
            if found != wanted:
                self.refuse(f"its {what} is {found:,}, and the model's is {wanted:,}")

    def tensors(self, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """These, as they are stored."""
        found, wanted = dict[str, torch.Tensor](), set(names)
        for path in dict.fromkeys(path for path, *_ in self.stored.values()):
            with safe_open(path, framework="pt", device=str(device)) as file:
                here = wanted.intersection(file.keys())
                found |= {name: file.get_tensor(name) for name in here}
        return found


@dataclass(frozen=True)
class DraftTensors:
    """The weights of a drafter, in the precision of its target."""

    floats: Mapping[str, torch.Tensor]
    target: Decoder
    eps: float

    @classmethod
    def of(cls, files: DraftFiles, found: Mapping[str, torch.Tensor], target: Decoder, eps: float) -> DraftTensors:
        """Refuses values that are not finite."""
        dtype = target.weights.embedding.dtype
        floats = {name: tensor.to(dtype) for name, tensor in found.items()}
        for name, tensor in floats.items():
            if not bool(tensor.isfinite().all()):
                files.refuse(f"{name} has values that are NaN or infinite in {dtype}")
        return cls(floats, target, eps)

    def norm(self, name: str) -> Norm:
        return Norm(self.floats[f"{name}.weight"], self.eps)

    def matrix(self, *names: str) -> Matrix:
        """The tensors of these names, stacked by rows."""
        weight = torch.cat([self.floats[f"{name}.weight"] for name in names])
        biases = [self.floats[f"{name}.bias"] for name in names if f"{name}.bias" in self.floats]
        return self.target.kernels.prepare(Matrix(weight, torch.cat(biases) if biases else None))


def _header(path: Path) -> dict[str, tuple[str, Shape]]:
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"reading {path}: {error}. The file is cut short or damaged: get it again.") from None
