"""The kernels for the CPU against the torch reference, packed matrices, and what `explain` says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph import PlanError
from phonograph.engine.attention.base import PagedCache, Queries
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.kernels.base import Angles, Heads, Norm
from phonograph.engine.kernels.cpu import CpuKernels
from phonograph.engine.kernels.packing import BLOCK, Int4Matrix, OneDnnMatrix
from phonograph.engine.kernels.reference import ReferenceKernels
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.request import SamplingParams
from phonograph.graphs.config import ask

REFERENCE = ReferenceKernels()
TOKENS = [0, 1, 3, 4, 16, 17, 31, 32]
"""On both sides of every bound."""

needs_onednn = pytest.mark.skipif(bool(OneDnnMatrix.obstacle()), reason=OneDnnMatrix.obstacle())
needs_int4 = pytest.mark.skipif(bool(Int4Matrix.obstacle()), reason=Int4Matrix.obstacle())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def prepared(*matrices: torch.Tensor, **options: Any) -> CpuKernels:
    kernels = CpuKernels(**options)
    for matrix in matrices:
        kernels.prepare(matrix)
    return kernels


def in_4_bits(rows: int, columns: int) -> torch.Tensor:
    """A matrix such as Q4_1 unpacks to: steps and offsets in float16, every block with its least and most level."""
    blocks = rows, columns // BLOCK
    levels = torch.randint(0, 16, (*blocks, BLOCK))
    levels[..., 3], levels[..., 7] = 0, 15
    step, least = (torch.rand(*blocks, 1) + 0.1).half().float(), torch.randn(*blocks, 1).half().float()
    return (levels * step + least).view(rows, columns)


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# -- arithmetic -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_number_of_tokens_gives_what_the_reference_gives(
    num_tokens: int, with_delta: bool, with_bias: bool
) -> None:
    x, delta = torch.randn(num_tokens, 96), torch.randn(num_tokens, 96) if with_delta else None
    weight, gate_up, bias = torch.randn(80, 96), torch.randn(160, 96), torch.randn(80) if with_bias else None
    norm, kept = Norm(torch.rand(96), 1e-5), x.clone()
    kernels = prepared(weight, gate_up)
    near(kernels.add_norm(x, delta, norm), REFERENCE.add_norm(x, delta, norm))
    wanted = REFERENCE.norm_linear(x, delta, norm, weight, bias)
    near(kernels.norm_linear(x, delta, norm, weight, bias), wanted, 1e-4)
    near(kernels.norm_gated(x, delta, norm, gate_up), REFERENCE.norm_gated(x, delta, norm, gate_up), 1e-4)
    near(kernels.linear(x, weight), REFERENCE.linear(x, weight), 1e-4)
    assert torch.equal(x, kept), "the residual stream that went in is still the caller's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 16), (9, 3, 64), (2, 2, 6)], ids=str)
def test_rotate_and_store(shape: tuple[int, int, int], with_norm: bool, dtype: torch.dtype) -> None:
    num_heads, kv_heads, head_dim = shape
    norms = [Norm(torch.rand(head_dim).to(dtype), 1e-6) if with_norm else None for _ in "qk"]
    heads = Heads(num_heads, kv_heads, head_dim, *norms)
    qkv = torch.randn(5, (num_heads + 2 * kv_heads) * head_dim).to(dtype)
    table = torch.tensor([[0, 0], [3, 1], [2, 5], [4, 6]], dtype=torch.int32)
    queries = Queries(torch.tensor([1, 2, 3, 3, 0]), torch.tensor([0, 7, 3, 4, 0]), table, one_per_sequence=False)
    angles = Angles(torch.randn(8, head_dim), torch.randn(8, head_dim))
    found, wanted = (
        (kernels.rotate_and_store(qkv, heads, kernels.places(angles, queries, 4), cache, 1), cache.keys, cache.values)
        for kernels in (CpuKernels(), REFERENCE)
        for cache in [PagedCache.empty(2, 7, 4, kv_heads, head_dim, dtype=dtype, device=torch.device("cpu"))]
    )
    near(found, wanted, 1e-5 if dtype == torch.float32 else 2e-2)
    assert wanted[1][1].any()


def test_other_precisions_are_left_as_they_are() -> None:
    weight, x, norm = torch.randn(32, 64).half(), torch.randn(8, 64).half(), Norm(torch.rand(64).half(), 1e-5)
    kernels = prepared(weight, int4=True)
    assert torch.equal(kernels.linear(x, weight), REFERENCE.linear(x, weight))
    assert torch.equal(kernels.add_norm(x, x, norm)[0], REFERENCE.add_norm(x, x, norm)[0])
    assert all(note.startswith("0 of 1 ") for note in kernels.notes)


# -- packed matrices ------------------------------------------------------------------------------------------


@needs_onednn
def test_matrices_are_packed_as_long_as_the_bytes_last() -> None:
    first, second, third = torch.randn(16, 32), torch.randn(64, 32), torch.randn(16, 32)
    kernels = prepared(first, second, third, most_bytes=2 * first.nbytes)
    assert kernels.notes == (
        "2 of 3 matrices, for 4 to 31 tokens, are packed for oneDNN; float32 ones are, up to 0.0 GiB",
    )
    x = torch.randn(8, 32)
    for matrix in (first, second, third):
        near(kernels.linear(x, matrix), x @ matrix.t(), 1e-4)


@needs_int4
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_4_bit_matrices_are_multiplied_in_4_bits_where_tokens_are_few(num_tokens: int) -> None:
    matrix, x = in_4_bits(48, 96), torch.randn(num_tokens, 96)
    kernels = prepared(matrix, int4=True)
    found, wanted = kernels.linear(x, matrix), x.double() @ matrix.double().t()
    is_packed = num_tokens in Int4Matrix.tokens
    assert found.dtype == (torch.bfloat16 if is_packed else torch.float32)
    assert (found.double() - wanted).norm() <= (1e-2 if is_packed else 1e-6) * wanted.norm()
    assert kernels.notes[0].startswith("1 of 1 matrices, for 1 to 16 tokens, are multiplied in 4 bits")


@needs_int4
def test_a_layer_in_4_bits_is_near_the_reference_and_keeps_the_stream_in_float32() -> None:
    qkv, gate_up = in_4_bits(48, 64), in_4_bits(32, 64)
    x, norm, bias = torch.randn(2, 64), Norm(torch.rand(64), 1e-5), torch.randn(48)
    kernels = prepared(qkv, gate_up, int4=True)
    for found, wanted in (
        (kernels.norm_linear(x, x, norm, qkv, bias), REFERENCE.norm_linear(x, x, norm, qkv, bias)),
        (kernels.norm_gated(x, x, norm, gate_up), REFERENCE.norm_gated(x, x, norm, gate_up)),
    ):
        assert (found[0] - wanted[0]).norm() <= 2e-2 * wanted[0].norm()
        assert torch.equal(found[1], wanted[1])
    assert kernels.norm_linear(x, x, norm, qkv, bias)[0].dtype == torch.float32  # the KV cache takes nothing else


@needs_int4
@pytest.mark.parametrize("shape", [(16, 48), (24, 64), (16, 16)], ids=str)
def test_shapes_that_do_not_divide_stay_in_float32(shape: tuple[int, int]) -> None:
    assert Int4Matrix.of(torch.zeros(shape)) is None


@needs_int4
def test_what_4_bits_would_change_stays_in_float32() -> None:
    assert Int4Matrix.of(torch.randn(32, 64)) is None
    one_off = in_4_bits(32, 64)
    one_off[5, 40] += 0.01
    assert Int4Matrix.of(one_off) is None
    assert Int4Matrix.of(torch.full((16, 32), 0.25)) is not None  # blocks without any step


# -- what is missing ------------------------------------------------------------------------------------------


def test_a_torch_without_the_ops_takes_the_plain_path_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_weight_int4pack_mm_for_cpu", raising=False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    matrix, x = in_4_bits(32, 64), torch.randn(8, 64)
    kernels = prepared(matrix, int4=True)
    assert torch.equal(kernels.linear(x, matrix), x @ matrix.t())
    in_4, packed = kernels.notes
    assert in_4.startswith("0 of 1 ")
    assert "has no product with them" in in_4
    assert packed.startswith("0 of 1 ")
    assert "does not pack matrices" in packed


def test_a_slow_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "DEFAULT" in Int4Matrix.obstacle()


# -- choice ---------------------------------------------------------------------------------------------------


def make(device: str = "cpu", backend: str | None = None, **options: Any) -> LLM:
    asked = (
        [ask(f"{name}.backend", backend, origin="test") for name in ("decode", "prefill", "idle")] if backend else []
    )
    settings = {"max_seqs": 8, "max_tokens": 64, "max_len": 96, "page_size": 8, **options}
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=EngineOptions(**settings), asked=asked)


def test_the_cpu_without_recordings_has_its_own_kernels_and_the_tokens_of_the_reference() -> None:
    prompts = [[5, 9, 200, 3], [7], list(range(20, 61)), [11] * 9, list(range(100, 117)), [1, 2]]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    ours, reference = make(), make(kernels="reference")
    assert (ours.kernels.name, reference.kernels.name) == ("cpu", "reference")
    wanted = [done.tokens for done in reference.generate(prompts, params)]
    assert [done.tokens for done in ours.generate(prompts, params)] == wanted
    assert [ours.generate([prompt], params)[0].tokens for prompt in prompts] == wanted
    assert "kernels: cpu; " in ours.explain()
    assert "kernels: reference\n" in reference.explain()


def test_recordings_on_the_cpu_have_the_reference() -> None:
    assert make("emulated", "full").kernels.name == "reference"
    assert make("emulated", "disabled").kernels.name == "cpu"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "emulated", "backend": "full", "kernels": "cpu"}, "nothing is recorded"),
        ({"device": "emulated", "backend": "full", "weights": "int4"}, "needs kernels='cpu', but 'reference'"),
        ({"kernels": "reference", "weights": "int4"}, "needs kernels='cpu', but 'reference'"),
        ({"dtype": torch.float16, "weights": "int4"}, "torch.float16"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make(**options)
