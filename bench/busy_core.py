"""Decoding on a CPU while another program keeps one core busy: how many times as long a token takes.

Rounds with and without the other program take turns, so that whatever else the machine does befalls both. The default
model decodes one sequence, with as many threads as there are cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import report
import torch

from phonograph import LLM, SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "truncated": SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=1),
    "penalties": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=1),
    "logprobs": SamplingParams(temperature=0.8, top_p=0.95, logprobs=5, seed=1),
}


def _spin() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    while True:
        pass


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process computes on one core."""
    other = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    other.start()
    time.sleep(1.0)  # it imports first
    try:
        yield
    finally:
        other.kill()
        other.join()


def ms_per_token(llm: LLM, params: SamplingParams, count: int) -> float:
    """Of one sequence of so many tokens, the prompt's pass included."""
    asked = SamplingParams(**{**vars(params), "max_tokens": count, "ignore_eos": True})
    begun = time.perf_counter()
    llm.generate(["The sea is"], asked)
    return (time.perf_counter() - begun) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="the folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    llm = LLM(device="cpu")
    quiet: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    busy: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    for kind in args.kinds:
        ms_per_token(llm, KINDS[kind], 8)
    for _ in range(args.rounds):
        for kind in args.kinds:
            quiet[kind].append(ms_per_token(llm, KINDS[kind], args.tokens))
        with busy_core():
            for kind in args.kinds:
                busy[kind].append(ms_per_token(llm, KINDS[kind], args.tokens))
    figures = {}
    for kind in args.kinds:
        ratios = [b / q for b, q in zip(busy[kind], quiet[kind], strict=True)]
        figures[kind] = {
            "quiet_ms": statistics.median(quiet[kind]),
            "busy_ms": statistics.median(busy[kind]),
            "times_as_long": statistics.median(ratios),
        }
        print(kind, figures[kind], flush=True)
    figures_all = {"threads": torch.get_num_threads(), "rounds": args.rounds, "kinds": figures}
    print(report.write("busy_core_cpu", figures_all, args.out))


if __name__ == "__main__":
    main()
