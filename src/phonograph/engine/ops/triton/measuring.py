"""Measuring: the fastest way of computing a product on a device; done before capture or by a benchmark, only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median

import torch

from phonograph.devices import Device, MemoryPool, open_device
from phonograph.engine.ops.kernels import Norm
from phonograph.engine.ops.layers.candidates import Job, candidates, variations
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.triton.products import Products
from phonograph.engine.ops.tuning import Choice, Product
from phonograph.graphs.progress import Progress, silent
from phonograph.sizes import ceil_div, next_power_of_two

BYTES_IN_A_CYCLE = 512 << 20
"""Weights that are read before one is read again: several times the largest cache."""
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
    """The operands of a product, with so many matrices that none is still in a cache when it is read again."""

    product: Product
    x: torch.Tensor
    delta: torch.Tensor
    norm: Norm
    matrices: tuple[Matrix, ...]

    @staticmethod
    def of(product: Product, device: torch.device, num_matrices: int | None = None) -> Trial:
        rows = product.outputs * (2 if product.op == "norm_gated" else 1)
        size = rows * product.inputs * product.dtype.itemsize
        cycle = 2 if device.type == "cpu" else max(2, min(36, ceil_div(BYTES_IN_A_CYCLE, size)))

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=product.dtype) * scale

        x, delta = random(product.tokens, product.inputs), random(product.tokens, product.inputs)
        made = (random(rows, product.inputs, scale=product.inputs**-0.5) for _ in range(num_matrices or cycle))
        return Trial(product, x, delta, Norm(random(product.inputs), 1e-6), tuple(map(Matrix, made)))

    def run(self, products: Products, choice: Choice, matrix: Matrix) -> torch.Tensor:
        """The product with one of the matrices. The sum with delta may take the place of x, which then grows."""
        match self.product.op:
            case "linear":
                return products.linear(choice, self.x, matrix)
            case "norm_linear":
                return products.norm_linear(choice, self.x, self.delta, self.norm, matrix)[0]
            case "norm_gated":
                return products.norm_gated(choice, self.x, self.delta, self.norm, matrix)[0]

    def of_tokens(self, tokens: int) -> Trial:
        """The same matrices for another number of tokens."""
        shape = (tokens, self.product.inputs)
        return replace(
            self,
            product=replace(self.product, tokens=tokens),
            x=torch.randn(shape, device=self.x.device, dtype=self.x.dtype),
            delta=torch.randn(shape, device=self.x.device, dtype=self.x.dtype),
        )


def measure(
    device: Device, trial: Trial, choice: Choice, products: Products, pool: MemoryPool | None = None
) -> Measurement:
    """Microseconds of one product, from one graph over all matrices where the device has graphs."""

    def body() -> None:
        for matrix in trial.matrices:
            trial.run(products, choice, matrix)

    try:
        with torch.no_grad():
            trial.run(products, choice, trial.matrices[0])
            us = device_us(device, body, pool) / len(trial.matrices)
    except Exception as error:  # a choice that this device can't run counts as a result, whatever it raises
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


def measure_all(
    device: Device, jobs: Iterable[Job], *, seconds: float = math.inf, progress: Progress = silent
) -> list[Measurement]:
    """Measure these ways of computing products; what `seconds` did not suffice for says so."""
    products, begin, pool = Products(device.torch_device), time.monotonic(), device.new_pool()
    found: list[Measurement] = []
    trial: Trial | None = None
    ordered = sorted(jobs, key=lambda job: (job[0].op, job[0].outputs, job[0].inputs, job[0].tokens))
    for product, choice in ordered:
        if trial is None or replace(trial.product, tokens=product.tokens) != product:
            trial = None  # its matrices go before the next ones come
            trial = Trial.of(product, device.torch_device)
        if trial.product != product:
            trial = trial.of_tokens(product.tokens)
        if time.monotonic() - begin > seconds:
            found.append(Measurement(product, choice, problem=f"not measured: the {seconds:.0f} s were over"))
        else:
            found.append(measure(device, trial, choice, products, pool))
        progress("measuring kernels", len(found), len(ordered))
    return found


def best(measurements: Iterable[Measurement]) -> dict[Product, Choice]:
    """The fastest choice for every product that was measured."""
    fastest: dict[Product, Measurement] = {}
    for one in measurements:
        if one.us < fastest.get(one.product, Measurement(one.product, one.choice)).us:
            fastest[one.product] = one
    return {product: one.choice for product, one in fastest.items()}


def tune(
    device: Device,
    wanted: Iterable[Product],
    *,
    multiprocessors: int,
    workers: int = 8,
    seconds: float = math.inf,
    progress: Progress = silent,
) -> list[Measurement]:
    """Measure every candidate for these products, then variations of the fastest; compiles in other processes first."""
    jobs = [(product, choice) for product in wanted for choice in candidates(product, multiprocessors)]
    compile_all(jobs, device.torch_device, workers)
    begin = time.monotonic()
    found = measure_all(device, jobs, seconds=seconds, progress=progress)
    left = seconds - (time.monotonic() - begin)
    again = variations((one.product, one.choice, one.us) for one in found)
    compile_all(again, device.torch_device, workers)
    return found + measure_all(device, again, seconds=left, progress=progress)


def compile_all(jobs: Iterable[Job], device: torch.device, workers: int = 8) -> list[str]:
    """Compile these kernels in processes of their own, into the compiler's cache on disk; returns what failed.

    A kernel that faults takes its process with it and not the caller's device context.
    """
    distinct: dict[tuple[object, ...], Job] = {}
    for product, choice in jobs:
        # The code does not depend on the number of programs and outputs, nor on the tokens that a tile is for.
        tokens = max(1 if choice.kind == "vector" else 16, next_power_of_two(product.tokens))
        key = (
            product.op,
            product.outputs % 16 == 0,
            product.inputs,
            product.dtype,
            tokens,
            replace(choice, programs=0),
        )
        if choice.kind in ("vector", "matrix"):
            distinct.setdefault(key, (product, choice))
    problems = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(_compile, *job, str(device)): job for job in distinct.values()}
        for task in as_completed(tasks):
            if task.exception() is not None:
                product, choice = tasks[task]
                problems.append(f"{product} by {choice}: {task.exception()}".splitlines()[0])
    return problems


def _compile(product: Product, choice: Choice, device: str) -> None:
    on = open_device(device)
    trial = Trial.of(product, on.torch_device, num_matrices=1)
    trial.run(Products(on.torch_device), choice, trial.matrices[0])
    on.synchronize()
