"""Checkpoints: a folder of safetensors, a GGUF file, the default model, or random numbers for a shape."""

from __future__ import annotations

from pathlib import Path

from phonograph.engine.checkpoints.base import Checkpoint, TensorInfo, check_tensors, expected_shapes
from phonograph.engine.checkpoints.default import default_model
from phonograph.engine.checkpoints.gguf import GgufCheckpoint
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.checkpoints.safetensors import SafetensorsCheckpoint
from phonograph.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "RandomCheckpoint",
    "SafetensorsCheckpoint",
    "TensorInfo",
    "check_tensors",
    "default_model",
    "expected_shapes",
    "open_checkpoint",
]


def open_checkpoint(path: str | Path | None = None) -> Checkpoint:
    """Open a folder or a GGUF file, or the default model where none is named; reads and checks headers only."""
    found = default_model() if path is None else Path(path).expanduser()
    if found.is_dir():
        return SafetensorsCheckpoint.open(found)
    if found.is_file() and found.suffix == ".gguf":
        return GgufCheckpoint.open(found)
    what = "is a file, but no .gguf" if found.is_file() else "does not exist"
    raise CheckpointError(
        f"opening the checkpoint {path}: it {what}; expected a folder with config.json and safetensors, or a .gguf "
        "file. Download it first: names on the Hugging Face Hub are not looked up."
    )
