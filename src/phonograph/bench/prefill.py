"""A prefill step, and a request of one token end to end: by tokens, requests and cached prefix."""

from __future__ import annotations

import time

from phonograph.bench.driving import Driver
from phonograph.bench.figures import Spread
from phonograph.bench.floors import Floors
from phonograph.bench.report import Row, Subject
from phonograph.bench.setup import Bench, greedy, row_of
from phonograph.bench.workloads import Prompt, Prompts
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions

SUBJECT = Subject(
    "prefill",
    "A prefill step",
    "ms",
    how="Median time on the device of steps that follow each other, by events, sampling of the first token included; "
    "end to end: wall time of one-token requests to an idle engine. Floor: the step's matrix products alone in one "
    "graph, as torch multiplies, with logits for one token of each request.",
)


def measure(bench: Bench) -> None:
    """Every backend without a prefix first, and then with one."""
    backends = bench.backends("full", "breakable", "disabled")
    for prefix in bench.choose("prefixes", (0, 1024), (0, 16)):
        for index, backend in enumerate(backends):
            if bench.has_time(f"{backend}, prefix of {prefix} tokens"):
                _measure_backend(bench, backend, prefix, with_floors=index == 0)


def _measure_backend(bench: Bench, backend: str, prefix: int, *, with_floors: bool) -> None:
    sizes = bench.choose("tokens", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (8, 16))
    counts = bench.choose("requests", (1, 8), (1, 2))
    llm = _open(bench, backend, prefix, sizes, counts)
    floors = Floors(bench.device, bench.config, llm.executor.model.weights)
    cases = _Cases(bench, llm, backend, prefix)
    for num_requests in counts:
        for num_tokens in sizes:
            if num_tokens < num_requests or not bench.has_time(f"{backend}, {num_tokens} tokens, prefix {prefix}"):
                continue
            cases.measure(num_tokens, num_requests)
            if with_floors:
                floor = floors.gemms(num_tokens, num_requests) * 1e3
                bench.report.add(Row(_case(num_tokens, num_requests, prefix), "floor", "floor", floor))


def _open(bench: Bench, backend: str, prefix: int, sizes: tuple[int, ...], counts: tuple[int, ...]) -> LLM:
    longest = prefix + max(sizes) + 16
    options = EngineOptions(
        max_seqs=4 * max(counts),
        max_tokens=max(*sizes, 4 * max(counts)),
        max_len=longest,
        cache_tokens=6 * longest + 4 * max(counts) * 16,
        prefix_cache=prefix > 0,
    )
    return bench.open(options, {"decode": "disabled", "prefill": backend}, {"prefill": sizes})


def _case(num_tokens: int, num_requests: int, prefix: int) -> dict[str, int | str]:
    return {"tokens": num_tokens, "requests": num_requests, "prefix": prefix}


class _Cases:
    """Measures one engine."""

    def __init__(self, bench: Bench, llm: LLM, backend: str, prefix: int) -> None:
        self._bench = bench
        self._llm = llm
        self._backend = backend
        self._driver = Driver(llm)
        self._prompts = Prompts(bench.config.vocab)
        self._num_prefix = prefix
        self._prefix: Prompt = self._prompts.one(prefix)
        self._rounds = bench.choose("rounds", 10, 2)
        if prefix:
            llm.generate([[*self._prefix, *self._prompts.one(1)]], greedy(1))

    def measure(self, num_tokens: int, num_requests: int) -> None:
        """Add a row."""
        before, runner = self._hits, self._llm.executor.runners["prefill"]
        eager = runner.stats.eager.total()
        warm_ups = 2
        # The first group is launched and not timed, and so are the warm-ups.
        groups = (self._group(num_tokens, num_requests) for _ in range(self._rounds + warm_ups + 1))
        times = self._driver.one_each(groups)[warm_ups:]
        whole = [self._end_to_end(self._group(num_tokens, num_requests)) for _ in range(self._rounds + 1)][1:]
        found = self._hits - before
        asked = (2 * self._rounds + warm_ups + 2) * num_requests * self._num_prefix
        if found != asked:
            self._bench.report.note(f"prefix cache: {found} tokens found where {asked} were expected")
        device, end_to_end = Spread.of([t.device for t in times], 1e3), Spread.of(whole, 1e3)
        figures = {
            "p10_ms": device.p10,
            "p90_ms": device.p90,
            "end_to_end_ms": end_to_end.median,
            "end_to_end_p90_ms": end_to_end.p90,
            "wall_ms": Spread.of([t.wall for t in times], 1e3).median,
            "eager_steps": runner.stats.eager.total() - eager,
        }
        case = _case(num_tokens, num_requests, self._num_prefix)
        self._bench.report.add(row_of(self._backend, case, device.median, figures))

    @property
    def _hits(self) -> int:
        return self._llm.core.scheduler.counts.prefix_hit_tokens

    def _group(self, num_tokens: int, num_requests: int) -> list[Prompt]:
        return [self._prefix + rest for rest in self._prompts.many(num_requests, num_tokens)]

    def _end_to_end(self, group: list[Prompt]) -> float:
        begin = time.perf_counter()
        self._llm.generate(group, greedy(1))
        return time.perf_counter() - begin
