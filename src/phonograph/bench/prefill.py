"""Prefill step: by tokens, requests and cached prefix; and a request of one token end to end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from phonograph.bench.engine_driver import EngineDriver, StepTime
from phonograph.bench.figures import Spread
from phonograph.bench.floors import Floors
from phonograph.bench.measurement import Bench, greedy, row_of
from phonograph.bench.report import Row, Subject
from phonograph.bench.workloads import Ids, Prompts
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions

SUBJECT = Subject(
    "prefill",
    "A prefill step",
    "ms",
    how="Step: median time on the device of steps that follow each other, by events, sampling included. "
    "End to end: wall time of one-token requests to an idle engine, as peers are measured. Floor: the step's matrix "
    "products alone in one graph, as torch multiplies, with logits for one token of each request.",
)


STEP, END_TO_END = "step", "end to end"
_BEHIND = 16
"""Places of a sequence after its prompt."""
_WARM_UPS = 2


def measure(bench: Bench) -> None:
    """Every backend without a prefix first, and then with one."""
    backends = bench.backends("full", "breakable", "disabled")
    for prefix in bench.choose("prefixes", (0, 1024), (0, 16)):
        for index, backend in enumerate(backends):
            if bench.has_time(f"{backend}, prefix of {prefix} tokens"):
                _measure_backend(bench, backend, prefix, with_floors=index == 0)


def _measure_backend(bench: Bench, backend: str, prefix: int, *, with_floors: bool) -> None:
    chosen = bench.choose("tokens", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (8,))
    sizes = tuple(size for size in chosen if prefix + size + _BEHIND <= bench.config.max_len)
    if len(sizes) < len(chosen):
        bench.report.note(
            f"left out: sizes that do not fit the context of {bench.config.max_len:,} after a prefix of {prefix:,}"
        )
    if not sizes:
        return
    counts = bench.choose("requests", (1, 8), (1, 2))
    llm = open_prefill(bench, backend, prefix, sizes, counts)
    floors = Floors(bench.device, llm.executor.model)
    cases = PrefillCases(bench, llm, prefix)
    for num_requests in counts:
        for num_tokens in sizes:
            if num_tokens < num_requests or not bench.has_time(f"{backend}, {num_tokens} tokens, prefix {prefix}"):
                continue
            case: dict[str, int | str] = {"tokens": num_tokens, "requests": num_requests, "prefix": prefix}
            _measure_case(bench, cases, backend, case)
            if with_floors:
                floor = floors.gemms(num_tokens, num_requests) * 1e3
                for how in (STEP, END_TO_END):
                    bench.report.add(Row({**case, "by": how}, "floor", "floor", floor))


def open_prefill(bench: Bench, backend: str, prefix: int, sizes: tuple[int, ...], counts: tuple[int, ...]) -> LLM:
    """An engine for prefill steps of these sizes, by these numbers of requests; decode is never run."""
    longest = prefix + max(sizes) + _BEHIND
    # Steps in flight, and one row more: as many rows as a bucket has tokens could not be distinguished from them.
    max_seqs = 4 * max(counts) + 1
    options = EngineOptions(
        max_seqs=max_seqs,
        max_tokens=max(*sizes, max_seqs),
        max_len=longest,
        cache_tokens=6 * longest + max_seqs * 16,
        prefix_cache=prefix > 0,
    )
    return bench.open(options, {"decode": "disabled", "prefill": backend}, {"prefill": sizes})


def _measure_case(bench: Bench, cases: PrefillCases, backend: str, case: Mapping[str, int | str]) -> None:
    num_tokens, num_requests = int(case["tokens"]), int(case["requests"])
    eager = cases.num_eager
    times = cases.steps(num_tokens, num_requests)
    device, wall = (Spread.of(values, 1e3) for values in ([t.device for t in times], [t.wall for t in times]))
    figures = {"p10_ms": device.p10, "p90_ms": device.p90, "wall_ms": wall.median}
    if backend != "disabled" and cases.num_eager > eager:
        bench.report.note(f"{cases.num_eager - eager} steps of {num_tokens} tokens ran eagerly, {backend}")
    bench.report.add(row_of(backend, {**case, "by": STEP}, device.median, figures))
    whole = Spread.of(cases.end_to_end(num_tokens, num_requests), 1e3)
    figures = {"p10_ms": whole.p10, "p90_ms": whole.p90}
    bench.report.add(row_of(backend, {**case, "by": END_TO_END}, whole.median, figures))


class PrefillCases:
    """Times prefill steps of one engine."""

    def __init__(self, bench: Bench, llm: LLM, prefix: int) -> None:
        self._bench = bench
        self._llm = llm
        self._driver = EngineDriver(llm)
        self._prompts = Prompts(bench.config.vocab)
        self._prefix: Ids = self._prompts.one(prefix)
        self._rounds = bench.choose("rounds", 10, 2)
        if prefix:
            llm.generate([[*self._prefix, *self._prompts.one(1)]], greedy(1))

    @property
    def num_eager(self) -> int:
        """Steps so far that no recording served."""
        return self._llm.executor.runners["prefill"].stats.eager.total()

    def steps(self, num_tokens: int, num_requests: int) -> list[StepTime]:
        """Steps that are launched one after the other, so the device does not wait for the host."""
        # The first group is launched and not timed. All are made before: the host's random numbers take their time.
        groups = [self._group(num_tokens, num_requests) for _ in range(self._rounds + _WARM_UPS + 1)]
        with self._all_prefixes_found(num_requests * (self._rounds + _WARM_UPS + 1)):
            return self._driver.one_each(groups)[_WARM_UPS:]

    def end_to_end(self, num_tokens: int, num_requests: int) -> list[float]:
        """Seconds from the call to the tokens, the engine idle before."""
        times = []
        with self._all_prefixes_found(num_requests * (self._rounds + 1)):
            for _ in range(self._rounds + 1):
                group = self._group(num_tokens, num_requests)
                begin = time.perf_counter()
                self._llm.generate(group, greedy(1))
                times.append(time.perf_counter() - begin)
        return times[1:]

    def _group(self, num_tokens: int, num_requests: int) -> list[Ids]:
        return [self._prefix + rest for rest in self._prompts.many(num_requests, num_tokens)]

    @contextmanager
    def _all_prefixes_found(self, num_requests: int) -> Iterator[None]:
        """Note it where the prefix cache did not have what the case is about."""
        scheduler = self._llm.core.scheduler
        before = scheduler.counts.prefix_hit_tokens
        yield
        found, expected = scheduler.counts.prefix_hit_tokens - before, num_requests * len(self._prefix)
        if found != expected:
            self._bench.report.note(f"prefix cache: {found} tokens found where {expected} were expected")
