"""MtpCheckpoint: modules that predict further tokens, by the names that DeepSeek-V3 has for them.

A folder with config.json (`num_nextn_predict_layers`) and safetensors; of their tensors those are read that belong to a
layer with `eh_proj`. Modules that do not fit the target are refused before weights are read, theirs or the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from phonograph.engine.checkpoints.draft_files import DraftFiles, DraftTensors, Shape, layer_config
from phonograph.engine.checkpoints.draft_head import layer_of, layer_shapes
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.draft_layers import DraftLayers
from phonograph.engine.models.mtp import MtpModule, MtpModules
from phonograph.engine.models.registry import ARCHITECTURES
from phonograph.engine.models.rope import rope_table
from phonograph.engine.ops.attention.apart import ApartAttention
from phonograph.engine.ops.matrix import Matrix
from phonograph.errors import CheckpointError

_NUMBER = "num_nextn_predict_layers"
_FUSES = re.compile(r"(model\.layers\.(\d+)\.)eh_proj\.weight")
_SUFFIXES = ("NextN", "MTP")
"""What architectures are called that are modules alone."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"


@dataclass(frozen=True)
class MtpCheckpoint:
    """A folder whose configuration and header are read, and fit the target."""

    files: DraftFiles
    config: ModelConfig
    modules: tuple[str, ...]
    """What the names of each module's tensors begin with."""
    tap: int

    @classmethod
    def open(cls, folder: Path, target: ModelConfig) -> MtpCheckpoint:
        """Read and check what is not weights."""
        files = DraftFiles.open(folder, "MTP modules", "with config.json and safetensors that hold MTP modules")
        config, number = _config(files.fields), files.fields.integer(_NUMBER)
        files.expect_same(config, target)
        found = [match for name in files.stored if (match := _FUSES.fullmatch(name))]
        modules = [match[1] for match in sorted(found, key=lambda match: int(match[2]))]
        if len(modules) != number or not modules:
            files.refuse(f"{_NUMBER} is {number}, and {len(modules)} of its layers have an eh_proj")
        if config.o_bias or config.mlp_bias:
            files.refuse("projections after attention have biases, which are not built in")
        if config.sliding_layers:
            files.refuse(f"its layers have a sliding window of {config.sliding_window}, which is not built in")
        read = [name for own in modules for name in files.stored if name.startswith(own)]
        read = [name for name in read if not name.endswith(f".{_EMBEDDING}")]
        files.expect(_shapes(files, config, modules), read)
        return cls(files, config, tuple(modules), target.num_layers - 1)

    def load(self, target: Decoder, num_positions: int, most: int) -> MtpModules:
        """The modules with their weights, `most` of them, in the precision of the target and beside it."""
        files, config, like, used = self.files, self.config, target.weights.embedding, self.modules[:most]
        names = [name for own in used for name in _shapes(files, config, [own])]
        tensors = DraftTensors.of(files, files.tensors(names, like.device), target, config.rms_eps)
        made = tuple(
            MtpModule(
                token_norm=tensors.norm(f"{own}enorm"),
                hidden_norm=tensors.norm(f"{own}hnorm"),
                fuse=tensors.matrix(f"{own}eh_proj"),
                norm=tensors.norm(f"{own}shared_head.norm"),
                head=_head(tensors.floats.get(f"{own}{_HEAD}"), target),
            )
            for own in used
        )
        layers = tuple(layer_of(tensors, config, own, "input_layernorm") for own in used)
        rope = rope_table(config, num_positions, like.device)
        drafting = DraftLayers(layers, ApartAttention(target.attention), target.kernels, rope)
        return MtpModules(like, target.weights.norm, self.tap, made, drafting)


def has_modules(folder: Path) -> bool:
    """Whether a drafter's folder says that it has modules, and no head."""
    path = folder / "config.json"
    return path.is_file() and _NUMBER in Fields.from_json(path)


def _head(stored: torch.Tensor | None, target: Decoder) -> Matrix:
    """The target's where none is stored, or a copy of it."""
    if stored is None or torch.equal(stored, target.weights.head.values()):
        return target.weights.head
    return target.kernels.prepare(Matrix(stored))


def _config(fields: Fields) -> ModelConfig:
    named = next(iter(fields.texts("architectures")), "")
    architecture = named
    for suffix in _SUFFIXES:
        architecture = architecture.removesuffix(suffix)
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"reading {fields.source}: the architecture is {named or 'not named'}; modules are built in whose layers "
            f"are those of {', '.join(ARCHITECTURES)}. Give --draft such modules, or use --speculate ngram."
        )
    if _NUMBER not in fields:
        raise CheckpointError(
            f"reading {fields.source}: it has no {_NUMBER}. Give --draft a folder with MTP modules, or use --speculate "
            "eagle for an EAGLE-3 head."
        )
    return layer_config(fields, architecture, "MTP modules", (_NUMBER,))


def _shapes(files: DraftFiles, config: ModelConfig, modules: list[str]) -> dict[str, Shape]:
    """Every tensor of these modules; a head is one where it is stored."""
    hidden, shapes = config.hidden, dict[str, Shape]()
    for own in modules:
        shapes |= {f"{own}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{own}eh_proj.weight": (hidden, 2 * hidden)} | layer_shapes(config, own, hidden)
        if f"{own}{_HEAD}" in files.stored:
            shapes[f"{own}{_HEAD}"] = (config.vocab, hidden)
    return shapes
