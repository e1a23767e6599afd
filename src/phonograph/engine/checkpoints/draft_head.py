"""DraftCheckpoint: an EAGLE-3 head as SpecForge writes it: a folder with config.json and model.safetensors.

A head that does not fit its target is refused before weights are read, its own or the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open

from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.draft_head import DraftConfig, DraftHead, DraftWeights
from phonograph.engine.models.rope import rope_table
from phonograph.engine.ops.kernels import Heads, Norm
from phonograph.engine.ops.matrix import Matrix
from phonograph.errors import CheckpointError, PlanError

WEIGHTS = "model.safetensors"
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_ALSO_READ = ("draft_vocab_size", "target_hidden_size", "eagle_config")
_UNREAD = ("embed_tokens.weight", "t2d")
"""Tensors that some heads bring and that are not read: token embeddings are the target's, and `d2t` tells the rest."""
_FLOATS = ("F16", "BF16", "F32")
_INTEGERS = ("I32", "I64")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class DraftCheckpoint:
    """A folder whose configuration and header are read, and fit the target."""

    folder: Path
    config: DraftConfig
    has_head: bool
    """Whether logits are made by a matrix of its own, or by rows of the target's."""

    @classmethod
    def open(cls, folder: Path, target: ModelConfig) -> DraftCheckpoint:
        """Read and check what is not weights."""
        for name in ("config.json", WEIGHTS):
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"opening the draft head {folder}: it has no {name}. Give a folder with an EAGLE-3 head as "
                    "SpecForge writes it."
                )
        fields = Fields.from_json(folder / "config.json")
        config = _config(fields, target)
        _check_target(folder, config, target)
        stored = _stored(folder / WEIGHTS)
        has_head = "lm_head.weight" in stored
        _check_tensors(folder, config, target, stored, has_head=has_head)
        return cls(folder, config, has_head)

    def load(self, target: Decoder, num_positions: int) -> DraftHead:
        """The head with its weights, in the precision of the target and beside it."""
        layer, like = self.config.layer, target.weights.embedding
        with safe_open(self.folder / WEIGHTS, framework="pt", device=str(like.device)) as file:
            found = {name: file.get_tensor(name) for name in file.keys() if name not in _UNREAD}  # noqa: SIM118
        ids = torch.arange(self.config.vocab, device=like.device) + found.pop("d2t").long()
        if int(ids.min()) < 0 or int(ids.max()) >= like.shape[0]:
            _refuse(self.folder, f"d2t names the token {int(ids.max())}, of a vocabulary of {like.shape[0]:,}")
        floats = {name: tensor.to(like.dtype) for name, tensor in found.items()}
        for name, tensor in floats.items():
            if not bool(tensor.isfinite().all()):
                _refuse(self.folder, f"{name} has values that are NaN or infinite in {like.dtype}")

        def norm(name: str) -> Norm:
            return Norm(floats[name], layer.rms_eps)

        def matrix(*names: str) -> Matrix:
            return target.kernels.prepare(Matrix(torch.cat([floats[name] for name in names])))

        head = floats["lm_head.weight"] if self.has_head else target.weights.head.values()[ids]
        own, attention = "midlayer.", "midlayer.self_attn."
        weights = DraftWeights(
            embedding=like,
            fc=matrix("fc.weight"),
            token_norm=norm(f"{own}input_layernorm.weight"),
            hidden_norm=norm(f"{own}hidden_norm.weight"),
            qkv=matrix(*(f"{attention}{name}_proj.weight" for name in "qkv")),
            heads=Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim, None, None),
            out=matrix(f"{attention}o_proj.weight"),
            mlp_norm=norm(f"{own}post_attention_layernorm.weight"),
            gate_up=matrix(f"{own}mlp.gate_proj.weight", f"{own}mlp.up_proj.weight"),
            down=matrix(f"{own}mlp.down_proj.weight"),
            norm=norm("norm.weight"),
            head=target.kernels.prepare(Matrix(head.contiguous())),
            ids=ids,
        )
        rope = rope_table(layer, num_positions, like.device)
        return DraftHead(self.config, weights, target.attention, target.kernels, rope)


def _config(fields: Fields, target: ModelConfig) -> DraftConfig:
    architecture = next(iter(fields.texts("architectures")), "")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"reading {fields.source}: the architecture is {architecture or 'not named'}; a draft head is a "
            f"{_ARCHITECTURES[0]}. Give --draft a head that was trained for EAGLE-3."
        )
    layer = ModelConfig.from_hf(fields, "LlamaForCausalLM", also_read=_ALSO_READ)
    own, number = fields.section("eagle_config"), target.num_layers
    # Where nothing is said, the layers that EAGLE-3 heads are trained with: early, in the middle and late.
    taps = own.integers("eagle_aux_hidden_state_layer_ids") or (1, number // 2 - 1, number - 4)
    if not own.flag("use_aux_hidden_state", True):
        raise CheckpointError(
            f"reading {fields.source}: use_aux_hidden_state is false, as in EAGLE-1 and 2. Give an EAGLE-3 head."
        )
    return DraftConfig(layer, taps, fields.integer("draft_vocab_size", layer.vocab), own.flag("norms_features", False))


def _check_target(folder: Path, config: DraftConfig, target: ModelConfig) -> None:
    layer = config.layer
    if layer.num_layers != 1:
        _refuse(folder, f"it has {layer.num_layers} layers, and heads of one are built in")
    for what, found, wanted in (
        ("hidden size", layer.hidden, target.hidden),
        ("vocabulary", layer.vocab, target.vocab),
    ):
        if found != wanted:
            _refuse(folder, f"its {what} is {found:,}, and the model's is {wanted:,}")
    outside = [tap for tap in config.taps if not 0 <= tap < target.num_layers]
    if outside or len(set(config.taps)) < len(config.taps):
        _refuse(folder, f"it taps the layers {list(config.taps)} of a model that has {target.num_layers}")
    if not 1 <= config.vocab <= target.vocab:
        _refuse(folder, f"its draft vocabulary is {config.vocab:,}, and the model's is {target.vocab:,}")
    if layer.qkv_bias or layer.o_bias or layer.mlp_bias:
        _refuse(folder, "its projections have biases, which are not built in")


def _check_tensors(
    folder: Path, config: DraftConfig, target: ModelConfig, stored: Mapping[str, tuple[str, Shape]], *, has_head: bool
) -> None:
    expected = _shapes(config, target, has_head=has_head)
    missing = [name for name in expected if name not in stored]
    strange = [name for name in stored if name not in expected and name not in _UNREAD]
    if missing or strange:
        what = f"{missing[0]} is missing" if missing else f"{strange[0]} is no part of an EAGLE-3 head"
        _refuse(folder, f"{what} ({len(missing)} missing, {len(strange)} unknown)")
    for name, shape in expected.items():
        dtype, found = stored[name]
        if found != shape:
            _refuse(folder, f"{name} has shape {list(found)}, and the configurations make it {list(shape)}")
        if dtype not in (_INTEGERS if name == "d2t" else _FLOATS):
            _refuse(folder, f"{name} is stored as {dtype}")


def _shapes(config: DraftConfig, target: ModelConfig, *, has_head: bool) -> dict[str, Shape]:
    """Every tensor of a head."""
    layer, hidden = config.layer, config.layer.hidden
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.taps) * target.hidden),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (layer.intermediate, hidden),
        "midlayer.mlp.up_proj.weight": (layer.intermediate, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, layer.intermediate),
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "d2t": (config.vocab,),
    }
    return {**shapes, "lm_head.weight": (config.vocab, hidden)} if has_head else shapes


def _stored(path: Path) -> dict[str, tuple[str, Shape]]:
    """Name → (format, shape), from the header."""
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"reading {path}: {error}. The file is cut short or damaged: get it again.") from None


def _refuse(folder: Path, problem: str) -> NoReturn:
    raise CheckpointError(
        f"the draft head {folder} does not fit: {problem}. Give --draft a head that was trained for this model."
    )


def drafted_for(model: object) -> Decoder:
    """The model, if a head can read its embeddings and hidden states."""
    if not isinstance(model, Decoder):
        raise PlanError(
            "--speculate eagle needs hidden states and embeddings of layers of our own, and this model has others. Use "
            "--speculate ngram, or --model-impl native."
        )
    return model
