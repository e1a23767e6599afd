"""What the counters of a step cost: microseconds of host time of everything that /metrics counts in a step.

Run: python bench/counters.py [--device cuda] [--shape tiny] [--rounds 30] [--out bench/results]

Two ways. *Alone*: the code that counts, on an engine's own objects, in a loop; the fastest round in CPU time. The goal
is for this figure. *By difference*: steps of an engine, and calls of a `Graphed`, with counting and without it, in
turns, the fastest in CPU time. That has the noise of whole steps in it: it shows that the first way leaves nothing
large out. Stats for the front, made every 0.25 s whatever the number of steps, and what the front's own process counts,
are apart.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import report
import torch

from phonograph import Graphed, Slot, graphed
from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.workloads import Prompts
from phonograph.devices import Device, Fence, open_device
from phonograph.engine.checkpoints import random_checkpoint
from phonograph.engine.execution.step_timing import ALL_OF_FIRST, EVERY, StepTiming, TimedSteps
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.core_loop import STATS_SECONDS
from phonograph.engine.process.statistics import engine_stats
from phonograph.engine.requests.step import kind_of
from phonograph.graphs.phases.decisions import Reason, ReplayCounts, RunEagerly, Stats
from phonograph.graphs.progress import silent
from phonograph.server.observe.metrics import Metrics

GOAL_US = 2.0
_CALLS = 200
"""In a round, after which the device is drained: a full queue of fences would make the host wait."""
_STEPS = 50
_SEQS = 4
_TINY: dict[str, Any] = {"max_seqs": 4, "max_tokens": 64, "max_len": 128}
Figures = dict[str, Any]


def cost_us(call: Callable[[], object], device: Device, rounds: int) -> float:
    """The fastest round in CPU time, less an empty loop."""

    def fastest(call: Callable[[], object]) -> float:
        times = []
        for _ in range(rounds):
            device.synchronize()
            begin = time.thread_time()
            for _ in range(_CALLS):
                call()
            times.append(time.thread_time() - begin)
        return min(times) / _CALLS * 1e6

    return max(0.0, fastest(call) - fastest(lambda: None))


class Counts:
    """The scheduler's counts of launched steps and generated tokens: two numbers of an object."""

    def __init__(self) -> None:
        self._launched = self._generated_tokens = 0

    def count(self, updates: list[Any]) -> None:
        self._launched += 1
        self._generated_tokens += len(updates)


def alone(llm: LLM, rounds: int) -> Figures:
    """Microseconds of each kind of count."""
    executor, device = llm.executor, llm.device
    runner = executor.runners["decode"]
    replayed, counted = ReplayCounts(), Stats()
    refusal = RunEagerly(Reason.DISABLED, "the backend of decode is disabled")
    begun, done = device.fence(timed=True), device.fence(timed=True)
    begun.record()
    done.record()
    device.synchronize()
    phase = runner.phase.name
    steps = StepTiming(device, 4, executor.runners).steps
    timed = steps[phase, "plain"]
    counts, updates, tokens_per_row = Counts(), [()] * _SEQS, 1
    measured = itertools.cycle([begun, *[None] * (EVERY - 1)])
    for _ in range(ALL_OF_FIRST):
        timed.begin()

    def begin() -> Fence | None:
        return steps[phase, kind_of(tokens_per_row)].begin()

    calls: dict[str, Callable[[], object]] = {
        "replays and rows by key": lambda: replayed.add(_SEQS),
        "device time: the fence before one step in sixteen": begin,
        "device time: read and added": lambda: timed.add("replay", next(measured), done),
        "steps and tokens": lambda: counts.count(updates),
        "whether stats are due": lambda: time.monotonic() >= STATS_SECONDS,
    }
    found = {name: cost_us(call, device, rounds) for name, call in calls.items()}
    found["all of a replayed step"] = sum(found.values())
    found["an eager step's reason instead of a replay"] = cost_us(
        lambda: counted.count_eager(refusal, phase), device, rounds
    )
    return found


def apart(llm: LLM, rounds: int) -> Figures:
    """What is not of a step: stats for the front, and what the front counts of each sequence's tokens."""
    encode, metrics = msgspec.msgpack.Encoder().encode, Metrics()
    stats = min(
        cost_us(lambda: encode(engine_stats(llm.core)), llm.device, 1) for _ in range(max(1, rounds // 10))
    )  # 200 of them are a round
    return {
        "stats for the front, us": stats,
        "stats for the front, recordings": sum(len(one.captured) for one in llm.executor.runners.values()),
        "stats for the front, share of the time": stats / (STATS_SECONDS * 1e6),
        "front: the gap between a sequence's tokens, us": cost_us(lambda: metrics.token_gap(0.01), llm.device, rounds),
    }


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, nothing is counted, and no step is timed; calls that do nothing remain."""
    with ExitStack() as stack:
        counting = (ReplayCounts, "add"), (Stats, "count_eager"), (TimedSteps, "begin"), (TimedSteps, "add")
        for counter, name in counting:
            stack.enter_context(patch.object(counter, name, lambda *counted: None))
        yield


def compared(counted: Callable[[], float], without: Callable[[], float], rounds: int) -> Figures:
    """All take turns, forth and back: with counting, without, and with it once more, which shows the noise."""
    times: list[list[float]] = [[], [], []]
    for turn in range(rounds):
        order = ((0, counted), (1, without), (2, counted))
        for place, measure in order if turn % 2 else order[::-1]:
            times[place].append(measure() * 1e6)
    with_us, without_us, again = map(min, times)
    return {
        "with_us": with_us,
        "without_us": without_us,
        "difference_us": with_us - without_us,
        "noise_us": abs(with_us - again),
    }


def by_steps(llm: LLM, rounds: int) -> Figures:
    """Steady decode steps of an engine; the device is drained before each, so that the host's work alone is timed."""
    driver, prompts = EngineDriver(llm), Prompts(llm.executor.vocab)
    llm.executor.timing.every = EVERY  # as in service; of which a mean has one or so

    def counted() -> float:
        driver.seat([prompts.one(9) for _ in range(_SEQS)], 2 * _STEPS)
        driver.steady(_STEPS // 5)
        times = []
        for _ in range(_STEPS):
            llm.device.synchronize()
            begin = time.thread_time()
            driver.step()
            times.append(time.thread_time() - begin)
        driver.drain()
        return min(statistics.fmean(times[at : at + EVERY]) for at in range(0, _STEPS - EVERY + 1, EVERY))

    def without() -> float:
        with uncounted():
            return counted()

    return compared(counted, without, rounds)


def by_calls(device: Device, rounds: int) -> Figures:
    """Calls of a small `Graphed`."""
    run: Graphed = graphed(
        torch.nn.Linear(4, 4).to(device.torch_device),
        slots=[Slot("input", ("rows", 4), torch.float32)],
        bucketed="rows",
        buckets=[4],
        device=device,
        facts="off",
    )
    run.capture(silent)
    batch = torch.ones(2, 4, device=device.torch_device)

    def counted() -> float:
        device.synchronize()
        begin = time.thread_time()
        for _ in range(_STEPS):
            run(batch)
        return (time.thread_time() - begin) / _STEPS

    def without() -> float:
        with uncounted():
            return counted()

    counted()
    return compared(counted, without, rounds)


def rounded(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return float(f"{figures:.4g}") if isinstance(figures, float) else figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "emulated")
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    args = parser.parse_args()
    device = open_device(args.device)
    options = EngineOptions(prefix_cache=False, verify="off", **(_TINY if args.shape == "tiny" else {}))
    llm = LLM(random_checkpoint(args.shape, options.model_impl), device=device, options=options, progress=silent)
    stepped = by_steps(llm, args.rounds)
    figures = rounded(
        {
            "shape": args.shape,
            "goal_us": GOAL_US,
            "alone, us": alone(llm, args.rounds),
            "by difference: engine steps": stepped,
            "by difference: Graphed calls": by_calls(device, args.rounds),
            "apart": apart(llm, args.rounds),
        }
    )
    for title, part in figures.items():
        print(title if isinstance(part, dict) else f"{title}: {part}")
        for name, value in part.items() if isinstance(part, dict) else ():
            print(f"  {name:<50} {value}")
    print(report.write(f"counters_{device.name}", figures, args.out))


if __name__ == "__main__":
    main()
