"""The kernels of a layer and of the sampler: microseconds in a graph, and how far that is from the memory's limit.

`--sweep` measures every way of computing the products of a model's step and writes the table of the best, in the
format that `phonograph.engine.ops.tuning` reads. Without it the step is measured with the table that `--table`
names, or with the one that the engine would use. On the CPU the kernels are interpreted, on a tiny shape, to keep the
script alive.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from torch.nn import functional

from phonograph.devices import Device, open_device
from phonograph.engine.cache.groups import CacheGroup, PagedCache
from phonograph.engine.checkpoints.loading import load_weights
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models import dense
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.engine.models.decoder import Decoder, LayerWeights, Weights
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.ops import tuning
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.kernels import Angles, Heads, Kernels, Norm
from phonograph.engine.ops.layers.candidates import candidates
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.triton import rows
from phonograph.engine.ops.triton.layers import TritonKernels
from phonograph.engine.ops.triton.measuring import Measurement, Trial, best, device_us, measure_all, tune
from phonograph.engine.ops.triton.products import Products
from phonograph.engine.ops.tuning import Choice, Product, Tuning
from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.sampling.sampler import SamplingRows, TorchSampler
from phonograph.engine.sampling.triton.sampler import TritonSampler
from phonograph.graphs.progress import bar

Figures = dict[str, Any]
Each = Callable[[int], object]
"""Runs a kernel on the operands of this number."""
READ = 4.42e12
"""Bytes a second that torch's sum reads on an H200."""


# -- products ---------------------------------------------------------------------------------------------------


def products_of(config: ModelConfig, tokens: int, dtype: torch.dtype) -> list[Product]:
    """What a step of this many tokens asks for."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return [
        Product("norm_linear", tokens, heads, config.hidden, dtype),
        Product("linear", tokens, config.hidden, config.num_heads * config.head_dim, dtype),
        Product("norm_gated", tokens, config.intermediate, config.hidden, dtype),
        Product("linear", tokens, config.hidden, config.intermediate, dtype),
        Product("linear", tokens, config.vocab, config.hidden, dtype),
    ]


def num_bytes(product: Product) -> int:
    """Weights that a product reads."""
    gated = 2 if product.op == "norm_gated" else 1
    return gated * product.outputs * product.inputs * product.dtype.itemsize


def sweep(device: Device, wanted: list[Product], args: argparse.Namespace) -> tuple[list[Measurement], Figures]:
    """Everything that was measured, and the fastest of it for the report."""
    begin = time.perf_counter()
    if device.torch_device.type == "cuda":
        found = tune(
            device, wanted, multiprocessors=args.multiprocessors, workers=args.workers, seconds=args.seconds,
            progress=bar(),
        )  # fmt: skip
    else:
        found = measure_all(device, [(product, choice) for product in wanted for choice in _few(product)])
    figures: Figures = {"seconds": round(time.perf_counter() - begin, 1), "measured": len(found)}
    for product in best(found):
        ours = sorted((one for one in found if one.product == product), key=lambda one: one.us)
        library = min(one.us for one in ours if one.choice.kind.startswith("library"))
        plain = min(one.us for one in ours if one.choice.overlap == "none")
        floor = num_bytes(product) / READ * 1e6
        name = f"{product.op} {product.tokens} × {product.inputs} → {product.outputs}"
        print(f"{name:<36} {ours[0].us:8.2f} us, {ours[0].us / floor:5.2f} × floor; without overlap {plain:8.2f}, "
              f"library {library:8.2f}; {tuning.compact(ours[0].choice)}")  # fmt: skip
        problems = [one for one in ours if one.problem]
        figures[name] = {
            "floor_us": round(floor, 2),
            "library_us": round(library, 2),
            "without_overlap_us": round(plain, 2),
            "measured": [
                {"us": round(one.us, 2) if not one.problem else one.problem, **tuning.compact(one.choice)}
                for one in (ours if args.all else [*ours[:6], *problems[:3]])
            ],
        }
    return found, figures


def _few(product: Product) -> list[Choice]:
    """One of each kind: an interpreter's times mean nothing."""
    kinds = {c.kind: c for c in candidates(product, 2) if c.kind != "library_lt"}
    return list(kinds.values())


def decided(
    device: Device, config: ModelConfig, weights: Weights, found: list[Measurement], tokens: list[int]
) -> dict[Product, Choice]:
    """For each number of tokens the choices that make the whole step fastest: with overlaps, or without."""
    plain = best(one for one in found if one.choice.overlap == "none")
    chosen: dict[Product, Choice] = {}
    for count in tokens:
        times = {}
        for name, choices in (("plain", plain), ("overlapping", best(found))):
            kernels = TritonKernels(device.torch_device, Tuning(choices))
            inputs = step_inputs(device, config, weights, count)
            times[name] = device_us(device, partial(step_of, kernels, weights, *inputs))
        fastest = plain if times["plain"] <= times["overlapping"] else best(found)
        chosen |= {product: choice for product, choice in fastest.items() if product.tokens == count}
        print(f"step of {count} tokens:", {name: f"{us / 1e3:.3f} ms" for name, us in times.items()})
    return chosen


def accuracy(device: Device, chosen: dict[Product, Choice]) -> Figures:
    """Relative error of each chosen kernel, and of the library, against float64."""
    figures: Figures = {}
    products = Products(device.torch_device)
    wide: Any = ReferenceKernels()
    for wanted_product, choice in chosen.items():
        # Fewer outputs than a vocabulary has: the kernel is the same, and float64 is slow.
        product = replace(wanted_product, outputs=min(wanted_product.outputs, 16384))
        trial = Trial.of(product, device.torch_device, num_matrices=1)
        exact = Trial(
            product, trial.x.double(), trial.delta.double(),
            Norm(trial.norm.weight.double(), trial.norm.eps), tuple(Matrix(m.data.double()) for m in trial.matrices),
        )  # fmt: skip
        wanted = _reference(wide, exact)
        errors = {
            kind: ((found.double() - wanted).norm() / wanted.norm()).item()
            for kind, one in (("chosen", choice), ("library", Choice("library")))
            for found in [replace(trial, x=trial.x.clone()).run(products, one, trial.matrices[0])]
        }
        name = f"{product.op} {product.tokens} × {product.inputs} → {product.outputs}"
        figures[name] = {kind: float(f"{error:.2g}") for kind, error in errors.items()}
        assert errors["chosen"] <= 1e-2, f"{name} by {choice}: relative error {errors['chosen']:.2g}"
    return figures


def _reference(kernels: Kernels, trial: Trial) -> torch.Tensor:
    matrix = trial.matrices[0]
    match trial.product.op:
        case "linear":
            return kernels.linear(trial.x, matrix)
        case "norm_linear":
            return kernels.norm_linear(trial.x, trial.delta, trial.norm, matrix)[0]
        case "norm_gated":
            return kernels.norm_gated(trial.x, trial.delta, trial.norm, matrix)[0]


# -- a step -----------------------------------------------------------------------------------------------------


def step_of(kernels: Kernels, weights: Weights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """All products of a step with what surrounds them, without rotation and attention."""
    x = x.clone()  # kernels may add to it in place
    delta: torch.Tensor | None = None
    for layer in weights.layers:
        _, x = kernels.norm_linear(x, delta, layer.input_norm, layer.qkv)
        delta = kernels.linear(attended, layer.out)
        gated, x = kernels.norm_gated(x, delta, layer.mlp_norm, layer.gate_up)
        delta = kernels.linear(gated, layer.down)
    return kernels.linear(kernels.add_norm(x, delta, weights.norm)[0], weights.head)


def step_inputs(device: Device, config: ModelConfig, weights: Weights, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random hidden states, and what attention might give."""
    on, dtype = device.torch_device, weights.head.dtype
    attended = torch.randn(count, config.num_heads * config.head_dim, device=on, dtype=dtype)
    return torch.randn(count, config.hidden, device=on, dtype=dtype), attended


def bare_step(weights: Weights, x: torch.Tensor, attended: torch.Tensor, gated: torch.Tensor) -> None:
    """The products alone, by the library."""
    for layer in weights.layers:
        functional.linear(x, layer.qkv.data)
        functional.linear(attended, layer.out.data)
        functional.linear(x, layer.gate_up.data)
        functional.linear(gated, layer.down.data)
    functional.linear(x, weights.head.data)


def steps(device: Device, config: ModelConfig, weights: Weights, chosen: Tuning, tokens: list[int]) -> Figures:
    """Milliseconds of a step's products with each set of kernels."""
    on, dtype = device.torch_device, weights.head.dtype
    read = sum(t.nbytes for layer in weights.layers for t in (layer.qkv, layer.out, layer.gate_up, layer.down))
    floor = (read + weights.head.nbytes) / READ * 1e3
    figures: Figures = {"floor_ms": round(floor, 3)}
    tuned = TritonKernels(on, chosen)
    sets: dict[str, Kernels] = {
        "reference": ReferenceKernels(),
        "library and fused rows": TritonKernels(on, _always(config, tokens, dtype, Choice("library"))),
        "cublasLt and fused rows": TritonKernels(on, _always(config, tokens, dtype, Choice("library_lt"))),
        "tuned": tuned,
    }
    if on.type == "cuda":
        sets["tuned, last norm overlapping"] = TritonKernels(on, chosen, overlap="early")
    else:
        del sets["cublasLt and fused rows"]
    pool = device.new_pool()
    for count in tokens:
        x, attended = step_inputs(device, config, weights, count)
        gated = torch.randn(count, config.intermediate, device=on, dtype=dtype)
        bare = device_us(device, partial(bare_step, weights, x, attended, gated), pool) / 1e3
        row = {"products alone, library": round(bare, 3)}
        wanted = step_of(sets["reference"], weights, x, attended).double()
        for name, kernels in sets.items():
            found = step_of(kernels, weights, x, attended).double()
            ms = device_us(device, partial(step_of, kernels, weights, x, attended), pool) / 1e3
            row[name] = round(ms, 3)
            row[f"{name}: difference"] = float(f"{((found - wanted).norm() / wanted.norm()).item():.2g}")
        figures[f"{count} tokens, ms"] = row
        print(f"step of {count} tokens, floor {floor:.3f} ms:", {k: v for k, v in row.items() if "difference" not in k})
    return figures


def _always(config: ModelConfig, tokens: list[int], dtype: torch.dtype, choice: Choice) -> Tuning:
    return Tuning({product: choice for count in tokens for product in products_of(config, count, dtype)})


# -- the other kernels ------------------------------------------------------------------------------------------


def other_kernels(
    device: Device, config: ModelConfig, dtype: torch.dtype, tokens: list[int], overlap: tuning.Overlap
) -> Figures:
    """Microseconds of one launch, in a graph of many on memory of their own."""
    on, figures, pool = device.torch_device, {}, device.new_pool()
    kernels, reference = TritonKernels(on, Tuning({}), overlap=overlap), ReferenceKernels()
    copies = 36 if on.type == "cuda" else 1
    norm = Norm(torch.ones(config.hidden, device=on, dtype=dtype), 1e-6)
    for count in tokens:
        x, delta = (torch.randn(copies, count, config.hidden, device=on, dtype=dtype) for _ in range(2))
        mixed = torch.randn(copies, count, 2 * config.intermediate, device=on, dtype=dtype)
        calls: dict[str, tuple[Each, Each, int]] = {
            "add_norm": (
                partial(_add_norm, kernels, x, delta, norm),
                partial(_add_norm, reference, x, delta, norm),
                4 * x[0].nbytes,
            ),
            "silu_mul": (partial(_silu_mul, mixed, overlap), partial(_silu_mul_torch, mixed), mixed[0].nbytes * 3 // 2),
            "rotate_and_store": rotations(device, config, dtype, count, copies, kernels, reference),
        }
        for name, (ours, theirs, size) in calls.items():
            figures[f"{name}, {count} tokens"] = _times(device, ours, theirs, size, copies, pool)
        del x, delta, mixed, calls
    return figures


def _add_norm(kernels: Kernels, x: torch.Tensor, delta: torch.Tensor, norm: Norm, index: int) -> object:
    return kernels.add_norm(x[index], delta[index], norm)


def _silu_mul(mixed: torch.Tensor, overlap: tuning.Overlap, index: int) -> object:
    return rows.silu_mul(mixed[index], overlap=overlap)


def _silu_mul_torch(mixed: torch.Tensor, index: int) -> object:
    gate, up = mixed[index].chunk(2, -1)
    return functional.silu(gate) * up


def _times(device: Device, ours: Each, theirs: Each, size: int, copies: int, pool: Any) -> Figures:
    def all_of(call: Each) -> None:
        for index in range(copies):
            call(index)

    us = {
        n: device_us(device, partial(all_of, call), pool) / copies for n, call in (("us", ours), ("torch_us", theirs))
    }
    return {
        **{name: round(time, 2) for name, time in us.items()},
        "gb_per_s": round(size / us["us"] / 1e3, 1),
        "times_floor": round(us["us"] / (size / READ * 1e6), 2),
    }


def rotations(
    device: Device, config: ModelConfig, dtype: torch.dtype, count: int, layers: int, ours: Kernels, theirs: Kernels
) -> tuple[Each, Each, int]:
    """Both implementations on a cache of so many layers, and the bytes that a call moves."""
    on, dim = device.torch_device, config.head_dim
    norms = [Norm(torch.ones(dim, device=on, dtype=dtype), 1e-6) if config.qk_norm else None for _ in range(2)]
    heads = Heads(config.num_heads, config.num_kv_heads, dim, *norms)
    cache = PagedCache.empty(layers, count + 1, 16, config.num_kv_heads, dim, dtype=dtype, device=on)
    table = torch.arange(count + 1, device=on, dtype=torch.int32)[:, None].repeat(1, 4)
    queries = Queries(torch.arange(count, device=on) + 1, torch.arange(count, device=on) % 64, table, True)
    angles = Angles(*(torch.randn(64, dim, device=on) for _ in range(2)))
    qkv = torch.randn(layers, count, (heads.num_heads + 2 * heads.num_kv_heads) * dim, device=on, dtype=dtype)
    nothing = torch.zeros(1, 1, device=on)
    _, places = theirs.embed_tokens(
        nothing, torch.zeros_like(queries.rows), angles, queries, cache.page_size, torch.float32
    )
    return (
        lambda i: ours.rotate_and_store(qkv[i], heads, places, cache, i),
        lambda i: theirs.rotate_and_store(qkv[i], heads, places, cache, i),
        2 * qkv[0].nbytes,
    )


# -- the sampler ------------------------------------------------------------------------------------------------


def samplers(device: Device, vocab: int, dtype: torch.dtype, counts: list[int]) -> Figures:
    """Microseconds of a pick with each sampler, and how many tokens are the same."""
    on, figures, pool = device.torch_device, {}, device.new_pool()
    ours, theirs = TritonSampler(), TorchSampler()
    for count in counts:
        asked = SamplingRows(
            torch.full((count,), 0.8, device=on),
            torch.full((count,), 50, dtype=torch.int32, device=on),
            torch.full((count,), 0.9, device=on),
            torch.zeros(count, device=on),
            torch.randint(0, 1 << 62, (count,), device=on),
            torch.arange(count, device=on),
        )
        # Peaked like those of a language model, and flat like those of random weights.
        flat = torch.randn(count, vocab, device=on)
        for shape, logits in (("peaked", (flat * 3.5).to(dtype)), ("flat", flat.to(dtype))):
            for level in (Sampling.GREEDY, Sampling.SAMPLED, Sampling.TRUNCATED):
                one, other = ours.pick(logits, asked, level), theirs.pick(logits, asked, level)
                figures[f"pick, {level.name.lower()}, {count} rows, {shape}"] = {
                    "us": round(device_us(device, partial(ours.pick, logits, asked, level), pool), 1),
                    "torch_us": round(device_us(device, partial(theirs.pick, logits, asked, level), pool), 1),
                    "same": f"{int((one == other).sum())} of {count}",
                }
        tokens = ours.pick(logits, asked, Sampling.GREEDY)
        figures[f"logprobs, {count} rows"] = {
            "us": round(device_us(device, partial(ours.logprobs, logits, tokens, 20), pool), 1),
            "torch_us": round(device_us(device, partial(theirs.logprobs, logits, tokens, 20), pool), 1),
        }
    return figures


def whole_layers(device: Device, built: Decoder, chosen: Tuning, tokens: list[int]) -> Figures:
    """Hidden states of two layers with reference attention: relative error of both kernels against float64."""
    on, figures = device.torch_device, {}
    config, weights = built.config, replace(built.weights, layers=built.weights.layers[:2])
    exact = _doubled(weights)
    for count in tokens:
        table = torch.arange(1, 5, device=on, dtype=torch.int32)[None].repeat(count + 1, 1)
        table[1:] += 4 * torch.arange(count, device=on, dtype=torch.int32)[:, None]
        queries = Queries(torch.arange(count, device=on) + 1, torch.arange(count, device=on) % 60, table, True)
        ids = torch.randint(0, config.vocab, (count,), device=on)
        states = {}
        for name, kernels, ours in (
            ("exact", ReferenceKernels(), exact),
            ("reference", ReferenceKernels(), weights),
            ("triton", TritonKernels(on, chosen), weights),
        ):
            decoder = replace(built, weights=ours, kernels=kernels, residual=ours.head.dtype)
            cache = CacheGroup.empty(decoder.keeps, 4 * count + 5, 16, dtype=ours.head.dtype, device=on)
            torch.manual_seed(1)
            for part in cache.tensors:
                part.copy_(torch.randn(part.shape, device=on))
            states[name] = decoder.hidden(ids, queries, cache).states.double()
        error = {n: ((states[n] - states["exact"]).norm() / states["exact"].norm()).item() for n in states}
        figures[f"{count} tokens"] = {name: float(f"{e:.2g}") for name, e in error.items() if name != "exact"}
        assert error["triton"] <= max(1e-2, 1.5 * error["reference"]), f"two layers of {count} tokens: {error}"
    return figures


def _doubled(weights: Weights) -> Weights:
    """The same numbers in float64."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.double()
        if isinstance(value, Matrix):
            return Matrix(value.data.double(), None if value.bias is None else value.bias.double())
        if isinstance(value, Norm):
            return Norm(value.weight.double(), value.eps)
        if isinstance(value, Heads | LayerWeights):
            return replace(value, **{name: wide(part) for name, part in vars(value).items()})
        return value

    layers = tuple(wide(layer) for layer in weights.layers)
    return Weights(wide(weights.embedding), layers, wide(weights.norm), Matrix(weights.head.data[:1].double()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: qwen3-8b on a GPU, tiny elsewhere")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1 2 4 8 16 32 64 on a GPU, 1 3 elsewhere")
    parser.add_argument("--sweep", action="store_true", help="measure all ways of computing the products")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the measuring of a sweep, without compiling")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that compile")
    parser.add_argument("--overlap", choices=("none", "late", "early"), default="none", help="of the other kernels")
    parser.add_argument("--all", action="store_true", help="write every measurement of the sweep, not only the best")
    parser.add_argument("--table", type=Path, help="choices to write with --sweep, or to measure the step with")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    args = parser.parse_args()
    device = open_device()
    on_gpu = device.torch_device.type == "cuda"
    config = SHAPES[args.shape or ("qwen3-8b" if on_gpu else "tiny")]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tokens = args.tokens or ([1, 2, 4, 8, 16, 32, 64] if on_gpu else [1, 3])
    hardware = torch.cuda.get_device_name() if on_gpu else "CPU"
    args.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 2
    table = args.table or args.out / "kernels_table.json"
    torch.manual_seed(0)
    figures: Figures = {}
    with torch.no_grad():
        parts = ModelParts(ReferenceAttention(), ReferenceKernels(), max_len=64)
        built = dense.build(config, load_weights(RandomCheckpoint(config), dtype, device.torch_device), parts)
        weights = built.weights
        wanted = [product for count in tokens for product in products_of(config, count, dtype)]
        if args.sweep:
            everything, figures["sweep"] = sweep(device, wanted, args)
            print(tuning.save(decided(device, config, weights, everything, tokens), hardware, table))
        measured = tuning.read(table, hardware)[0] if table.exists() else dict(tuning.load(hardware).measured)
        found = Tuning(measured)
        figures["relative_error"] = accuracy(device, {p: c for p, c in measured.items() if p in set(wanted)})
        figures["step"] = steps(device, config, weights, found, tokens)
        figures["two_layers"] = whole_layers(device, built, found, tokens[:4])
        others = [1, 16, 64, 256, 2048] if on_gpu else [2]
        figures["sampler"] = samplers(device, config.vocab, dtype, [1, 32, 256] if on_gpu else [2])
        figures["kernels"] = other_kernels(device, config, dtype, others, args.overlap)
    print(json.dumps({name: figures[name] for name in figures if name != "sweep"}, indent=1, ensure_ascii=False))
    print(report.write(f"kernels_{'cuda' if on_gpu else 'quick'}", figures, args.out))


if __name__ == "__main__":
    main()
