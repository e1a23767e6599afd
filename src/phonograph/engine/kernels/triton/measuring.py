"""Measures which way of computing a product is fastest on a device; called before capture or by a benchmark, only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median

import torch

from phonograph.devices import Device, MemoryPool
from phonograph.engine.kernels.base import Norm
from phonograph.engine.kernels.triton.products import MAX_TILES, Products
from phonograph.engine.kernels.tuning import MOST_TOKENS, Choice, Product

BYTES_IN_A_CYCLE = 512 << 20
"""Weights that are read before one is read again: several times the largest cache."""
SHARED_BYTES = 227 << 10
_ROUNDS = 5


@dataclass(frozen=True)
class Measurement:
    """One way of computing a product: its microseconds, or why there are none."""

    product: Product
    choice: Choice
    us: float = math.inf
    problem: str = ""


@dataclass(frozen=True)
class Trial:
    """The operands of a product, with so many weights that none is still in a cache when it is read again."""

    product: Product
    x: torch.Tensor
    delta: torch.Tensor
    norm: Norm
    weights: tuple[torch.Tensor, ...]

    @staticmethod
    def of(product: Product, device: torch.device, num_weights: int | None = None) -> Trial:
        rows = product.outputs * (2 if product.op == "norm_gated" else 1)
        size = rows * product.inputs * product.dtype.itemsize
        cycle = 2 if device.type == "cpu" else max(2, min(36, -(-BYTES_IN_A_CYCLE // size)))

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=product.dtype) * scale

        x, delta = random(product.tokens, product.inputs), random(product.tokens, product.inputs)
        weights = tuple(random(rows, product.inputs, scale=product.inputs**-0.5) for _ in range(num_weights or cycle))
        return Trial(product, x, delta, Norm(random(product.inputs), 1e-6), weights)

    def run(self, products: Products, choice: Choice, weight: torch.Tensor) -> torch.Tensor:
        """The product with one of the weights."""
        match self.product.op:
            case "linear":
                return products.linear(choice, self.x, weight)
            case "norm_linear":
                return products.norm_linear(choice, self.x, self.delta, self.norm, weight, None)[0]
            case "norm_gated":
                return products.norm_gated(choice, self.x, self.delta, self.norm, weight)[0]

    def of_tokens(self, tokens: int) -> Trial:
        """The same weights for another number of tokens."""
        shape = (tokens, self.product.inputs)
        return replace(
            self,
            product=replace(self.product, tokens=tokens),
            x=torch.randn(shape, device=self.x.device, dtype=self.x.dtype),
            delta=torch.randn(shape, device=self.x.device, dtype=self.x.dtype),
        )


def candidates(product: Product, multiprocessors: int) -> list[Choice]:
    """The ways worth trying."""
    found = [Choice("library"), Choice("library_lt")]
    if product.tokens == 1:
        found += _whole_vectors(product, multiprocessors)
        found += _blocked_vectors(product)
    if product.tokens <= MOST_TOKENS:
        found += _matrices(product, multiprocessors)
    return found


def _whole_vectors(product: Product, multiprocessors: int) -> Iterator[Choice]:
    block = 1 << (product.inputs - 1).bit_length()
    if block > 16384:
        return
    warps = max(4, min(16, block // 512))
    scale = max(1, 4096 // block)  # narrower weights: more rows, for as many bytes
    for rows, stages in ((1, 1), (2, 1), (4, 1), (1, 3), (2, 3), (2, 4), (4, 3)):
        gated = 2 if product.op == "norm_gated" else 1
        if stages > 1 and stages * gated * rows * scale * block * product.dtype.itemsize > SHARED_BYTES:
            continue
        plain = Choice("vector", rows=rows * scale, block=block, warps=warps, stages=stages)
        for each in (2, 3, 4, 6, 8):
            yield replace(plain, programs=each * multiprocessors)
            if (rows, stages) in ((2, 1), (4, 1), (2, 3)):
                yield replace(plain, programs=each * multiprocessors, ahead=product.inputs)
        yield plain


def _blocked_vectors(product: Product) -> Iterator[Choice]:
    for rows, block, warps, stages in (
        (4, 2048, 8, 3), (8, 1024, 8, 3), (8, 1024, 4, 3), (8, 512, 4, 4), (16, 256, 4, 4), (16, 512, 8, 3),
        (32, 256, 8, 3),
    ):  # fmt: skip
        if block < product.inputs:
            yield Choice("vector", rows=rows, block=block, warps=warps, stages=stages)


# rows, block, warps, stages, swap
_TILES = {
    16: (
        (16, 256, 4, 4, False), (16, 512, 4, 3, False), (32, 128, 4, 6, False), (32, 256, 4, 4, False),
        (64, 64, 4, 8, True), (64, 128, 4, 5, True), (64, 256, 4, 3, True),
    ),
    32: (
        (16, 256, 4, 4, False), (32, 256, 4, 4, False), (64, 64, 4, 8, True), (64, 128, 4, 4, True),
        (64, 128, 4, 6, True), (64, 256, 4, 3, True), (128, 64, 8, 5, True),
    ),
    64: (
        (64, 64, 4, 6, True), (64, 128, 4, 4, True), (64, 128, 4, 5, True), (64, 256, 4, 3, True),
        (128, 64, 4, 5, True), (128, 64, 8, 5, True), (128, 128, 8, 3, True),
    ),
    128: ((64, 64, 4, 5, True), (64, 128, 4, 3, True), (128, 64, 8, 4, True), (128, 128, 8, 3, True)),
}  # fmt: skip


def _matrices(product: Product, multiprocessors: int) -> Iterator[Choice]:
    tokens = max(16, 1 << (product.tokens - 1).bit_length())
    gated = product.op == "norm_gated"
    for rows, block, warps, stages, swap in _TILES[tokens]:
        if block >= 2 * product.inputs:
            continue
        stage = (rows * (2 if gated else 1) + tokens) * block * product.dtype.itemsize
        fitting = min(stages, SHARED_BYTES // stage)
        if fitting < 2:
            continue
        tile = Choice("matrix", rows=rows, block=block, warps=warps, stages=fitting, swap=swap)
        tiles = -(-product.outputs // rows)
        for split in (1, 2, 4, 8):
            is_useful = 0.9 * multiprocessors <= tiles * split <= 6 * multiprocessors
            if split == 1 or (is_useful and not gated and tiles <= MAX_TILES and split * block <= product.inputs):
                yield replace(tile, split=split)
        if product.op != "linear" and product.tokens <= 16:
            deep = min(stages, SHARED_BYTES // (stage + 2 * tokens * block * product.dtype.itemsize))
            if deep >= 2 and block < 512:  # wider ones do not fit into registers
                yield replace(tile, stages=deep, fused=True)


def measure(
    device: Device, trial: Trial, choice: Choice, products: Products, pool: MemoryPool | None = None
) -> Measurement:
    """Microseconds of one product, from one graph over all weights where the device has graphs."""

    def body() -> None:
        for weight in trial.weights:
            trial.run(products, choice, weight)

    try:
        with torch.no_grad():
            trial.run(products, choice, trial.weights[0])
            us = device_us(device, body, pool) / len(trial.weights)
    except Exception as error:  # a choice that this device can't run is a result, whatever it raises
        device.synchronize()
        return Measurement(trial.product, choice, problem=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return Measurement(trial.product, choice, us)


def device_us(device: Device, body: Callable[[], object], pool: MemoryPool | None = None) -> float:
    """Median microseconds of a graph of this body; on the CPU, of the body."""
    if device.torch_device.type == "cpu":
        begin = time.perf_counter()
        body()
        return (time.perf_counter() - begin) * 1e6
    with device.rehearsal(named=False):
        body()  # libraries make their workspaces on the stream that is recorded
    with device.recorder(pool or device.new_pool()) as recorder:
        recorder.begin()
        body()
        graph = recorder.end()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(_ROUNDS):
        begun, ended = device.fence(timed=True), device.fence(timed=True)
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(ended.seconds_since(begun) * 1e6)
    graph.release()
    return median(times)


def tune(
    device: Device,
    wanted: Iterable[Product],
    *,
    multiprocessors: int,
    pdl: bool = False,
    seconds: float = math.inf,
    choices: Callable[[Product, int], list[Choice]] = candidates,
) -> list[Measurement]:
    """Measure every way of computing these products; what `seconds` did not suffice for says so."""
    products, begin, pool = Products(device.torch_device, pdl=pdl), time.monotonic(), device.new_pool()
    found: list[Measurement] = []
    trial: Trial | None = None
    for product in sorted(wanted, key=lambda p: (p.op, p.outputs, p.inputs, p.tokens)):
        if trial is None or replace(trial.product, tokens=product.tokens) != product:
            trial = None  # its weights go before the next ones come
            trial = Trial.of(product, device.torch_device)
        trial = trial.of_tokens(product.tokens)
        for choice in choices(product, multiprocessors):
            if time.monotonic() - begin > seconds:
                found.append(Measurement(product, choice, problem=f"not measured: the {seconds:.0f} s were over"))
            else:
                found.append(measure(device, trial, choice, products, pool))
    return found


def best(measurements: Iterable[Measurement]) -> dict[Product, Choice]:
    """The fastest choice for every product that was measured."""
    fastest: dict[Product, Measurement] = {}
    for one in measurements:
        if one.us < fastest.get(one.product, Measurement(one.product, one.choice)).us:
            fastest[one.product] = one
    return {product: one.choice for product, one in fastest.items()}


def compile_all(
    wanted: Iterable[Product], device: torch.device, multiprocessors: int, *, pdl: bool = False, workers: int = 8
) -> list[str]:
    """Compile the candidates of these products in processes of their own, into the compiler's cache on disk.

    Returns what failed. A kernel that faults takes its process with it and not the caller's device context.
    """
    jobs: dict[tuple[object, ...], tuple[Product, Choice]] = {}
    for product in wanted:
        for choice in candidates(product, multiprocessors):
            if choice.kind in ("vector", "matrix"):
                # The code does not depend on the number of programs and outputs, nor on the tokens that a tile is for.
                tokens = 1 if choice.kind == "vector" else max(16, 1 << (product.tokens - 1).bit_length())
                key = (
                    product.op,
                    product.outputs % 16 == 0,
                    product.inputs,
                    product.dtype,
                    tokens,
                    replace(choice, programs=0),
                )
                jobs.setdefault(key, (product, choice))
    problems = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(_compile, *job, str(device), pdl): job for job in jobs.values()}
        for task in as_completed(tasks):
            if task.exception() is not None:
                product, choice = tasks[task]
                problems.append(f"{product} by {choice}: {task.exception()}".splitlines()[0])
    return problems


def _compile(product: Product, choice: Choice, device: str, pdl: bool) -> None:
    trial = Trial.of(product, torch.device(device), num_weights=1)
    trial.run(Products(torch.device(device), pdl=pdl), choice, trial.weights[0])
    torch.accelerator.synchronize()
