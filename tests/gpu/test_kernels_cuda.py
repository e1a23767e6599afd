"""Triton kernels as a GPU runs them: bfloat16 against float64, overlapping launches in graphs, whole vocabularies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phonograph.devices import open_device
from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.tuning import Choice, Overlap, Product, Tuning
from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.sampling.sampler import SamplingRows, TorchSampler

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

WIDTH, OUTPUTS = 4096, 1536
CHOICES = {
    "vector, whole rows": (1, Choice("vector", rows=2, block=4096, warps=8, programs=264)),
    "vector, asked for ahead": (1, Choice("vector", rows=1, block=4096, warps=8, ahead=4096)),
    "vector, streamed": (1, Choice("vector", rows=1, block=4096, warps=8, stages=2, programs=264)),
    "vector, blocks": (1, Choice("vector", rows=8, block=512, warps=4, stages=4)),
    "matrix": (8, Choice("matrix", rows=32, block=128, stages=6)),
    "matrix, fused": (8, Choice("matrix", rows=32, block=128, stages=4, fused=True)),
    "matrix, split": (8, Choice("matrix", rows=32, block=128, stages=6, split=2, ahead=256)),
    "matrix, tall weights, split": (33, Choice("matrix", rows=64, block=128, stages=4, split=4, swap=True)),
    "library": (8, Choice("library_lt")),
}
OVERLAPS: list[Overlap] = ["none", "late", "early"]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(CHOICES))
def test_a_residual_stream_in_float32_is_not_bound_to_the_range_of_the_weights(name: str, dtype: torch.dtype) -> None:
    from phonograph.engine.ops.triton.products import Products

    (num_tokens, choice), products, reference = CHOICES[name], Products(torch.device("cuda")), ReferenceKernels()
    x, delta = random(num_tokens, WIDTH).float() * 1e5, random(num_tokens, WIDTH).float() * 1e5
    norm = Norm(random(WIDTH).to(dtype), 1e-6)
    weight, gate_up = (Matrix(random(rows, WIDTH, scale=1 / 64).to(dtype)) for rows in (OUTPUTS, 2 * OUTPUTS))
    exact = Norm(norm.weight.double(), norm.eps)
    for (found, total), wanted in (
        (
            products.norm_linear(choice, x.clone(), delta, norm, weight),
            reference.norm_linear(x.double(), delta.double(), exact, Matrix(weight.data.double()))[0],
        ),
        (
            products.norm_gated(choice, x.clone(), delta, norm, gate_up),
            reference.norm_gated(x.double(), delta.double(), exact, Matrix(gate_up.data.double()))[0],
        ),
    ):
        assert found.dtype == dtype
        assert torch.equal(total, x + delta)
        assert ((found.double() - wanted).norm() / wanted.norm()).item() <= 1e-2
    narrow = (random(num_tokens, WIDTH).float() * 3e4).clamp(-6e4, 6e4).to(dtype)
    added, wanted = (
        products.linear(choice, narrow, weight, dtype=torch.float32),
        narrow.double() @ weight.data.double().T,
    )
    assert added.dtype == torch.float32
    assert wanted.abs().max() > torch.finfo(torch.float16).max
    assert ((added.double() - wanted).norm() / wanted.norm()).item() <= 1e-5
    bias = random(OUTPUTS).to(dtype)
    biased = products.linear(choice, narrow, Matrix(weight.data, bias), dtype=torch.float32)
    assert torch.equal(biased, added + bias.float()), "the same sums, and a bias that is added in float32"


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", list(CHOICES))
def test_products_are_near_float64(name: str, overlap: Overlap) -> None:
    from phonograph.engine.ops.triton.products import Products

    (num_tokens, plain), products, reference = CHOICES[name], Products(torch.device("cuda")), ReferenceKernels()
    choice = replace(plain, overlap=overlap)
    x, delta, norm = random(num_tokens, WIDTH), random(num_tokens, WIDTH), Norm(random(WIDTH), 1e-6)
    weight, gate_up = (Matrix(random(rows, WIDTH, scale=1 / 64)) for rows in (OUTPUTS, 2 * OUTPUTS))
    exact = Norm(norm.weight.double(), norm.eps)
    for found, wanted in (
        (products.linear(choice, x, weight), reference.linear(x.double(), Matrix(weight.data.double()))),
        (
            products.norm_linear(choice, x.clone(), delta, norm, weight)[0],
            reference.norm_linear(x.double(), delta.double(), exact, Matrix(weight.data.double()))[0],
        ),
        (
            products.norm_gated(choice, x.clone(), delta, norm, gate_up)[0],
            reference.norm_gated(x.double(), delta.double(), exact, Matrix(gate_up.data.double()))[0],
        ),
    ):
        assert ((found.double() - wanted).norm() / wanted.norm()).item() <= 1e-2


@pytest.mark.parametrize("overlap", ["late", "early"])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_overlapping_kernels_in_a_graph_compute_what_plain_ones_do(num_tokens: int, overlap: Overlap) -> None:
    """A chain in which every kernel reads what the one before it wrote, many times over."""
    from phonograph.engine.ops.triton.layers import TritonKernels

    device, on = open_device("cuda"), torch.device("cuda")
    plain = CHOICES["vector, streamed" if num_tokens == 1 else "matrix, split"][1]
    norm = Norm(torch.ones(WIDTH, device=on, dtype=torch.bfloat16), 1e-6)
    square, gate_up = (Matrix(random(rows, WIDTH, scale=1 / 64)) for rows in (WIDTH, 2 * OUTPUTS))
    down = Matrix(random(WIDTH, OUTPUTS, scale=1 / 40))

    def chain(kernels: TritonKernels, x: torch.Tensor) -> torch.Tensor:
        delta = None
        for _ in range(20):
            delta, x = kernels.norm_linear(x, delta, norm, square)
            gated, x = kernels.norm_gated(x, delta, norm, gate_up)
            delta = kernels.linear(gated, down)
        return kernels.add_norm(x, delta, norm)[0]

    def kernels(overlap: Overlap) -> TritonKernels:
        choice = replace(plain, overlap=overlap)
        choices = {
            Product("norm_linear", num_tokens, WIDTH, WIDTH): choice,
            Product("norm_gated", num_tokens, OUTPUTS, WIDTH): choice,
            Product("linear", num_tokens, WIDTH, OUTPUTS): replace(choice, block=min(choice.block, 2048)),
        }
        return TritonKernels(on, Tuning(choices), overlap=overlap)

    x = random(num_tokens, WIDTH)
    wanted = chain(kernels("none"), x.clone())
    ours = kernels(overlap)
    chain(ours, x.clone())
    with device.recorder(device.new_pool()) as recorder:
        recorder.begin()
        out = chain(ours, x.clone())
        graph = recorder.end()
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted), "the order of the sums is the same, so the bits are"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_resumes_overlap_runs_between_replays_and_changes_nothing(overlap: Overlap) -> None:
    from phonograph.engine.ops.triton.layers import TritonKernels

    kernels, x = TritonKernels(torch.device("cuda"), Tuning({}), overlap=overlap), random(16, 576)
    norm, graph = Norm(random(576), 1e-6), torch.cuda.CUDAGraph()
    wanted, _ = kernels.add_norm(x, None, norm)
    with torch.cuda.graph(graph):
        found, _ = kernels.add_norm(x, None, norm)
    for _ in range(3):
        found.zero_()
        kernels.resume_overlap()
        graph.replay()
        assert torch.equal(found, wanted)


def test_a_split_product_is_the_same_every_time() -> None:
    from phonograph.engine.ops.triton.products import Products

    products, choice = Products(torch.device("cuda")), CHOICES["matrix, split"][1]
    x, weight = random(8, WIDTH), Matrix(random(OUTPUTS, WIDTH))
    first = products.linear(choice, x, weight)
    assert all(torch.equal(products.linear(choice, x, weight), first) for _ in range(50))


@pytest.mark.parametrize("scale", [1.0, 3.5])
@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_triton_samples_as_torch_does_over_a_whole_vocabulary(vocab: int, scale: float) -> None:
    from phonograph.engine.sampling.triton.sampler import TritonSampler

    count, on = 64, "cuda"
    logits = random(count, vocab, scale=scale)
    rows = SamplingRows(
        torch.rand(count, device=on) + 0.3,
        torch.randint(0, 100, (count,), dtype=torch.int32, device=on),
        torch.rand(count, device=on) * 0.6 + 0.4,
        torch.zeros(count, device=on),
        torch.randint(0, 1 << 62, (count,), device=on),
        torch.randint(0, 8192, (count,), device=on),
    )
    for level in (Sampling.GREEDY, Sampling.SAMPLED, Sampling.TRUNCATED):
        found, wanted = (sampler.pick(logits, rows, level) for sampler in (TritonSampler(), TorchSampler()))
        if level is Sampling.GREEDY:  # logits of equal value: any of them is right
            assert torch.equal(logits.gather(1, found[:, None]), logits.gather(1, wanted[:, None]))
        else:  # a cut may fall between two sums that round differently
            assert (found == wanted).float().mean().item() >= 0.95
