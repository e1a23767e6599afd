"""GgufCheckpoint: a GGUF file, with names translated, quantised blocks unpacked, llama.cpp's order of rows undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from phonograph.engine.checkpoints import generation_config as sampling
from phonograph.engine.checkpoints.base import TensorInfo, check_tensors, refuse_missing_layers
from phonograph.engine.checkpoints.gguf_header import GgufHeader, StoredTensor
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.registry import config_from_gguf, family_of
from phonograph.engine.models.rope_scaling import FactorsRope
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text.chat import ChatTemplate
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3.1's stretched frequencies: a tensor in the file, but part of the configuration here."""

_NATIVE = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}
"""Stored as torch has them; everything else is unpacked to float32."""


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file whose header is read and checked."""

    header: GgufHeader
    config: ModelConfig
    stored: Mapping[str, StoredTensor]
    """By canonical name, in the order of the file."""
    sampling: SamplingParams = SamplingParams()

    @classmethod
    def open(cls, path: Path) -> GgufCheckpoint:
        """Read and check the header; refuse what can't be loaded before any weight is read."""
        header = GgufHeader.read(path)
        config = config_from_gguf(header.metadata, header.tensors, str(path))
        if ROPE_FACTORS in header.tensors:
            config = replace(config, rope_scaling=_rope_factors(header, config))
        refuse_missing_layers(str(path), config, len(header.tensors))
        # An unknown name is kept, so that errors can say it.
        names = {tensor.gguf: tensor.name for tensor in family_of(config).tensors(config) if tensor.gguf}
        stored = {names.get(name, name): tensor for name, tensor in header.tensors.items() if name != ROPE_FACTORS}
        checkpoint = cls(header, config, stored, sampling.from_gguf(header.metadata, str(path)))
        check_tensors(str(path), config, checkpoint.names)
        quantised = next((name for name, tensor in stored.items() if tensor.type.name not in _NATIVE), None)
        if quantised is not None and find_spec("gguf") is None:
            type_name = stored[quantised].type.name
            raise CheckpointError(
                f"opening {path}: {quantised} is {type_name}, and the package that unpacks it is not installed. "
                "Run: pip install gguf"
            )
        return checkpoint

    @property
    def source(self) -> str:
        return str(self.header.path)

    @property
    def names(self) -> dict[str, TensorInfo]:
        return {name: _info(tensor) for name, tensor in self.stored.items()}

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        heads = dict[str, int]()
        if self.header.metadata["general.architecture"] == "llama":  # of the others it leaves the rows alone
            heads = {tensor.name: tensor.heads for tensor in family_of(self.config).tensors(self.config)}
        for name, stored in self.stored.items():
            tensor, num_heads = _read(self.header.path, stored), heads.get(name, 0)
            yield name, (self._in_order(num_heads, tensor) if num_heads else tensor).to(device)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.header.metadata, self.config.eos_ids, self.source)

    def chat_template(self) -> ChatTemplate:
        tokenizer = self.tokenizer()
        template = self.header.metadata.get("tokenizer.chat_template")
        return ChatTemplate(template if isinstance(template, str) else None, tokenizer.special_tokens, self.source)

    def _in_order(self, num_heads: int, tensor: torch.Tensor) -> torch.Tensor:
        """Undo llama.cpp's permutation of rotated heads: it rotates adjacent pairs, we rotate halves."""
        pairs = tensor.view(num_heads, self.config.head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def _rope_factors(header: GgufHeader, config: ModelConfig) -> FactorsRope:
    """The factors that stretch the frequencies, which the metadata must not stretch a second time."""
    stored, doing = header.tensors[ROPE_FACTORS], f"reading {header.path}: {ROPE_FACTORS}"
    if config.rope_scaling is not None:
        raise CheckpointError(
            f"{doing} and rope.scaling.* metadata are both there; supported is one of them. Remove one."
        )
    if stored.shape != (config.head_dim // 2,):
        raise CheckpointError(
            f"{doing} has shape {list(stored.shape)}; expected [{config.head_dim // 2}]. Get the file again."
        )
    return FactorsRope(tuple(_read(header.path, stored).tolist()))


def _info(tensor: StoredTensor) -> TensorInfo:
    dtype = _NATIVE[tensor.type.name][1] if tensor.type.name in _NATIVE else torch.float32
    return TensorInfo(tensor.shape, dtype, tensor.type.name, tensor.num_bytes)


def _read(path: Path, tensor: StoredTensor) -> torch.Tensor:
    """One tensor from the file, unpacked if it is quantised."""
    raw = np.fromfile(path, np.uint8, tensor.num_bytes, offset=tensor.start)
    if raw.size != tensor.num_bytes:
        raise CheckpointError(
            f"reading {path}: the file ends at byte {tensor.start + raw.size}, earlier than when it was opened. "
            "Get it again, and leave it in place while it is loaded."
        )
    if tensor.type.name in _NATIVE:
        numpy_type, torch_type = _NATIVE[tensor.type.name]
        return torch.from_numpy(raw.view(numpy_type)).view(torch_type).view(tensor.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = raw.reshape(-1, tensor.shape[-1] // tensor.type.block * tensor.type.block_bytes)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[tensor.type.name])).view(tensor.shape)
