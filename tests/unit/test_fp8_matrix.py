"""Matrices stored in float8 with a scale for each row, which only this test has: they give what their values give.

Files of the package that it touches: none. As part of the package it would touch three: engine/models/features.py,
which lets such a configuration through, engine/checkpoints/safetensors.py, which reads the bytes and the scales, and
engine/models/tensors.py, where scales get their role and bytes stay bytes. Kernels that are good at them would say so
in `takes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models import dense, registry
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.models.tensors import ModelWeights
from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.projections import linear, norm_gated, norm_linear
from phonograph.graphs.planning.settings import ask

FLOAT8 = torch.float8_e4m3fn
PROMPTS = ([5, 9, 100, 7, 31, 8, 77], [3, 4])


def in_float8(matrix: Matrix) -> Matrix:
    """The farthest value of a row is the largest of float8."""
    scales = matrix.data.abs().amax(1, keepdim=True).clamp_min(1e-12) / torch.finfo(FLOAT8).max
    return Matrix((matrix.data / scales).to(FLOAT8), matrix.bias, scales, ("F8_E4M3",))


def unpacked(matrix: Matrix) -> Matrix:
    """The values of the same bytes, in float32."""
    return Matrix(in_float8(matrix).values(), matrix.bias)


@dataclass(frozen=True)
class Family:
    """The dense family, with other matrices."""

    change: Callable[[Matrix], Matrix]
    tensors = staticmethod(dense.tensors)
    config_from_hf = staticmethod(dense.config_from_hf)
    config_from_gguf = staticmethod(dense.config_from_gguf)

    def build(self, config: ModelConfig, weights: ModelWeights, parts: ModelParts) -> Decoder:
        matrices = {place: self.change(matrix) for place, matrix in weights.matrices.items()}
        return dense.build(config, replace(weights, matrices=matrices), parts)


@given(rows=st.integers(1, 20), columns=st.integers(1, 40), num_tokens=st.integers(0, 5), with_bias=st.booleans())
def test_the_reference_kernels_give_what_the_values_give(
    rows: int, columns: int, num_tokens: int, with_bias: bool
) -> None:
    plain = Matrix(torch.randn(2 * rows, columns), torch.randn(2 * rows) if with_bias else None)
    stored, values, kernels = in_float8(plain), unpacked(plain), ReferenceKernels()
    assert (stored.data.dtype, stored.dtype) == (FLOAT8, torch.float32)
    x, delta = torch.randn(2, num_tokens, columns)
    norm = Norm(torch.rand(columns), 1e-5)
    assert torch.equal(linear(kernels, x, stored), linear(kernels, x, values))
    for fused in (norm_linear, norm_gated):
        found, wanted = fused(kernels, x, delta, norm, stored), fused(kernels, x, delta, norm, values)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("device", "prefill"), [("cpu", None), ("emulated", "full"), ("emulated", "breakable")])
def test_an_engine_serves_them(device: str, prefill: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly with the C++ kernels, which decline them; recorded with the reference kernels."""
    config = replace(SHAPES["tiny"], architecture="Float8ForCausalLM", dtype=torch.float32, o_bias=True, mlp_bias=True)
    params, found = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1), []
    for change in (in_float8, unpacked):
        entry = registry.Architecture(Family(change), "float8")
        monkeypatch.setitem(registry.ARCHITECTURES, config.architecture, entry)
        asked = [] if prefill is None else [ask("prefill.backend", prefill, origin="test")]
        options = EngineOptions(max_seqs=2, max_tokens=16, max_len=64, cache_tokens=256, page_size=4)
        llm = LLM(RandomCheckpoint(config, 1), device=device, options=options, asked=asked)
        assert {matrix.is_plain for matrix in llm.executor.model.matrices} == {change is unpacked}
        found.append([(done.tokens, done.logprobs) for done in llm.generate(PROMPTS, params)])
        if device == "emulated":
            assert llm.executor.runners["decode"].stats.eager.total() == 0
    assert found[0] == found[1]
