"""SafetensorsCheckpoint: a Hugging Face folder, with config.json and one or more safetensors files."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from phonograph.engine.checkpoints import generation_config as sampling
from phonograph.engine.checkpoints.base import TensorInfo, check_tensors, expected_shapes, refuse_missing_layers
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig, known_ids
from phonograph.engine.models.registry import config_from_hf, family_of
from phonograph.engine.models.tensors import Shape
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text.chat import ChatTemplate
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import CheckpointError

log = logging.getLogger("phonograph")

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the library that defines the format."""
_IGNORED = ".rotary_emb.inv_freq"
"""Old conversions stored the rotary frequencies in every layer; the configuration says them too."""


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """A folder whose configuration and headers are read and checked."""

    folder: Path
    config: ModelConfig
    shards: Mapping[Path, Mapping[str, TensorInfo]]
    """Every tensor of every file, in the order of the files; empty where the weights are not there yet."""
    sampling: SamplingParams = SamplingParams()

    @classmethod
    def open(cls, folder: Path, *, needs_weights: bool = True) -> SafetensorsCheckpoint:
        """Read and check configuration and headers; refuse what can't be loaded before any weight is read.

        Unless it `needs_weights`, a folder may have its configuration alone.
        """
        config, generation = _read_config(folder)
        shards = {path: read_header(path) for path in weight_files(folder, needed=needs_weights)}
        checkpoint = cls(folder, config, shards, sampling.from_hf(generation))
        if not shards:
            return checkpoint
        owner: dict[str, Path] = {}
        for path, tensors in shards.items():
            for name in tensors:
                if name in owner:
                    both = f"{owner[name].name} and in {path.name}"
                    raise CheckpointError(
                        f"checking {folder}: {name} is in {both}; expected it once. Get the checkpoint again."
                    )
                owner[name] = path
        refuse_missing_layers(str(folder), config, len(owner))
        check_tensors(str(folder), config, checkpoint.names)
        warn_of_adapter(folder)
        return checkpoint

    @property
    def source(self) -> str:
        return str(self.folder)

    @property
    def names(self) -> dict[str, TensorInfo]:
        if not self.shards:
            return {name: described_tensor(shape, self.config) for name, shape in expected_shapes(self.config).items()}
        return {name: info for tensors in self.shards.values() for name, info in tensors.items() if self._is_used(name)}

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        if not self.shards:
            weight_files(self.folder)  # refuses
        for name, other in self._tied.items():
            self._check_tied(name, other)
        for path, tensors in self.shards.items():
            with _opened(path, device) as file:
                for name in tensors:
                    if self._is_used(name):
                        yield name, file.get_tensor(name)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.folder, eos_ids=self.config.eos_ids)

    def chat_template(self) -> ChatTemplate:
        return ChatTemplate.from_folder(self.folder)

    def _is_used(self, name: str) -> bool:
        return not (name.endswith(_IGNORED) or name in self._tied)

    @cached_property
    def _tied(self) -> dict[str, str]:
        """Tensors that are stored in addition to those they are equal to."""
        tensors = family_of(self.config).tensors(self.config)
        return {tensor.name: tensor.same_as for tensor in tensors if tensor.same_as is not None}

    def _check_tied(self, name: str, other: str) -> None:
        """One that is stored all the same is only left out if it is the same."""
        found: dict[str, torch.Tensor] = {}
        if not any(name in tensors for tensors in self.shards.values()):
            return
        for path, tensors in self.shards.items():
            with _opened(path) as file:
                found.update({one: file.get_tensor(one) for one in (name, other) if one in tensors})
        if not torch.equal(found[name].double(), found[other].double()):
            raise CheckpointError(
                f"loading {self.folder}: {name} differs from {other}, but config.json says tie_word_embeddings. "
                "Set it to false if the model has a head of its own."
            )


def warn_of_adapter(folder: Path) -> None:
    """Say that an adapter, if a folder describes one, is not applied."""
    if (folder / ADAPTER).is_file():
        problem = "the adapter that it describes is not applied, the base weights are served as they are"
        log.warning("%s: %s. Merge it: peft's merge_and_unload, then save_pretrained.", folder / ADAPTER, problem)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, checked against its length, in the order in which they lie."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            most = f"the file has {size}" if size < 8 or length > size - 8 else f"the format allows {_MAX_HEADER_BYTES}"
            raise _damaged(path, f"its header should be {length} bytes long, but {most}")
        header = Fields.parse(file.read(length), f"{path}, header", unique=True)
    tensors: list[tuple[int, str, TensorInfo]] = []
    for name in header.values:
        if name != "__metadata__":
            start, info = _placed(path, name, header.section(name), size - 8 - length)
            tensors.append((start, name, info))
    end = 0
    for start, name, info in sorted(tensors, key=lambda tensor: tensor[0]):
        if start != end:
            raise _damaged(
                path, f"tensor {name} starts at byte {start} of the data; expected {end}, where the one before ends"
            )
        end += info.num_bytes
    if end != size - 8 - length:
        raise _damaged(path, f"its tensors end at byte {end} of the data, but there are {size - 8 - length} bytes")
    with _opened(path):  # what reads the weights must agree that this is a file of tensors
        return {name: info for _, name, info in sorted(tensors, key=lambda tensor: tensor[0])}


def stored_floats(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file that hold floating point numbers, as its header says; others are left out."""
    found = {}
    with _opened(path) as file:
        names: list[str] = file.keys()
        for name in names:
            part = file.get_slice(name)
            stored, shape = part.get_dtype(), tuple(part.get_shape())
            if stored in _DTYPES:
                dtype = _DTYPES[stored]
                found[name] = TensorInfo(shape, dtype, stored, math.prod(shape) * dtype.itemsize)
    return found


@contextmanager
def _opened(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    """The file as the library reads it; whatever that refuses is an error of the checkpoint."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _damaged(path, f"it can't be read ({error})") from None


def _placed(path: Path, name: str, fields: Fields, num_data_bytes: int) -> tuple[int, TensorInfo]:
    """Where a tensor starts, and what it is."""
    stored, shape, offsets = fields.text("dtype"), fields.integers("shape"), fields.integers("data_offsets")
    if stored not in _DTYPES:
        raise CheckpointError(
            f"reading {path}: tensor {name} is {stored}; supported are {', '.join(_DTYPES)}. "
            "Use the original checkpoint, or a GGUF file of the quantised one."
        )
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise _damaged(path, f"tensor {name} has data_offsets {list(offsets)}; expected its start and its end")
    if offsets[1] > num_data_bytes:
        raise _damaged(path, f"tensor {name} ends at byte {offsets[1]} of the data, but the file has {num_data_bytes}")
    num_bytes = math.prod(shape) * _DTYPES[stored].itemsize
    if min(shape, default=0) < 0 or offsets[1] - offsets[0] != num_bytes:
        raise _damaged(
            path, f"tensor {name} of {list(shape)} {stored} has {offsets[1] - offsets[0]} bytes; expected {num_bytes}"
        )
    return offsets[0], TensorInfo(shape, _DTYPES[stored], stored, num_bytes)


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"reading {path}: {problem}. The file is cut short or damaged: get it again.")


def _read_config(folder: Path) -> tuple[ModelConfig, Fields]:
    """From config.json, with the end-of-sequence tokens that generation_config.json adds; and the latter's fields."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"opening {folder}: it has no config.json. Give a folder with a Hugging Face checkpoint.")
    config = config_from_hf(Fields.from_json(path).values, str(path))
    path = folder / "generation_config.json"
    generation = Fields.from_json(path) if path.is_file() else Fields(str(path), {})
    more = known_ids(generation, "eos_token_id", config.vocab)
    return replace(config, eos_ids=tuple(dict.fromkeys((*config.eos_ids, *more)))), generation


def described_tensor(shape: Shape, config: ModelConfig) -> TensorInfo:
    """A tensor whose file is not there yet, as config.json describes it."""
    stored = f"{str(config.dtype).removeprefix('torch.')} by config.json"
    return TensorInfo(shape, config.dtype, stored, math.prod(shape) * config.dtype.itemsize)


def weight_files(folder: Path, *, needed: bool = True) -> list[Path]:
    """The one safetensors file, or those that the index names, all of which must be there.

    None where no weights are in the folder at all, as before a download, and they are not `needed`.
    """
    weights = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not needed and not weights:
        return []
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        others = [name for name in weights if not name.endswith(".safetensors")]
        found = f"found {others[0]}" if others else "found no weights"
        remedy = "Save it again with transformers' save_pretrained, or name a .gguf file itself."
        raise CheckpointError(f"opening {folder}: {found}; expected {SINGLE} or {INDEX}. {remedy}")
    index = Fields.from_json(folder / INDEX).section("weight_map")
    by_file: dict[str, list[str]] = {}
    for name in index.values:
        by_file.setdefault(index.text(name), []).append(name)
    for file, names in sorted(by_file.items()):
        if Path(file).name != file:
            raise CheckpointError(
                f"reading {folder / INDEX}: {names[0]} is in {file!r}; expected a file of the same folder. "
                "Correct the index, or get the checkpoint again."
            )
        if not (folder / file).is_file():
            what = f"{names[0]} and {len(names) - 1} more tensors" if len(names) > 1 else names[0]
            raise CheckpointError(f"opening {folder}: {file} is missing, which has {what}. Get that file too.")
    return [folder / file for file in sorted(by_file)]
