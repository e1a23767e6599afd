"""Models of transformers over the Triton kernel: on a GPU, or interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paged  # has Triton interpreted where there is no GPU: before anything imports it

pytest.importorskip("triton")
pytest.importorskip("transformers")
from adapted import SERVED, made, saved
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.ops.attention.triton import TritonAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.hf.adapter.model import HfModel


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss", "DeepSeek-V3", "Granite"])
def test_the_kernel_passes_the_check_of_loading(tmp_path: Path, name: str) -> None:
    """Windows, soft caps, sinks, scales, narrow values, and queries whose heads lie apart."""
    parts = ModelParts(TritonAttention(paged.LAUNCHES), ReferenceKernels(), 40)
    checkpoint = open_checkpoint(saved(made(SERVED[name]), tmp_path), "hf")
    model = load_model(checkpoint, parts, torch.float32, paged.DEVICE)
    assert isinstance(model, HfModel)
    assert "checked against the model's own eager attention" in model.notes[0]
