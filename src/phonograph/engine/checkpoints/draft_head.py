"""DraftCheckpoint: an EAGLE-3 head as SpecForge writes it: a folder with config.json and model.safetensors.

A head that does not fit its target is refused before weights are read, its own or the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from phonograph.engine.checkpoints.draft_files import DraftFiles, DraftTensors, Shape, layer_config
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.decoder import Decoder, LayerWeights
from phonograph.engine.models.draft_head import DraftConfig, DraftHead, DraftWeights
from phonograph.engine.models.draft_layers import DraftLayers
from phonograph.engine.models.rope import rope_table
from phonograph.engine.ops.attention.apart import ApartAttention
from phonograph.engine.ops.kernels import Heads, Norm
from phonograph.engine.ops.matrix import Matrix
from phonograph.errors import CheckpointError, PlanError

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_ALSO_READ = ("draft_vocab_size", "target_hidden_size", "eagle_config")
_UNREAD = ("embed_tokens.weight", "t2d")
"""Tensors that some heads bring and that are not read: token embeddings are the target's, and `d2t` tells the rest."""
_MOST_LAYERS = 16


@dataclass(frozen=True)
class DraftCheckpoint:
    """A folder whose configuration and header are read, and fit the target."""

    files: DraftFiles
    config: DraftConfig
    layers: tuple[str, ...]
    """What the names of each layer's tensors begin with."""
    has_head: bool
    """Whether logits are made by a matrix of its own, or by rows of the target's."""

    @classmethod
    def open(cls, folder: Path, target: ModelConfig) -> DraftCheckpoint:
        """Read and check what is not weights."""
        files = DraftFiles.open(folder, "draft head", "with an EAGLE-3 head as SpecForge writes it")
        _refuse_other_folders(files)
        config = _config(files.fields, target)
        _check_target(files, config, target)
        layers = [f"layers.{index}." for index in range(config.layer.num_layers)]
        if any(name.startswith("midlayer.") for name in files.stored):
            layers[0] = "midlayer."  # as heads of one layer call it
        has_head = "lm_head.weight" in files.stored
        read = [name for name in files.stored if name not in _UNREAD]
        files.expect(_shapes(config, target, layers, has_head=has_head), read, integers=("d2t",))
        ids = _target_ids(files, config)
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < target.vocab:
                files.refuse(f"d2t names the token {token}, of a vocabulary of {target.vocab:,}")
        return cls(files, config, tuple(layers), has_head)

    def load(self, target: Decoder, num_positions: int) -> DraftHead:
        """The head with its weights, in the precision of the target and beside it."""
        files, like = self.files, target.weights.embedding
        found = files.tensors((name for name in files.stored if name not in (*_UNREAD, "d2t")), like.device)
        ids = _target_ids(files, self.config).to(like.device)
        tensors = DraftTensors.of(files, found, target, self.config.layer.rms_eps)
        head = found["lm_head.weight"].to(like.dtype) if self.has_head else target.weights.head.values()[ids]
        weights = DraftWeights(
            embedding=like,
            fc=tensors.matrix("fc"),
            token_norm=tensors.norm(f"{self.layers[0]}input_layernorm"),
            norm=tensors.norm("norm"),
            head=target.kernels.prepare(Matrix(head.contiguous())),
            ids=ids,
            feature_norm=Norm(torch.ones_like(like[0]), self.config.layer.rms_eps)
            if self.config.norms_features
            else None,
        )
        layers = tuple(
            layer_of(tensors, self.config.layer, own, "input_layernorm" if index else "hidden_norm")
            for index, own in enumerate(self.layers)
        )
        rope = rope_table(self.config.layer, num_positions, like.device)
        return DraftHead(
            self.config, weights, DraftLayers(layers, ApartAttention(target.attention), target.kernels, rope)
        )


def _target_ids(files: DraftFiles, config: DraftConfig) -> torch.Tensor:
    """The target's token for each one of the draft vocabulary."""
    return torch.arange(config.vocab) + files.tensors(["d2t"], torch.device("cpu"))["d2t"].long()


def layer_of(tensors: DraftTensors, config: ModelConfig, own: str, input_norm: str) -> LayerWeights:
    """The decoder layer whose tensors have names that begin so."""
    attention = f"{own}self_attn."
    norms = (tensors.norm(f"{attention}{name}_norm") if config.qk_norm else None for name in "qk")
    return LayerWeights(
        input_norm=tensors.norm(f"{own}{input_norm}"),
        qkv=tensors.matrix(*(f"{attention}{name}_proj" for name in "qkv")),
        heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim, *norms),
        out=tensors.matrix(f"{attention}o_proj"),
        mlp_norm=tensors.norm(f"{own}post_attention_layernorm"),
        gate_up=tensors.matrix(f"{own}mlp.gate_proj", f"{own}mlp.up_proj"),
        down=tensors.matrix(f"{own}mlp.down_proj"),
        window=None,
    )


def layer_shapes(config: ModelConfig, own: str, projected: int) -> dict[str, Shape]:
    """The tensors of a decoder layer whose attention projects so many numbers."""
    hidden, q, kv = config.hidden, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (q, projected),
        "self_attn.k_proj.weight": (kv, projected),
        "self_attn.v_proj.weight": (kv, projected),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (config.intermediate, hidden),
        "mlp.up_proj.weight": (config.intermediate, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    if config.qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (q if name == "q" else kv,) for name in "qkv"}
    return {f"{own}{name}": shape for name, shape in shapes.items()}


def _refuse_other_folders(files: DraftFiles) -> None:
    """Refuse what has nothing of a head: a model, or MTP modules."""
    if "eagle_config" in files.fields or not {"fc.weight", "d2t"}.isdisjoint(files.stored):
        return
    has_modules = any(name.endswith(".eh_proj.weight") for name in files.stored)
    instead = "--speculate mtp for its MTP modules" if has_modules else "--speculate ngram"
    raise CheckpointError(
        f"opening the {files.what} {files.folder}: it is no EAGLE-3 head: config.json has no eagle_config, and neither "
        "fc.weight nor d2t is among its tensors. Give --draft the folder of a head (a whole model is none), or use "
        f"{instead}."
    )


def _config(fields: Fields, target: ModelConfig) -> DraftConfig:
    architecture = next(iter(fields.texts("architectures")), "")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"reading {fields.source}: the architecture is {architecture or 'not named'}; a draft head is a "
            f"{_ARCHITECTURES[0]}. Give --draft a head that was trained for EAGLE-3."
        )
    layer = layer_config(fields, "LlamaForCausalLM", "a draft head", _ALSO_READ)
    own, number = fields.section("eagle_config"), target.num_layers
    # Where nothing is said, the layers that EAGLE-3 heads are trained with: early, in the middle and late.
    taps = own.integers("eagle_aux_hidden_state_layer_ids") or (1, number // 2 - 1, number - 4)
    if not own.flag("use_aux_hidden_state", True):
        raise CheckpointError(
            f"reading {fields.source}: use_aux_hidden_state is false, as in EAGLE-1 and 2. Give an EAGLE-3 head."
        )
    return DraftConfig(layer, taps, fields.integer("draft_vocab_size", layer.vocab), own.flag("norms_features", False))


def _check_target(files: DraftFiles, config: DraftConfig, target: ModelConfig) -> None:
    layer = config.layer
    if layer.num_layers > _MOST_LAYERS:
        files.refuse(f"it has {layer.num_layers} layers, and heads of {_MOST_LAYERS} are the largest")
    files.expect_same(layer, target)
    outside = [tap for tap in config.taps if not 0 <= tap < target.num_layers]
    if outside or len(set(config.taps)) < len(config.taps):
        files.refuse(f"it taps the layers {list(config.taps)} of a model that has {target.num_layers}")
    if not 1 <= config.vocab <= target.vocab:
        files.refuse(f"its draft vocabulary is {config.vocab:,}, and the model's is {target.vocab:,}")
    if layer.qkv_bias or layer.o_bias or layer.mlp_bias:
        files.refuse("its projections have biases, which are not built in")


def _shapes(config: DraftConfig, target: ModelConfig, layers: list[str], *, has_head: bool) -> dict[str, Shape]:
    """Every tensor of a head."""
    hidden = config.layer.hidden
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.taps) * target.hidden),
        f"{layers[0]}hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "d2t": (config.vocab,),
    }
    for index, own in enumerate(layers):
        shapes |= layer_shapes(config.layer, own, hidden if index else 2 * hidden)
    return {**shapes, "lm_head.weight": (config.vocab, hidden)} if has_head else shapes


def drafted_for(model: object, speculate: str = "eagle") -> Decoder:
    """The model, if a drafter can read its embeddings and hidden states."""
    if not isinstance(model, Decoder):
        raise PlanError(
            f"--speculate {speculate} needs hidden states and embeddings of layers of our own, and this model has "
            "others. Use --speculate ngram, or --model-impl native."
        )
    return model
