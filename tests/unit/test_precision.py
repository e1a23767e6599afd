"""Which dtype a model computes in: by what is stored, by the device, and by what a start-up pass shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import pytest
import torch

from phonograph import LLM
from phonograph.devices import open_device
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.checkpoints.base import TensorInfo, expected_shapes
from phonograph.engine.checkpoints.loading import load_model, load_weights
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.models.registry import family_of
from phonograph.engine.models.value_range import ValueRange, value_range
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.options import EngineOptions
from phonograph.engine.precision import MOST_IN_FLOAT16, precision_for
from phonograph.errors import PlanError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class _Stored(RandomCheckpoint):
    """As if the file had its matrices in this form; norms are always F32."""

    form: str = "BF16"

    @property
    def names(self) -> dict[str, TensorInfo]:
        forms = {"BF16": (BF16, 2.0), "F16": (F16, 2.0), "F32": (F32, 4.0), "F64": (torch.float64, 8.0)}
        dtype, size = forms.get(self.form, (F32, 0.625))
        return {
            name: TensorInfo(shape, F32, "F32", prod(shape) * 4)
            if "norm" in name
            else TensorInfo(shape, dtype, self.form, int(prod(shape) * size))
            for name, shape in expected_shapes(self.config).items()
        }


@pytest.mark.parametrize(
    ("form", "dtype", "residual", "fallback"),
    [
        ("BF16", BF16, BF16, None),
        ("F16", F16, F32, BF16),
        ("F32", F32, F32, None),
        ("F64", F32, F32, None),
        ("Q4_1", F16, F32, BF16),
        ("Q8_0", F16, F32, BF16),
    ],
)
def test_the_default_on_a_gpu_is_what_is_stored(
    form: str, dtype: torch.dtype, residual: torch.dtype, fallback: torch.dtype | None
) -> None:
    checkpoint = _Stored(SHAPES["tiny"], form=form)
    found = precision_for(checkpoint, EngineOptions(), GPU)
    assert (found.dtype, found.residual, found.fallback) == (dtype, residual, fallback)
    assert form in str(found)
    on_cpu = precision_for(checkpoint, EngineOptions(), CPU)
    assert (on_cpu.dtype, on_cpu.residual, on_cpu.fallback) == (F32, F32, None)


def test_what_is_asked_for_is_taken_and_never_tried_first() -> None:
    checkpoint = _Stored(SHAPES["tiny"], form="Q4_1")
    for options, dtype, residual in (
        (EngineOptions(dtype=BF16), BF16, BF16),
        (EngineOptions(dtype=F16), F16, F32),
        (EngineOptions(dtype=F16, residual_dtype=F16), F16, F16),
        (EngineOptions(dtype=BF16, residual_dtype=F32), BF16, F32),
    ):
        found = precision_for(checkpoint, options, GPU)
        assert (found.dtype, found.residual, found.fallback) == (dtype, residual, None)
    with pytest.raises(PlanError, match="residual_dtype bfloat16 with weights in float16"):
        precision_for(checkpoint, EngineOptions(dtype=F16, residual_dtype=BF16), GPU)
    with pytest.raises(PlanError, match="dtype is one of"):
        EngineOptions(dtype=torch.int8)


@pytest.mark.parametrize("largest", [MOST_IN_FLOAT16, float("inf"), 1e5])
def test_values_that_are_too_large_for_float16_lead_to_bfloat16(largest: float) -> None:
    planned = precision_for(_Stored(SHAPES["tiny"], form="Q4_1"), EngineOptions(), GPU)
    kept = planned.after(ValueRange(512, MOST_IN_FLOAT16 - 1, 3))
    assert (kept.dtype, kept.residual, kept.fallback) == (F16, F32, None)
    assert "layer 3" in str(kept)
    left = planned.after(ValueRange(512, largest, 3))
    assert (left.dtype, left.residual, left.fallback) == (BF16, F32, None)
    assert "layer 3" in str(left)


def _model(factor: float, layer: int, dtype: torch.dtype, part: str = "gate_up") -> Model:
    config = SHAPES["tiny"]
    weights = load_weights(RandomCheckpoint(config), dtype, CPU)
    for name in ("gate_up", "down"):
        if name == "down" or part == "gate_up":
            weights.matrices[f"layers.{layer}.{name}"].data.mul_(factor)
    return family_of(config).build(config, weights, ModelParts(ReferenceAttention(), ReferenceKernels(), 1024, F32))


def test_a_pass_finds_the_largest_value_and_its_layer() -> None:
    plain = value_range(_model(1.0, 1, F16), open_device("cpu"))
    assert plain.num_tokens == 512
    assert 0 < plain.largest < 100
    scaled = value_range(_model(64.0, 1, F16), open_device("cpu"))
    assert scaled.layer == 1
    assert scaled.largest > 100 * plain.largest
    broken = value_range(_model(float("nan"), 1, F16), open_device("cpu"))
    assert broken.largest == float("inf")


def test_what_is_added_to_a_residual_stream_in_float32_may_be_of_any_size() -> None:
    loud = _model(3e4, 0, F16, part="down")
    plain = value_range(_model(1.0, 0, F16), open_device("cpu"))
    assert value_range(loud, open_device("cpu")).largest < 4 * plain.largest


def test_the_default_model_fits_into_float16() -> None:
    checkpoint = open_checkpoint(None)
    planned = precision_for(checkpoint, EngineOptions(), GPU)
    model = load_model(checkpoint, ModelParts(ReferenceAttention(), ReferenceKernels(), 512, F32), F16, CPU)
    found = planned.after(value_range(model, open_device("cpu")))
    assert found.dtype == F16, str(found)


def test_an_engine_whose_values_leave_float16_serves_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on a CPU: the weights are loaded a second time, and `explain` says why."""

    @dataclass(frozen=True)
    class Loud(_Stored):
        def tensors(self, device: torch.device | str = "cpu"):  # type: ignore[no-untyped-def]
            for name, tensor in super().tensors(device):
                yield name, tensor * 300 if "gate_proj" in name or "up_proj" in name else tensor

    checkpoint = Loud(replace(SHAPES["tiny"], dtype=F32), form="F32")
    planned = precision_for(_Stored(SHAPES["tiny"], form="Q4_1"), EngineOptions(), GPU)
    monkeypatch.setattr("phonograph.engine.llm.precision_for", lambda *_: planned)
    llm = LLM(checkpoint, device="cpu", options=EngineOptions(max_seqs=1, max_len=64, kernels="reference"))
    assert llm.precision.dtype == BF16
    assert llm.executor.model.dtype == BF16
    assert "precision: bfloat16 with a float32 residual stream" in llm.explain()
