"""One engine of a shape, measured whole: start, steady decode, prompts end to end, W1. For two trees in one hold.

Run: PYTHONPATH=TREE/src python bench/one_engine.py LABEL [--shape qwen3-8b] [--options '{"verify": "off"}']
Prints a line of JSON. Run it once before, so that kernels are compiled and tuned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.measurement import greedy
from phonograph.bench.workloads import MOST_ID, Prompts, w1
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask


def decoded(llm: LLM, prompts: Prompts, num_seqs: int) -> dict[str, float]:
    """Milliseconds of steady steps after prompts of 440 tokens."""
    driver = EngineDriver(llm)
    driver.seat([prompts.one(440) for _ in range(num_seqs)], 170)
    driver.steady(10)
    times, host = driver.steady(100), driver.host_alone(20)
    driver.drain()
    return {
        "device_ms": statistics.median(one.device for one in times) * 1e3,
        "wall_ms": statistics.median(one.wall for one in times) * 1e3,
        "host_us": statistics.median(host) * 1e6,
    }


def end_to_end(llm: LLM, prompts: Prompts, num_requests: int, num_tokens: int) -> float:
    """Milliseconds of requests for one token to an idle engine."""
    times = []
    for _ in range(41):
        group = list(prompts.many(num_requests, num_tokens))
        begin = time.perf_counter()
        llm.generate(group, greedy(1))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) * 1e3


def throughput(llm: LLM, vocab: int) -> list[float]:
    """Tokens a second of three runs of W1."""
    batch, found = w1(ids=min(MOST_ID, vocab)), []
    for _ in range(3):
        begin = time.perf_counter()
        done = llm.generate(list(batch.prompts), greedy(batch.new_tokens))
        found.append(sum(len(one.tokens) for one in done) / (time.perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("label")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as JSON")
    parser.add_argument("--guard", help="refuse, report or off")
    parser.add_argument("--start-only", action="store_true")
    args = parser.parse_args()
    config = SHAPES[args.shape]
    asked = [ask("guard", args.guard, origin="--guard")] if args.guard else ()
    torch.zeros(1, device="cuda")
    begin = time.time()
    options = EngineOptions(prefix_cache=False, **args.options)
    llm = LLM(RandomCheckpoint(config), device="cuda", options=options, asked=asked)
    llm.device.synchronize()
    found: dict[str, Any] = {
        "label": args.label,
        "options": args.options,
        "guard": args.guard,
        "open_s": time.time() - begin,
        "capture_s": sum(report.seconds for report in llm.reports),
        "warm_up_s": sum(report.warm_seconds for report in llm.reports),
        "verify_s": {name: report.seconds for name, report in llm.verified.items()},
    }
    prompts = Prompts(config.vocab)
    if not args.start_only:
        found["decode"] = {count: decoded(llm, prompts, count) for count in (1, 32, 128)}
        cases = ((1, 128), (8, 128), (1, 2048))
        found["end_to_end_ms"] = {f"{n} of {tokens}": end_to_end(llm, prompts, n, tokens) for n, tokens in cases}
        found["w1_tokens_s"] = throughput(llm, config.vocab)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
