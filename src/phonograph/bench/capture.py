"""Capture cost: seconds and bytes of all default buckets, by phase and axis product, warm-up and capture apart."""

from __future__ import annotations

import time
from collections import defaultdict

from phonograph.bench.figures import rounded
from phonograph.bench.measurement import Bench, row_of
from phonograph.bench.report import Subject
from phonograph.engine.options import EngineOptions
from phonograph.graphs.progress import silent
from phonograph.graphs.recording.capture_report import CaptureReport

SUBJECT = Subject(
    "capture",
    "Recording all default buckets",
    "s",
    how="Seconds of warm-up and capture of a phase when kernels are loaded already; `first` is what the same took when "
    "the process had just started. All phases are warmed before one is recorded: the wait for the device counts to "
    "prefill. Bytes: by how much memory in use grew with the first recordings.",
)


def measure(bench: Bench) -> None:
    """Decode as `full`, prefill on every backend."""
    for index, backend in enumerate(bench.backends("full", "breakable")):
        if backend != "disabled" and bench.has_time(f"capture, {backend}"):
            _measure_backend(bench, backend, with_decode=index == 0)


def _measure_backend(bench: Bench, backend: str, *, with_decode: bool) -> None:
    # The KV cache has no part in it; with a size given, it needs no rehearsal, so the first capture is the first.
    options = EngineOptions(cache_tokens=4096)
    if bench.settings.quick:
        options = EngineOptions(max_seqs=4, max_tokens=16, max_len=64, cache_tokens=256)
    begin = time.perf_counter()
    llm = bench.open(options, {"decode": "full" if with_decode else "disabled", "prefill": backend})
    bench.report.fact(f"engine_open_s_{backend}", time.perf_counter() - begin)
    first = {report.rows[0].key.phase: report for report in llm.reports if report.rows}
    # Once more, with warm kernels; the graphs find the memory that the first ones left in the pool.
    begin = time.perf_counter()
    again = {report.rows[0].key.phase: report for report in llm.executor.capture(silent) if report.rows}
    seconds = time.perf_counter() - begin
    phases = ("decode", "prefill") if with_decode else ("prefill",)
    for phase in phases:
        _add_phase(bench, backend, phase, again[phase], first[phase])
    if with_decode:
        total = {
            "seconds": rounded(seconds),
            "first_s": rounded(sum(first[phase].seconds for phase in phases)),
            "recordings": sum(len(again[phase].rows) for phase in phases),
            "mb": rounded(sum(row.num_bytes for phase in phases for row in first[phase].rows) / 1e6),
        }
        bench.report.fact(f"all_{backend}", total)


def _add_phase(bench: Bench, backend: str, phase: str, again: CaptureReport, first: CaptureReport) -> None:
    products: defaultdict[str, list[float]] = defaultdict(list)
    memory: defaultdict[str, int] = defaultdict(int)
    for row in again.rows:
        products[row.key.axes or "plain"].append(row.seconds)
    for row in first.rows:
        memory[row.key.axes or "plain"] += row.num_bytes
    figures = {
        "first_s": rounded(first.seconds),
        "warm_up_s": rounded(again.warm_seconds),
        "first_warm_up_s": rounded(first.warm_seconds),
        "recordings": len(again.rows),
        "graphs": sum(row.num_graphs for row in again.rows),
        "failed": len(again.failures),
        "mb": rounded(sum(memory.values()) / 1e6),
        "slowest_ms": rounded(max((row.seconds for row in again.rows), default=0.0) * 1e3),
        "products": {
            name: {"recordings": len(times), "seconds": rounded(sum(times)), "mb": rounded(memory[name] / 1e6)}
            for name, times in products.items()
        },
    }
    bench.report.add(row_of("full" if phase == "decode" else backend, {"phase": phase}, again.seconds, figures))
