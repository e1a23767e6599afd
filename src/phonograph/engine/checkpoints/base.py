"""What every checkpoint offers: its tensors' names and shapes before any data is read, then the data, one by one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from phonograph.engine.models.config import ModelConfig
from phonograph.engine.request import SamplingParams
from phonograph.engine.text.chat import ChatTemplate
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import CheckpointError

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

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
        """What errors and logs call it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def sampling(self) -> SamplingParams:
        """What its publishers recommend; everything else is left open."""

    @property
    def names(self) -> Mapping[str, TensorInfo]:
        """Every tensor that `tensors` gives, under the names that `transformers` uses for Llama. Reads no data."""

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Read the tensors one by one onto a device, in the order of the file; none is kept."""

    def tokenizer(self) -> Tokenizer:
        """Made anew on every call."""

    def chat_template(self) -> ChatTemplate:
        """Made anew on every call."""


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a model of this configuration consists of."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab, config.hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab, config.hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = [
        ("self_attn.q_proj", heads, config.hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_heads, config.hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_heads, config.hidden, config.qkv_bias),
        ("self_attn.o_proj", config.hidden, heads, config.o_bias),
        ("mlp.gate_proj", config.intermediate, config.hidden, config.mlp_bias),
        ("mlp.up_proj", config.intermediate, config.hidden, config.mlp_bias),
        ("mlp.down_proj", config.hidden, config.intermediate, config.mlp_bias),
    ]
    shapes: dict[str, Shape] = {"input_layernorm.weight": (config.hidden,)}
    for name, num_out, num_in, has_bias in projections:
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (config.hidden,)
    return shapes


def check_tensors(source: str, config: ModelConfig, found: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that are missing, unexpected, or of another shape than the configuration says."""
    if config.num_layers > len(found):
        raise CheckpointError(
            f"checking {source}: the configuration says {config.num_layers} layers, but there are {len(found)} tensors "
            "in all. The weights and the configuration don't belong together: get the checkpoint again."
        )
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
