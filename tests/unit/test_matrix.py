"""Matrices: what they hold, what kernels make of them, and the parts that run where kernels decline one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

pytest.importorskip("triton")

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.kernels import Kernels, Norm, Op
from phonograph.engine.ops.layers.cpu import MOST_TOKENS, CpuKernels
from phonograph.engine.ops.layers.packing import PackedMatrix
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.native.library import library
from phonograph.engine.ops.projections import linear, norm_gated, norm_linear
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.triton.layers import TritonKernels
from phonograph.engine.ops.tuning import Tuning
from phonograph.errors import DeviceError

CPU = torch.device("cpu")
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS: tuple[Op, ...] = ("linear", "norm_linear", "norm_gated")


def _triton() -> Kernels:
    return TritonKernels(GPU, Tuning({}))


def _compiled() -> Kernels:
    try:
        return CpuKernels(library())
    except DeviceError as error:
        pytest.skip(str(error))


KERNELS: dict[str, tuple[Callable[[], Kernels], torch.device]] = {
    "reference": (ReferenceKernels, CPU),
    "cpu": (_compiled, CPU),
    "triton": (_triton, GPU),
}
"""What makes them, and where they run here."""


class Picky(ReferenceKernels):
    """Kernels that take these calls alone, and note which were made."""

    def __init__(self, *takes: Op) -> None:
        super().__init__()
        self.taken, self.calls = takes, list[str]()

    def takes(self, op: Op, num_tokens: int, matrix: Matrix) -> bool:
        return op in self.taken

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("add_norm")
        return super().add_norm(x, delta, norm, keeps=keeps)

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("norm_linear")
        return ReferenceKernels().norm_linear(x, delta, norm, matrix)

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: Matrix, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("norm_gated")
        return ReferenceKernels().norm_gated(x, delta, norm, gate_up, keeps=keeps)

    def linear(self, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.calls.append("linear")
        return super().linear(x, matrix, dtype)

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        self.calls.append("silu_mul")
        return super().silu_mul(both)


def scaled(rows: int, columns: int, bias: torch.Tensor | None = None, on: torch.device = CPU) -> Matrix:
    """Bytes with a scale for each row."""
    data = torch.randn(rows, columns, device=on).to(torch.float8_e4m3fn)
    return Matrix(data, bias, torch.rand(rows, 1, device=on) + 0.1, ("F8_E4M3",))


class TestMatrix:
    def test_the_data_of_a_plain_one_are_its_values(self) -> None:
        matrix = Matrix(torch.randn(3, 4).half(), torch.randn(3).half())
        assert matrix.values() is matrix.data
        assert (matrix.is_plain, matrix.dtype, tuple(matrix.shape)) == (True, torch.float16, (3, 4))
        assert matrix.nbytes == 2 * (12 + 3)

    def test_scales_say_what_the_data_stand_for(self) -> None:
        matrix = scaled(3, 4)
        assert matrix.scales is not None
        assert torch.equal(matrix.values(), matrix.data.float() * matrix.scales)
        assert (matrix.is_plain, matrix.dtype, matrix.nbytes) == (False, torch.float32, 12 + 3 * 4)

    @pytest.mark.parametrize(
        ("data", "bias", "scales", "said"),
        [
            (torch.zeros(3, 4), torch.zeros(4), None, "bias of shape"),
            (torch.zeros(3, 4), None, torch.ones(3), "scales of shape"),
            (torch.zeros(3, 4).to(torch.float8_e4m3fn), None, None, "has no scales"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(
        self, data: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None, said: str
    ) -> None:
        with pytest.raises(ValueError, match=said):
            Matrix(data, bias, scales)


class TestDeclining:
    @pytest.mark.parametrize(
        ("takes", "of_norm_linear", "of_norm_gated"),
        [
            (OPS, ["norm_linear"], ["norm_gated"]),
            (("linear",), ["add_norm", "linear"], ["add_norm", "linear", "silu_mul"]),
            ((), ["add_norm"], ["add_norm", "silu_mul"]),
        ],
        ids=str,
    )
    def test_what_is_declined_runs_in_parts(
        self, takes: tuple[Op, ...], of_norm_linear: list[str], of_norm_gated: list[str]
    ) -> None:
        x, delta, norm, kernels = torch.randn(3, 8), torch.randn(3, 8), Norm(torch.rand(8), 1e-5), Picky(*takes)
        matrix, whole = Matrix(torch.randn(6, 8), torch.randn(6)), ReferenceKernels()
        found = norm_linear(kernels, x, delta, norm, matrix)
        assert kernels.calls == of_norm_linear
        kernels.calls.clear()
        assert all(map(torch.equal, found, whole.norm_linear(x, delta, norm, matrix)))
        found = norm_gated(kernels, x, delta, norm, matrix)
        assert kernels.calls == of_norm_gated
        assert all(map(torch.equal, found, whole.norm_gated(x, delta, norm, matrix)))

    @pytest.mark.parametrize("op", OPS)
    def test_triton_takes_plain_matrices_and_gates_without_a_bias(self, op: Op) -> None:
        kernels, bias = _triton(), torch.zeros(4)
        assert kernels.takes(op, 1, Matrix(torch.zeros(4, 4)))
        assert kernels.takes(op, 1, Matrix(torch.zeros(4, 4), bias)) == (op != "norm_gated")
        assert not kernels.takes(op, 1, scaled(4, 4))

    @pytest.mark.parametrize("op", OPS)
    def test_the_cpus_kernels_take_what_they_packed(self, op: Op) -> None:
        kernels, matrix = _compiled(), Matrix(torch.randn(4, 4), torch.randn(4))
        packed = kernels.prepare(matrix)
        assert isinstance(packed.prepared, PackedMatrix)
        assert (packed.data, packed.bias) == (matrix.data, matrix.bias)
        assert kernels.takes(op, MOST_TOKENS, packed)
        assert not kernels.takes(op, MOST_TOKENS + 1, packed)
        assert not kernels.takes(op, 1, matrix)
        assert not kernels.takes(op, 1, replace(matrix, prepared="another's"))
        for other in (scaled(4, 4), Matrix(torch.zeros(4, 4).half())):
            assert kernels.prepare(other) is other


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 3, MOST_TOKENS + 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_kernels_project_with_every_matrix(name: str, num_tokens: int, with_bias: bool, is_scaled: bool) -> None:
    torch.manual_seed(0)
    make, on = KERNELS[name]
    kernels, bias = make(), torch.randn(12, device=on) if with_bias else None
    plain = Matrix(torch.randn(12, 24, device=on), bias)
    matrix = kernels.prepare(scaled(12, 24, bias, on) if is_scaled else plain)
    x, delta = torch.randn(2, num_tokens, 24, device=on)
    norm = Norm(torch.rand(24, device=on), 1e-5)
    total = (x + delta).double()
    h = functional.rms_norm(total, (24,), norm.weight.double(), norm.eps)
    values, added = matrix.values().double(), 0 if bias is None else bias.double()
    wanted = h @ values.T + added
    found = norm_linear(kernels, x.clone(), delta, norm, matrix)
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), total)
    found = norm_gated(kernels, x.clone(), delta, norm, matrix)
    gate, up = wanted.chunk(2, -1)
    torch.testing.assert_close(found[0].double(), functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), total)
    torch.testing.assert_close(linear(kernels, x, matrix).double(), x.double() @ values.T + added, rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    num_tokens=st.integers(0, MOST_TOKENS + 2),
    with_bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_packed_and_declined_products_are_torchs(
    rows: int, columns: int, num_tokens: int, with_bias: bool, seed: int
) -> None:
    kernels = _compiled()
    torch.manual_seed(seed)
    plain = Matrix(torch.randn(rows, columns), torch.randn(rows) if with_bias else None)
    x = torch.randn(num_tokens, columns)
    found = linear(kernels, x, kernels.prepare(plain))
    torch.testing.assert_close(found, functional.linear(x, plain.data, plain.bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_in_float32_get_their_bias_in_float32(dtype: torch.dtype) -> None:
    """Values beyond the range of float16, with a bias that it would round away."""
    x, weight = torch.full((2, 4), 2e2).to(dtype), torch.full((3, 4), 2e2).to(dtype)
    bias = torch.tensor([1.0, -0.5, 0.25]).to(dtype)
    for make, on in (KERNELS["reference"], KERNELS["triton"]):
        found = linear(make(), x.to(on), Matrix(weight.to(on), bias.to(on)), torch.float32)
        assert found.dtype == torch.float32
        assert torch.equal(found.cpu(), (16e4 + bias.float()).expand(2, 3))


class TestStored:
    """The formats of blocks tell the packing where to begin."""

    def test_blocks_are_packed_in_their_own_form(self, monkeypatch: pytest.MonkeyPatch) -> None:
        native, tried = library(), list[int]()
        searched = native.stepped

        def noted(*args: int) -> int:
            tried.append(args[4])
            return int(searched(*args))

        monkeypatch.setattr(native, "stepped", noted)
        step, offset = torch.rand(80, 2, 1) + 0.1, torch.randn(80, 2, 1)
        weight = (torch.randint(0, 32, (80, 2, 32)) * step + offset).flatten(1)  # as Q5_1 unpacks
        without = PackedMatrix.of(weight, native)
        assert 15 in tried, "16 levels were tried first"
        tried.clear()
        found = PackedMatrix.of(weight, native, ("Q5_1",))
        assert set(tried) == {255}
        assert (found.bits, without.bits) == (8, 8)
        assert torch.equal(found.words, without.words)
        PackedMatrix.of(weight, native, ("Q4_K", "Q6_K"))
        assert set(tried) == {255}, "of several formats the widest decides"
        PackedMatrix.of(weight, native, ("Q5_1", "BF16"))
        assert 15 in tried, "values in a plain format may be anything"

    def test_a_wrong_format_costs_memory_and_no_bits(self) -> None:
        """Values decide: a form that does not hold them is not taken, whatever the format is called."""
        weight = torch.randn(70, 64)
        found = PackedMatrix.of(weight, library(), ("Q4_0",))
        assert found.bits == 32


BIASED = replace(SHAPES["tiny"], qkv_bias=True, o_bias=True, mlp_bias=True, tied_embeddings=True)


def logits_of(model: Model, num_tokens: int = 7) -> torch.Tensor:
    on = model.matrices[0].data.device
    table = torch.tensor([[0] * 4, [2, 1, 4, 3]], dtype=torch.int32, device=on)
    cache = CacheGroup.empty(model.keeps, 5, 4, dtype=model.dtype, device=on)
    positions = torch.arange(num_tokens, device=on)
    queries = Queries(torch.ones_like(positions), positions, table, tokens_per_row=None)
    return model.logits(model.hidden(positions * 5 + 3, queries, cache).states).float().cpu()


class OnTheHost(RandomCheckpoint):
    """The same numbers on every device."""

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(device)) for name, tensor in super().tensors())


def model_of(name: str, dtype: torch.dtype = torch.float32, residual: torch.dtype | None = None) -> Model:
    make, on = KERNELS[name]
    parts = ModelParts(ReferenceAttention(), make(), 16, residual)
    return load_model(OnTheHost(replace(BIASED, dtype=torch.float32)), parts, dtype, on)


class TestBiases:
    @pytest.mark.parametrize("name", ["cpu", "triton"])
    @pytest.mark.parametrize("piece", [2048, 3])
    def test_all_kernels_compute_them(self, name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phonograph.engine.models.decoder.PIECE", piece)
        found = logits_of(model_of(name))
        torch.testing.assert_close(found, logits_of(model_of("reference")), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", KERNELS)
    def test_in_float16_with_a_residual_stream_in_float32(self, name: str) -> None:
        found = logits_of(model_of(name, torch.float16, torch.float32))
        torch.testing.assert_close(found, logits_of(model_of("reference")), rtol=2e-2, atol=2e-3)

    @pytest.mark.parametrize("place", ["qkv", "out", "gate_up", "down"])
    def test_each_of_them_counts(self, place: str) -> None:
        model = model_of("reference")
        before = logits_of(model)
        matrices = model.matrices[("qkv", "out", "gate_up", "down").index(place) : -1 : 4]
        assert len(matrices) == BIASED.num_layers
        for matrix in matrices:
            assert matrix.bias is not None
            matrix.bias.zero_()
        assert (logits_of(model) - before).abs().max() > 1e-4
