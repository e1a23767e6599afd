"""Registry of architectures: which family each belongs to, and what checkpoints call it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phonograph.engine.json_fields import Fields
from phonograph.engine.models import dense
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.interface import Family
from phonograph.errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """One kind of checkpoint."""

    family: Family
    model_type: str
    """What config.json calls it."""
    gguf: str | None = None
    """What GGUF metadata call it; None where such files have another's name, or none."""
    keeps_state: bool = False
    """Whether its models keep state of a sequence as a whole (`Model.columns`), as recurrent layers do."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(dense, "llama", gguf="llama"),
    "MistralForCausalLM": Architecture(dense, "mistral"),  # in GGUF files it is a `llama` too
    "Qwen2ForCausalLM": Architecture(dense, "qwen2", gguf="qwen2"),
    "Qwen3ForCausalLM": Architecture(dense, "qwen3", gguf="qwen3"),
}
"""By the class name in `transformers`."""


UNCOMPILED: dict[str, str] = {}
"""By the same names, of models in any implementation: why torch.compile is known to fail on one. The plan keeps these
from `tc_piecewise`."""


def family_of(config: ModelConfig) -> Family:
    """The family that a configuration was read by."""
    return ARCHITECTURES[config.architecture].family


def config_from_hf(values: Mapping[str, object], source: str = "config.json") -> ModelConfig:
    """From the content of a Hugging Face config.json, read by the family that it names."""
    fields = Fields(source, values)
    architecture = _hf_architecture(fields)
    return ARCHITECTURES[architecture].family.config_from_hf(fields, architecture)


def config_from_gguf(
    metadata: Mapping[str, object], tensor_names: Collection[str], source: str = "the GGUF metadata"
) -> ModelConfig:
    """From the metadata of a GGUF file, read by the family that they name."""
    fields = Fields(source, metadata)
    known = {entry.gguf: name for name, entry in ARCHITECTURES.items() if entry.gguf is not None}
    name = fields.text("general.architecture")
    if name not in known:
        supported = ", ".join(known)
        raise CheckpointError(
            f"reading {source}: general.architecture is {name!r}; supported are {supported}. Use one of these."
        )
    return ARCHITECTURES[known[name]].family.config_from_gguf(fields, known[name], tensor_names)


def names_known_architecture(fields: Fields) -> bool:
    """Whether a config.json names one of ours, by either of the fields that readers go by."""
    types = {entry.model_type for entry in ARCHITECTURES.values()}
    named = fields.texts("architectures")
    return (named[0] in ARCHITECTURES) if named else fields.text("model_type", "") in types


def _hf_architecture(fields: Fields) -> str:
    by_type = {entry.model_type: name for name, entry in ARCHITECTURES.items()}
    model_type = fields.text("model_type", "")
    named = fields.texts("architectures") or [by_type.get(model_type, "")]
    if named[0] in ARCHITECTURES:
        # transformers goes by model_type, others by architectures: what is read must not depend on the reader.
        if model_type and by_type.get(model_type) != named[0]:
            raise CheckpointError(
                f"reading {fields.source}: architectures says {named[0]}, but model_type is {model_type!r}; "
                "expected that both name the same model. Correct one of them."
            )
        return named[0]
    found = named[0] or fields.text("model_type", "missing")
    raise CheckpointError(
        f"reading {fields.source}: architectures is {found!r}; supported are {', '.join(ARCHITECTURES)}. "
        "Use a model of one of these, or the layers of transformers: --model-impl hf."
    )
