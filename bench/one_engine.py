"""One engine of a shape, measured whole: start, steady decode, prompts, W1. For two trees or backends in one hold.

Run: PYTHONPATH=TREE/src python bench/one_engine.py LABEL [--shape qwen3-8b] [--options '{"verify": "off"}']
     [--plan decode.backend=tc_piecewise tc_compiler=inductor] [--device cuda] [--quick] [--start-only]
Prints a line of JSON. Run it once before, so that kernels are compiled and tuned. `--quick` shows in seconds that it
runs, also on the emulated device.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.measurement import greedy
from phonograph.bench.workloads import MOST_ID, Prompts, w1
from phonograph.engine.checkpoints import random_checkpoint
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.recording.backends.tc_piecewise import TcPiecewiseBackend


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    decodes: tuple[int, ...] = (1, 32, 128)
    prompt: int = 440
    steps: int = 100
    host_steps: int = 20
    cases: tuple[tuple[int, int], ...] = ((1, 128), (8, 128), (1, 2048))
    """Requests, and the tokens that they have together."""
    rounds: int = 20
    w1_runs: int = 2


QUICK = Sizes(decodes=(1, 3), prompt=9, steps=4, host_steps=2, cases=((1, 8), (3, 8), (1, 24)), rounds=2, w1_runs=1)


def decoded(llm: LLM, prompts: Prompts, num_seqs: int, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of steady steps."""
    driver = EngineDriver(llm)
    warm_ups = sizes.steps // 10
    driver.seat([prompts.one(sizes.prompt) for _ in range(num_seqs)], sizes.steps + warm_ups + 3 * sizes.host_steps)
    driver.steady(warm_ups)
    times, host = driver.steady(sizes.steps), driver.host_alone(sizes.host_steps)
    driver.drain()
    return {
        "device_ms": statistics.median(one.device for one in times) * 1e3,
        "wall_ms": statistics.median(one.wall for one in times) * 1e3,
        "host_us": statistics.median(host) * 1e6,
    }


def prefilled(llm: LLM, prompts: Prompts, num_requests: int, num_tokens: int, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of steps that follow each other, and of requests for one token to an idle engine."""
    groups = [list(prompts.many(num_requests, num_tokens)) for _ in range(sizes.rounds + 3)]
    steps = EngineDriver(llm).one_each(groups)[2:]
    whole = []
    for _ in range(sizes.rounds + 1):
        group = list(prompts.many(num_requests, num_tokens))
        begin = time.perf_counter()
        llm.generate(group, greedy(1))
        whole.append(time.perf_counter() - begin)
    return {
        "device_ms": statistics.median(one.device for one in steps) * 1e3,
        "end_to_end_ms": statistics.median(whole[1:]) * 1e3,
    }


def throughput(llm: LLM, prompts: Prompts, vocab: int, sizes: Sizes) -> list[float]:
    """Tokens a second of runs of W1."""
    batch, found = w1(ids=min(MOST_ID, vocab)), []
    asked, new_tokens = list(batch.prompts), batch.new_tokens
    if sizes is QUICK:
        asked, new_tokens = [prompts.one(length) for length in (3, 9, 20)], 4
    for _ in range(sizes.w1_runs):
        begin = time.perf_counter()
        done = llm.generate(asked, greedy(new_tokens))
        found.append(sum(len(one.tokens) for one in done) / (time.perf_counter() - begin))
    return found


class Parts:
    """Seconds of a start, by what its progress tells; `before X` is what passes until the first word about X."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._told = time.perf_counter()

    def __call__(self, doing: str, done: int, total: int) -> None:
        now, name = time.perf_counter(), re.split(r"[\[:,]", doing)[0]
        self.seconds[name if name in self.seconds else f"before {name}"] += now - self._told
        self.seconds[name] += 0.0
        self._told = now


def started(llm: LLM) -> dict[str, Any]:
    """What the start took, by phase."""
    found: dict[str, Any] = {
        "capture_s": sum(report.seconds for report in llm.reports),
        "warm_up_s": sum(report.warm_seconds for report in llm.reports),
        "graph_bytes": sum(row.num_bytes for report in llm.reports for row in report.rows),
        "num_recordings": sum(row.error is None for report in llm.reports for row in report.rows),
        "failures": [str(row.error) for report in llm.reports for row in report.failures],
        "verify_s": {name: report.seconds for name, report in llm.verified.items()},
        "backends": {name: runner.backend.name for name, runner in llm.executor.runners.items()},
    }
    for name, runner in llm.executor.runners.items():
        backend = runner.backend
        if isinstance(backend, TcPiecewiseBackend):
            found.setdefault("trace_s", {})[name] = backend.seconds - backend.compile_seconds
            found.setdefault("compile_s", {})[name] = backend.compile_seconds
            found.setdefault("notes", {})[name] = list(backend.notes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("label")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as JSON")
    parser.add_argument(
        "--plan", nargs="*", default=[], help="settings of the plan: decode.backend=full decode.buckets=[1,32] …"
    )
    parser.add_argument("--guard", help="refuse, report or off")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decodes", nargs="*", type=int, default=Sizes.decodes, help="sequences that decode together")
    parser.add_argument("--w1-runs", type=int, default=Sizes.w1_runs)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--start-only", action="store_true")
    args = parser.parse_args()
    sizes = QUICK if args.quick else replace(Sizes(), decodes=tuple(args.decodes), w1_runs=args.w1_runs)
    asked = [ask("guard", args.guard, origin="--guard")] if args.guard else []
    for setting in args.plan:
        name, value = setting.split("=", 1)
        asked.append(ask(name, json.loads(value) if value.startswith("[") else value, origin="--plan"))
    if args.device == "cuda":
        torch.zeros(1, device="cuda")
    begin = time.time()
    options = EngineOptions(prefix_cache=False, **args.options)
    parts, checkpoint = Parts(), random_checkpoint(args.shape, options.model_impl)
    llm = LLM(checkpoint, device=args.device, options=options, asked=asked, progress=parts)
    llm.device.synchronize()
    found: dict[str, Any] = {
        "label": args.label,
        "shape": args.shape,
        "options": args.options,
        "plan": args.plan,
        "guard": args.guard,
        "open_s": time.time() - begin,
        "parts_s": {name: round(seconds, 2) for name, seconds in parts.seconds.items() if seconds > 0.01},
        **started(llm),
    }
    prompts = Prompts(llm.executor.vocab)
    if not args.start_only:
        found["decode"] = {count: decoded(llm, prompts, count, sizes) for count in sizes.decodes}
        cases = sizes.cases
        found["prefill"] = {f"{n} of {tokens}": prefilled(llm, prompts, n, tokens, sizes) for n, tokens in cases}
        found["w1_tokens_s"] = throughput(llm, prompts, llm.executor.vocab, sizes)
        found["eager_steps"] = {name: one.stats.eager.total() for name, one in llm.executor.runners.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
