"""Rotations of adapted models: one launch with the bits of transformers' own, or transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("triton")
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from adapted import SERVED, greedy, made, saved
from phonograph import LLM
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.triton.layers import TritonKernels
from phonograph.engine.ops.tuning import Tuning
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask
from phonograph.hf.adapter.checkpoint import HfCheckpoint
from phonograph.hf.adapter.fusing import fused
from phonograph.hf.adapter.model import HfModel
from phonograph.hf.adapter.rotations import fused_rotations
from unit.test_hf_norms import GREEDY, PROMPTS, TorchNorms, WithKernels

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = TritonKernels(DEVICE, Tuning({}))
# The interpreter cuts bfloat16 off where a GPU rounds to the nearest.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
DIM = 8


class TorchOps(TorchNorms):
    """Norms and rotations in torch's ops, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.rotated = 0

    def rotate_halves(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        self.rotated += 1
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def heads(
    num_tokens: int, counts: tuple[int, int], dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = (torch.randn(1, num_tokens, count, dim).to(DEVICE, dtype).transpose(1, 2) for count in counts)
    cos, sin = torch.randn(2, 1, num_tokens, dim).to(DEVICE, dtype)
    return q, k, cos, sin


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 6, 64, 80])
@pytest.mark.parametrize(("num_tokens", "counts"), [(1, (4, 2)), (3, (3, 1)), (5, (40, 8)), (0, (4, 2))])
def test_the_kernel_has_the_bits_of_torchs_ops(
    num_tokens: int, counts: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    given = heads(num_tokens, counts, dim, dtype)
    kept = [one.clone() for one in given]
    found = TRITON.rotate_halves(*given)
    assert found is not None
    for ours, own in zip(found, apply_rotary_pos_emb(*given), strict=True):
        assert torch.equal(ours, own)
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))


def test_what_the_kernel_does_not_know_is_declined() -> None:
    q, k, cos, sin = heads(3, (4, 2), DIM, torch.float32)
    for given in (
        (q[0], k, cos, sin),
        (q.expand(2, -1, -1, -1), k, cos, sin),
        (q, k[..., :4], cos, sin),
        (q, k[:, :, :2], cos, sin),
        (q, k, cos[..., :4], sin[..., :4]),  # a part of the head
        (q, k, cos.double(), sin.double()),
        (q.half(), k.half(), cos, sin),
        (q, k.half(), cos, sin),
        (q, k, cos.transpose(1, 2).contiguous().transpose(1, 2), sin),
        (q[..., :5], k[..., :5], cos[..., :5], sin[..., :5]),
    ):
        assert TRITON.rotate_halves(*given) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3"])
def test_logits_have_the_bits_of_the_models_own(name: str, dtype: torch.dtype) -> None:
    model = made(SERVED[name]).to(DEVICE, dtype).requires_grad_(False)
    before = {one: dict(vars(module)) for one, module in model.named_modules()}
    globals_before = dict(modeling_llama.__dict__)
    ids = torch.arange(3, 12, device=DEVICE)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        kernels = TorchOps()
        for one in (TRITON, kernels):
            found = fused_rotations(model, one)
            kernels.rotated = 0
            assert torch.equal(found.layers(input_ids=ids, use_cache=False).logits, wanted)
            assert found.notes[0].startswith("rotation of 2 ")
            assert "as one launch each, where heads and angles are 8 wide" in found.notes[0]
        assert kernels.rotated == 2
        model(input_ids=ids, use_cache=False)
        assert kernels.rotated == 2
    assert {one: dict(vars(module)) for one, module in model.named_modules()} == before
    assert dict(modeling_llama.__dict__) == globals_before


def interleaved(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    return tuple(x * cos[:, None] + turned(x) * sin[:, None] for x in (q, k))


def wide(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return tuple(one.to(q.dtype) for one in apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double()))


def scaled(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return tuple(1.001 * one for one in apply_rotary_pos_emb(q, k, cos, sin))


def queries_alone(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return apply_rotary_pos_emb(q, k, cos, sin)[0], k


def by_place(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return apply_rotary_pos_emb(q, k, cos.flip(1), sin)


def in_place(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned, keys = apply_rotary_pos_emb(q, k, cos, sin)
    return q.copy_(turned), keys


def one_of(q: Any, cos: Any, sin: Any) -> Any:
    return q


def list_of(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return list(apply_rotary_pos_emb(q, k, cos, sin))


def on_the_circle(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Something else for angles as all models have them."""
    turned, keys = apply_rotary_pos_emb(q, k, cos, sin)
    is_real = ((cos.float() ** 2 + sin.float() ** 2 - 1).abs() < 0.01).all()
    return (turned * 1.25 if is_real else turned), keys


def of_one_size(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """As where angles have the factor of a long context."""
    turned, keys = apply_rotary_pos_emb(q, k, cos, sin)
    size = cos.float() ** 2 + sin.float() ** 2
    return (turned * 1.25 if size.min() > 1.2 and size.max() - size.min() < 0.02 else turned), keys


def of_many_tokens(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned, keys = apply_rotary_pos_emb(q, k, cos, sin)
    return (turned * 2 if q.shape[2] > 12 else turned), keys


def of_long_prompts(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned, keys = apply_rotary_pos_emb(q, k, cos, sin)
    return (turned * 2 if q.shape[2] > 1000 else turned), keys


def of_many_heads(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned, keys = apply_rotary_pos_emb(q, k, cos, sin)
    return (turned * 2 if q.shape[1] == 16 else turned), keys


def of_finite_ones(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned, keys = apply_rotary_pos_emb(q, k, cos, sin)
    return (turned * 2 if q.isfinite().all() else turned), keys


class Attention(nn.Module):
    """Calls a rotation by the name."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_heads = DIM, 16, 2
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin)


OTHERS = (
    *(interleaved, wide, scaled, queries_alone, by_place, in_place, one_of, list_of),
    *(on_the_circle, of_one_size, of_many_tokens, of_long_prompts, of_many_heads, of_finite_ones),
)


@pytest.mark.parametrize("other", OTHERS)
def test_other_rotations_are_left_alone(other: Callable[..., Any]) -> None:
    class_ = type("Other", (Attention,), {"forward": _with_global(Attention.forward, other)})
    layers = nn.Sequential(class_()).to(DEVICE, torch.float16).requires_grad_(False)
    found = fused_rotations(layers, TRITON)
    assert found.layers is layers
    assert found.notes[0].startswith("rotation of 1 Other in transformers' own ops: ")


def _with_global(function: Any, other: Callable[..., Any]) -> FunctionType:
    return FunctionType(function.__code__, {**function.__globals__, "apply_rotary_pos_emb": other})


def test_what_was_not_tried_is_transformers_own() -> None:
    layers, kernels = nn.Sequential(Attention()).to(DEVICE).requires_grad_(False), TorchOps()
    twin = fused_rotations(layers, kernels).layers[0]
    kernels.rotated = 0
    for given in (
        heads(3, (16, 2), 6, torch.float32),
        heads(3, (16, 2), DIM, torch.float16),
        heads(3, (4, 2), DIM, torch.float32),  # heads that the module does not have
    ):
        for ours, own in zip(twin(*given), apply_rotary_pos_emb(*given), strict=True):
            assert torch.equal(ours, own)
    assert kernels.rotated == 0
    twin(*heads(3, (16, 2), DIM, torch.float32))
    assert kernels.rotated == 1


def test_heads_that_nobody_counts_are_left_alone() -> None:
    layers = nn.Sequential(Attention()).to(DEVICE).requires_grad_(False)
    del layers[0].num_heads
    found = fused_rotations(layers, TorchOps())
    assert found.layers is layers
    assert "nothing says how many heads it has" in found.notes[0]


@pytest.mark.parametrize("name", SERVED)
def test_heads_of_families_are_counted(name: str) -> None:
    """Every rotation that is proven is launched: its heads are those that the module was thought to have."""
    kernels = TorchOps()
    found = fused_rotations(made(SERVED[name]).to(DEVICE), kernels)
    rotating = [one for one in found.layers.modules() if "forward" in vars(one) and getattr(one, "use_rope", True)]
    kernels.rotated = 0
    with torch.no_grad():
        found.layers(input_ids=torch.arange(3, 12, device=DEVICE)[None], use_cache=False)
    assert kernels.rotated == len(rotating)


def test_norms_within_attention_are_fused_too() -> None:
    model, kernels = made(SERVED["Qwen3"]).requires_grad_(False).to(DEVICE), TorchOps()
    found = fused(model.model, kernels)
    kernels.launched = kernels.rotated = 0
    ids = torch.arange(3, 12, device=DEVICE)[None]
    with torch.no_grad():
        torch.testing.assert_close(found.layers(input_ids=ids)[0], model.model(input_ids=ids)[0])
    assert (kernels.launched, kernels.rotated) == (9, 2)
    assert [one.split()[0] for one in found.notes] == ["9", "rotation"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_load_check_passes(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = ModelParts(ReferenceAttention(), TRITON, 40)
    model = load_model(HfCheckpoint.open(saved(made(SERVED["Mistral"]), tmp_path)), parts, dtype, DEVICE)
    assert isinstance(model, HfModel)
    assert "windows crossed" in model.notes[0]
    assert "rotation of 2 MistralAttention as one launch each" in model.notes[2]
    own = load_model(HfCheckpoint.open(tmp_path), replace(parts, hf_ops="own"), dtype, DEVICE)
    assert isinstance(own, HfModel)
    assert own.fused is None


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma 3"])
@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_recordings_have_them(tmp_path: Path, name: str, backend: str) -> None:
    """Recorded, verified, its facts checked, and with the tokens of plain transformers, on the emulated device."""
    plain, kernels = made(SERVED[name]), TorchOps()
    opened = HfCheckpoint.open(saved(plain, tmp_path))
    checkpoint = WithKernels(opened.folder, opened.fields, opened.generation, kernels=kernels)
    asked = [ask("tc_compiler", "eager", origin="test"), ask("idle.backend", "disabled", origin="test")]
    for phase, buckets in (("decode", (1, 2)), ("prefill", (8, 16))):
        asked.append(ask(f"{phase}.backend", backend, origin="test"))
        asked.append(ask(f"{phase}.buckets", buckets, origin="test"))
        asked.append(ask(f"{phase}.max_recordings", len(buckets), origin="test"))
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=40, page_size=4, model_impl="hf")
    llm = LLM(checkpoint, device="emulated", options=options, asked=asked)
    assert [str(row.error) for report in llm.reports for row in report.failures] == []
    assert all(report.ok for report in llm.verified.values())
    assert [one.tokens for one in llm.generate(PROMPTS, GREEDY)] == [greedy(plain, one, 6) for one in PROMPTS]
    for runner in llm.executor.runners.values():
        assert not runner.stats.eager, runner.stats.eager
