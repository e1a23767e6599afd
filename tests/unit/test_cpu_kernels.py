"""The kernels for the CPU against the torch reference, packed matrices, their compilation, and when they are chosen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from paged import Heads as HeadSizes
from paged import by_hand, case_of, spans_of
from phonograph import DeclarationError, DeviceError, PlanError
from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.ops.attention.cpu import CpuAttention
from phonograph.engine.ops.kernels import Angles, Heads, Norm, Places
from phonograph.engine.ops.layers.cpu import MOST_TOKENS, CpuKernels
from phonograph.engine.ops.layers.packing import BLOCK, NARROW, PackedMatrix
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.native.library import Library, library
from phonograph.engine.ops.projections import linear, norm_gated, norm_linear
from phonograph.engine.ops.queries import Queries
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.graphs.planning.settings import ask

REFERENCE = ReferenceKernels()
TOKENS = [0, 1, 2, 3, 5, 12, 16, 17, 33, MOST_TOKENS, MOST_TOKENS + 1]
"""Tiles that are filled and tiles that are not, and both sides of the bound."""


def compiled() -> Library | str:
    try:
        return library()
    except DeviceError as error:
        return str(error)


LIBRARY = compiled()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def native() -> Library:
    assert isinstance(LIBRARY, Library)
    return LIBRARY


def prepared(*weights: torch.Tensor, **options: Any) -> tuple[CpuKernels, list[Matrix]]:
    """Kernels, and these matrices as they prepared them."""
    kernels = CpuKernels(native(), **options)
    return kernels, [kernels.prepare(Matrix(weight)) for weight in weights]


def in_blocks(levels: torch.Tensor, step: torch.Tensor, offset: torch.Tensor | float) -> torch.Tensor:
    return (levels * step.half().float() + offset).flatten(1)


def q4_1(rows: int, columns: int) -> torch.Tensor:
    """What the format unpacks to: steps and offsets in float16, every block with its least and most level."""
    blocks = rows, columns // BLOCK
    levels = torch.randint(0, 16, (*blocks, BLOCK))
    levels[..., 3], levels[..., 7] = 0, 15
    return in_blocks(levels, torch.rand(*blocks, 1) + 0.1, torch.randn(*blocks, 1).half().float())


def q4_0(rows: int, columns: int) -> torch.Tensor:
    """-8 to 7 steps, the farthest number being -8 of them, whose sign a step may turn."""
    blocks = rows, columns // BLOCK
    levels = torch.randint(-7, 8, (*blocks, BLOCK))
    levels[..., 5] = -8
    return in_blocks(levels, torch.randn(*blocks, 1), 0)


def q8_0(rows: int, columns: int) -> torch.Tensor:
    """-127 to 127 steps, the farthest number being that far away."""
    blocks = rows, columns // BLOCK
    levels = torch.randint(-127, 128, (*blocks, BLOCK))
    levels[..., 9] = 127
    return in_blocks(levels, torch.rand(*blocks, 1) * 1e-3, 0)  # subnormal steps among them


def raw(kind: str, half_fields: list[int]) -> Callable[[int, int], torch.Tensor]:
    """Any bytes as llama.cpp unpacks them, but for the scales of a block, which are small numbers in float16."""

    def make(rows: int, columns: int) -> torch.Tensor:
        found = GGMLQuantizationType[kind]
        width, size = GGML_QUANT_SIZES[found]
        random = np.random.default_rng(0)
        blocks = random.integers(0, 256, (rows, -(-columns // width), size), dtype=np.uint8)
        for place in half_fields:
            scales = random.uniform(0.001, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
            blocks[..., place : place + 2] = scales.view(np.uint8)
        return torch.from_numpy(dequantize(blocks.reshape(rows, -1), found))[:, :columns].contiguous()

    return make


MATRICES: dict[str, tuple[Callable[[int, int], torch.Tensor], int]] = {
    "q4_1": (q4_1, 4),
    "q4_0": (q4_0, 4),
    "q8_0": (q8_0, 8),
    "q4_k": (raw("Q4_K", [0, 2]), 4),
    "q5_0": (raw("Q5_0", [0]), 8),
    "q5_1": (raw("Q5_1", [0, 2]), 8),
    "q5_k": (raw("Q5_K", [0, 2]), 8),
    "q6_k": (raw("Q6_K", [208]), 8),
    "bfloat16": (lambda *shape: torch.randn(*shape).bfloat16().float(), 16),
    "float32": (torch.randn, 32),
}
"""What makes a matrix, and the bits that hold it."""
SEARCHED = ("q4_k", "q5_0", "q5_1", "q5_k", "q6_k")
"""Those whose steps are found by trying."""


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
    norm, kept, kernels = Norm(torch.rand(96), 1e-5), x.clone(), CpuKernels(native())
    weight, gate_up = (
        kernels.prepare(Matrix(torch.randn(rows, 96), torch.randn(rows) if with_bias else None)) for rows in (80, 160)
    )
    assert kernels.takes("norm_gated", num_tokens, gate_up) == (num_tokens <= MOST_TOKENS)
    near(kernels.add_norm(x, delta, norm), REFERENCE.add_norm(x, delta, norm))
    near(norm_linear(kernels, x, delta, norm, weight), REFERENCE.norm_linear(x, delta, norm, weight), 1e-4)
    near(norm_gated(kernels, x, delta, norm, gate_up), REFERENCE.norm_gated(x, delta, norm, gate_up), 1e-4)
    near(linear(kernels, x, weight), REFERENCE.linear(x, weight), 1e-4)
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
    queries = Queries(torch.tensor([1, 2, 3, 3, 0]), torch.tensor([0, 7, 3, 4, 0]), table, tokens_per_row=None)
    angles = Angles(torch.randn(8, head_dim), torch.randn(8, head_dim))
    embedding, tokens = torch.randn(3, 8), torch.zeros(5, dtype=torch.long)
    found, wanted = (
        (kernels.rotate_and_store(qkv, heads, places, cache, 1), cache.keys, cache.values)
        for kernels in (CpuKernels(native()), REFERENCE)
        for _, places in [kernels.embed_tokens(embedding, tokens, angles, queries, 4, torch.float32)]
        for cache in [PagedCache.empty(2, 7, 4, kv_heads, head_dim, dtype=dtype, device=torch.device("cpu"))]
    )
    near(found, wanted, 1e-5 if dtype == torch.float32 else 2e-2)
    assert wanted[1][1].any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"angles": 8}, "has angles for 8, expected 16"),
        ({"kv_heads": 1}, r"keeps pages of \(1, 16\), expected \(2, 16\)"),
        ({"head_dim": 32}, r"keeps pages of \(2, 32\), expected \(2, 16\)"),
        ({"columns": 96}, "projects to 96, expected 128"),
        ({"norm": 8}, "norms queries of 8, expected 16; it norms keys of 8"),
    ],
)
def test_sizes_that_don_t_fit_are_refused_and_nothing_is_written(changes: dict[str, int], said: str) -> None:
    sizes = {"angles": 16, "kv_heads": 2, "head_dim": 16, "columns": 128, "norm": 16, **changes}
    norm = Norm(torch.ones(sizes["norm"]), 1e-6)
    kernels, heads = CpuKernels(native()), Heads(4, 2, 16, norm, norm)
    cache = PagedCache.empty(
        2, 4, 4, sizes["kv_heads"], sizes["head_dim"], dtype=torch.float32, device=torch.device("cpu")
    )
    places = Places(torch.ones(3, sizes["angles"]), torch.zeros(3, sizes["angles"]), torch.tensor([4, 5, 6]))
    for _ in range(2):
        with pytest.raises(DeclarationError, match=f"a layer of 4 heads and 2 of keys.*{said}.*Model.keeps"):
            kernels.rotate_and_store(torch.randn(3, sizes["columns"]), heads, places, cache, 1)
    assert not cache.keys.any()
    assert not cache.values.any()


def test_heads_that_fit_are_looked_at_once_for_each_cache() -> None:
    kernels, heads, places = (
        CpuKernels(native()),
        Heads(4, 2, 16, None, None),
        Places(torch.ones(3, 16), torch.zeros(3, 16), torch.tensor([4, 5, 6])),
    )
    good, bad = (PagedCache.empty(2, 4, 4, num, 16, dtype=torch.float32, device=torch.device("cpu")) for num in (2, 1))
    for _ in range(2):
        kernels.rotate_and_store(torch.randn(3, 128), heads, places, good, 1)
        with pytest.raises(DeclarationError, match="keeps pages of"):
            kernels.rotate_and_store(torch.randn(3, 128), heads, places, bad, 1)


def test_attention_over_pages_of_another_size_is_refused() -> None:
    cache = PagedCache.empty(1, 4, 4, 2, 16, dtype=torch.float32, device=torch.device("cpu"))
    table, numbers = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([1])
    attention = CpuAttention(native()).prepare(cache, Queries(numbers, numbers, table, tokens_per_row=1), 4)
    for shape in ((1, 4, 32), (1, 3, 16)):
        with pytest.raises(DeclarationError, match=r"over pages of 2 heads of 16.*Model\.keeps"):
            attention.attend(0, torch.randn(shape), None)


def test_a_model_whose_rope_does_not_fit_its_heads_is_not_built() -> None:
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=EngineOptions(max_seqs=2, max_len=64))
    model = llm.executor.model
    assert isinstance(model, Decoder)
    rope = Angles(model.rope.cos[:, :-2], model.rope.sin[:, :-2])
    with pytest.raises(DeclarationError, match="has angles for"):
        replace(model, rope=rope)
    layer = model.weights.layers[0]
    wrong = replace(layer, heads=replace(layer.heads, num_kv_heads=layer.heads.num_heads * 2))
    with pytest.raises(DeclarationError, match="projects to"):
        replace(model, weights=replace(model.weights, layers=(wrong, *model.weights.layers[1:])))


def test_other_precisions_are_left_to_the_reference() -> None:
    x, norm = torch.randn(8, 64).half(), Norm(torch.rand(64).half(), 1e-5)
    kernels, [weight] = prepared(torch.randn(32, 64).half())
    assert not kernels.takes("linear", 1, weight)
    assert torch.equal(linear(kernels, x, weight), REFERENCE.linear(x, weight))
    assert torch.equal(kernels.add_norm(x, x, norm)[0], REFERENCE.add_norm(x, x, norm)[0])
    assert torch.equal(norm_gated(kernels, x, x, norm, weight)[0], REFERENCE.norm_gated(x, x, norm, weight)[0])
    assert kernels.notes == ("slow: none of 1 matrices is in float32 and fits; torch multiplies them",)


def test_gates_near_zero_and_far_from_it() -> None:
    values = torch.tensor([0.0, 1e-30, 1e-3, 0.5, 5, 30, 87, 88, 89, 1e4, 1e18, -1e-3, -5, -87, -89, -1e4])
    x, norm = torch.ones(1, 16), Norm(values, 0.0)  # of ones gives the values
    kernels, [both] = prepared(torch.cat([torch.eye(16), torch.eye(16)]))
    near(norm_gated(kernels, x, None, norm, both), REFERENCE.norm_gated(x, None, norm, both))


# -- packed matrices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_is_packed_without_loss(name: str, num_tokens: int) -> None:
    make, bits = MATRICES[name]
    matrix, x = make(75, 96), torch.randn(num_tokens, 96)  # rows that fill no panel
    assert PackedMatrix.of(matrix, native()).bits == bits
    kernels, [packed] = prepared(matrix)
    near(linear(kernels, x, packed).double(), x.double() @ matrix.double().t(), 1e-4)
    if num_tokens == MOST_TOKENS:  # every value: bit by bit, or as near as float32 comes to the others of its block
        found, wanted = linear(kernels, torch.eye(96)[:num_tokens], packed), matrix.t()[:num_tokens]
        largest = matrix.view(75, -1, NARROW).abs().amax(-1).repeat_interleave(NARROW, 1).t()[:num_tokens]
        assert ((found - wanted).abs() <= (largest * 2**-20 if name in SEARCHED else 0)).all()


@pytest.mark.parametrize("name", MATRICES)
def test_a_token_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(name: str) -> None:
    x, norm, threads = torch.randn(MOST_TOKENS, 64), Norm(torch.rand(64), 1e-5), torch.get_num_threads()
    kernels, [matrix, gate_up] = prepared(MATRICES[name][0](80, 64), torch.randn(64, 64))
    wanted = kernels.linear(x, matrix), kernels.norm_gated(x, None, norm, gate_up)[0]
    try:
        for few in (1, 2):
            torch.set_num_threads(few)
            for count in range(1, MOST_TOKENS + 1):
                assert torch.equal(kernels.linear(x[:count], matrix), wanted[0][:count])
                assert torch.equal(kernels.norm_gated(x[:count], None, norm, gate_up)[0], wanted[1][:count])
    finally:
        torch.set_num_threads(threads)


def test_threads_do_not_get_into_each_others_way() -> None:
    (kernels, [matrix]), inputs = prepared(q4_1(512, 512)), [torch.randn(5, 512) for _ in range(200)]
    wanted = [kernels.linear(x, matrix) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: kernels.linear(x, matrix), inputs))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_child_of_a_fork_can_go_on() -> None:
    (kernels, [matrix]), x = prepared(q4_1(512, 512)), torch.randn(5, 512)
    wanted = kernels.linear(x, matrix)  # the threads that helped do not come along
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(kernels.linear(x, matrix), wanted) else 1)
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_what_fewer_bits_would_change_stays_as_it_is() -> None:
    for name, (make, bits) in MATRICES.items():
        matrix = make(256, 64)
        matrix[200, 40] += 0.01  # behind the rows that are tried first
        found = PackedMatrix.of(matrix, native()).bits
        assert found == 32 or found > bits, name
        (kernels, [packed]), x = prepared(matrix), torch.randn(4, 64)
        near(kernels.linear(x, packed), x @ matrix.t(), 1e-4)


@pytest.mark.parametrize(("shape", "bits"), [((16, 48), 8), ((1, 32), 4), ((7, 31), 32), ((5, 18), 16)], ids=str)
def test_every_shape_can_be_packed(shape: tuple[int, int], bits: int) -> None:
    matrix, x = torch.full(shape, 0.25), torch.randn(3, shape[1])
    assert PackedMatrix.of(matrix, native()).bits == bits
    kernels, [packed] = prepared(matrix)
    near(kernels.linear(x, packed), x @ matrix.t())


def test_matrices_are_packed_as_long_as_the_bytes_last() -> None:
    weights = torch.randn(16, 32), torch.randn(64, 32), torch.randn(16, 32)
    kernels, matrices = prepared(*weights, most_bytes=2 * weights[0].nbytes)
    assert [kernels.takes("linear", 1, matrix) for matrix in matrices] == [True, False, True]
    assert kernels.notes[1].startswith("2 of 3 matrices packed")
    assert "(2 in 32 bits; 0 MB)" in kernels.notes[1]
    x = torch.randn(8, 32)
    for matrix, weight in zip(matrices, weights, strict=True):
        near(linear(kernels, x, matrix), x @ weight.t(), 1e-4)


# -- attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("heads", [HeadSizes(4, 4, 16), HeadSizes(9, 3, 64)], ids=str)
def test_attention_over_more_than_a_chunk(heads: HeadSizes, window: int | None) -> None:
    case = case_of(spans_of((0, 1), (63, 1), (64, 1), (130, 1), (333, 1)), heads)
    found = case.run(CpuAttention(native()), 1, window)
    torch.testing.assert_close(found.double(), by_hand(case, 1, window), rtol=1e-4, atol=1e-5)


# -- compilation ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled for these tests by the compiler of this machine; its calls show that it is done once."""
    folder = tmp_path_factory.mktemp("built")
    shown: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        library(lambda *told: shown.append(told))
        library(lambda *told: shown.append(told))
    assert shown == [("compiling kernels", 0, 1), ("compiling kernels", 1, 1)]
    (found,) = (folder / "phonograph" / "native").iterdir()
    return found


@pytest.mark.slow
def test_it_is_compiled_once_and_shows_it(built: Path) -> None:
    assert built.suffix == ".so"


def put_compiler(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def put_quick_compiler(folder: Path, name: str, built: Path) -> None:
    """One that has been through with the work before: a compilation takes 10 s."""
    put_compiler(folder, name, f'[ $1 = --version ] && echo quick && exit; for made; do :; done; cp {built} "$made"')


BROKEN = "[ $1 = --version ] && echo clang && exit; echo 'x.cpp:1: error: no vectors' >&2; echo 1 error. >&2; exit 1"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "found none of g.., c.., clang... Install one"),
        (BROKEN, "failed: x.cpp:1: error: no vectors. Install a newer g.."),
        ("exit 7", "failed: status 7. Install a newer g.."),
    ],
)
def test_without_a_compiler_the_reference_serves_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str | None, said: str
) -> None:
    if script:
        put_compiler(tmp_path, "c++", script)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DeviceError, match=said):
        library()
    llm = make()
    assert [text.startswith("slow: compiling the CPU's kernels: ") for text in caplog.messages] == [True]
    assert llm.kernels.name == "reference"
    assert "kernels: reference; slow: compiling the CPU's kernels: " in llm.explain()
    assert "attention: reference" in llm.explain()
    for name in ("kernels", "attention"):
        with pytest.raises(DeviceError, match=said):
            make(**{name: "cpu"})


def test_the_next_compiler_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    put_compiler(tmp_path, "g++", BROKEN)
    put_quick_compiler(tmp_path, "c++", built)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = library()
    assert (found.lanes, found.compiler) == (native().lanes, "quick")


def test_half_a_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    put_quick_compiler(tmp_path, "g++", built)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("phonograph.engine.ops.native.library._opened", Library)  # as in another process
    library()
    (made,) = (tmp_path / "phonograph" / "native").iterdir()
    made.unlink()
    made.write_bytes(b"half")
    assert library().lanes == native().lanes


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="XDG_CACHE_HOME"):
        library()


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


@pytest.mark.parametrize("name", ["kernels", "attention"])
def test_what_is_recorded_can_not_have_them(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}='cpu' needs device='cpu' and no graphs"):
        make("emulated", "full", **{name: "cpu"})
