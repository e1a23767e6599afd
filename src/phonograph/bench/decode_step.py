"""Decode step: a steady one through the engine: time on the device and on the host, launches, copies and gaps."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.figures import Spread, rounded
from phonograph.bench.floors import Floors
from phonograph.bench.measurement import Bench, greedy, row_of
from phonograph.bench.profiling import profiled
from phonograph.bench.report import Row, Subject
from phonograph.bench.workloads import Prompts
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions

SUBJECT = Subject(
    "decode_step",
    "A decode step of a steady batch",
    "ms",
    how="Events: median time on the device of consecutive steps, the context growing by one token a step. Slope: from "
    "two end-to-end runs of 4 and 132 new tokens, as peers are measured. Floor: the step's matrix products alone, in "
    "one graph, as torch multiplies, plus keys and values at read bandwidth.",
)
EVENTS, SLOPE = "events", "slope"
_WARM_UPS = 10
_HOST_STEPS = 20
_PROFILED_STEPS = 10


@dataclass(frozen=True)
class _Slope:
    """Two end-to-end runs of different lengths, which differ by decode steps alone: any engine can be measured so."""

    prompt: int
    short: int
    long: int

    def seconds(self, llm: LLM, prompts: Prompts, num_seqs: int) -> float:
        """Seconds a step."""

        def run(new_tokens: int) -> float:
            batch = [prompts.one(self.prompt) for _ in range(num_seqs)]
            begin = time.perf_counter()
            llm.generate(batch, greedy(new_tokens))
            return time.perf_counter() - begin

        run(self.short)
        short, long = (min(run(count) for _ in range(2)) for count in (self.short, self.long))
        return (long - short) / (self.long - self.short)


_USUAL_SLOPE, _QUICK_SLOPE = _Slope(440, 4, 132), _Slope(8, 2, 8)


def measure(bench: Bench) -> None:
    """Every backend at every batch; then the first backend as other engines are measured, and under the profiler."""
    batches = bench.choose("batches", (1, 8, 32, 128, 256), (1, 2))
    backends = bench.backends("full", "disabled")
    for index, backend in enumerate(backends):
        _measure_backend(bench, backend, batches, is_first=index == 0)
    if bench.device.torch_device.type != "cpu":
        _profile_backend(bench, backends[0], batches)


def _open(bench: Bench, backend: str, batches: tuple[int, ...]) -> LLM:
    slope = _slope(bench)
    last = max(_context(bench) + _steps(bench), slope.prompt + slope.long)
    max_len = last + _WARM_UPS + _HOST_STEPS + _PROFILED_STEPS + 64
    options = EngineOptions(
        max_seqs=max(batches),
        max_tokens=max(8192 if not bench.settings.quick else 64, *batches),
        max_len=max_len,
        cache_tokens=(max_len + 16) * max(batches),
        prefix_cache=False,
    )
    return bench.open(options, {"decode": backend, "prefill": "disabled"}, {"decode": batches})


def _context(bench: Bench) -> int:
    return bench.choose("context", 462, 40)


def _steps(bench: Bench) -> int:
    return bench.choose("steps", 100, 5)


def _slope(bench: Bench) -> _Slope:
    return bench.choose("slope", _USUAL_SLOPE, _QUICK_SLOPE)


def _measure_backend(bench: Bench, backend: str, batches: tuple[int, ...], *, is_first: bool) -> None:
    if not bench.has_time(f"decode steps, {backend}"):
        return
    llm = _open(bench, backend, batches)
    driver, prompts = EngineDriver(llm), Prompts(bench.config.vocab)
    floors = Floors(bench.device, llm.executor.model)
    if is_first:
        bench.report.fact("read_bandwidth_tb_s", floors.bandwidth / 1e12)
        bench.report.fact("weights_at_bandwidth_ms", floors.weights_read() * 1e3)
        bench.report.fact("kv_bytes_per_token", floors.kv_bytes_per_token)
    for num_seqs in batches:
        if bench.has_time(f"{num_seqs} sequences, {backend}"):
            context = _measure_batch(bench, llm, driver, prompts, num_seqs, backend)
            if is_first:
                _add_floor(bench, floors, num_seqs, context)
                seconds = _slope(bench).seconds(llm, prompts, num_seqs)
                bench.report.add(row_of(backend, {"seqs": num_seqs, "by": SLOPE}, seconds * 1e3))
    if backend != "disabled" and (eager := llm.executor.runners["decode"].stats.eager.total()):
        bench.report.note(f"{eager} decode steps of {backend} ran eagerly")


def _measure_batch(
    bench: Bench, llm: LLM, driver: EngineDriver, prompts: Prompts, num_seqs: int, backend: str
) -> float:
    """Add a row; returns the mean context of the steps."""
    steps, first = _steps(bench), _context(bench)
    # While later prompts are prefilled the first ones decode already: so half the prefill steps are context too.
    prefill_steps = -(-num_seqs * first // llm.limits.max_tokens)
    length = max(1, first - 1 - _WARM_UPS - prefill_steps // 2)
    room = steps + _WARM_UPS + _HOST_STEPS + prefill_steps + 8
    sequences = driver.seat([prompts.one(length) for _ in range(num_seqs)], room)
    driver.steady(_WARM_UPS)
    begin = statistics.mean(sequence.num_computed for sequence in sequences)
    times = driver.steady(steps)
    end = statistics.mean(sequence.num_computed for sequence in sequences)
    host = driver.host_alone(_HOST_STEPS if not bench.settings.quick else 3)
    driver.drain(sequences)
    device, wall = Spread.of([t.device for t in times], 1e3), Spread.of([t.wall for t in times], 1e3)
    figures = {
        "p10_ms": device.p10,
        "p90_ms": device.p90,
        "wall_ms": wall.median,
        "host_us": rounded(statistics.median(host) * 1e6),
        "idle_share": rounded(1 - sum(t.device for t in times) / sum(t.wall for t in times), 3),
        "context": f"{begin:.0f} to {end:.0f}",
    }
    bench.report.add(row_of(backend, {"seqs": num_seqs, "by": EVENTS}, device.median, figures))
    return (begin + end) / 2


def _add_floor(bench: Bench, floors: Floors, num_seqs: int, context: float) -> None:
    figures = {
        "gemms_ms": rounded(floors.gemms(num_seqs, num_seqs) * 1e3),
        "kv_ms": rounded(floors.kv_read(num_seqs * context) * 1e3),
    }
    floor = floors.decode_step(num_seqs, context) * 1e3
    for how in (EVENTS, SLOPE):
        bench.report.add(Row({"seqs": num_seqs, "by": how}, "floor", "floor", floor, figures))


def _profile_backend(bench: Bench, backend: str, batches: tuple[int, ...]) -> None:
    """In an engine of its own, when all times are taken: the profiler slows down what comes after it."""
    if not bench.has_time(f"profile, {backend}"):
        return
    llm = _open(bench, backend, batches)
    driver, prompts = EngineDriver(llm), Prompts(bench.config.vocab)
    found = {}
    for num_seqs in batches:
        length = max(1, _context(bench) - 1 - _WARM_UPS)
        sequences = driver.seat([prompts.one(length) for _ in range(num_seqs)], _steps(bench))
        driver.steady(_WARM_UPS)
        found[str(num_seqs)] = profiled(driver.steady, _PROFILED_STEPS, bench.device).as_json()
        driver.drain(sequences)
        bench.report.fact("profile", dict(found))
