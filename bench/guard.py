"""The guard over the engine's own passes: what it finds, what it can't see, and what it costs.

Run: python bench/guard.py [--device cuda] [--shapes tiny qwen3-0.6b] [--verify off fast all] [--no-nodes]

Engines are opened with guard=refuse, the default. A finding, a recording that is missing, or a
check of verify that fails is an error: the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.errors import VerifyError
from phonograph.graphs.planning.settings import Asked, ask
from phonograph.graphs.recording.guarding import Guard
from phonograph.graphs.trust.guard import guard

SMALL: dict[str, Any] = {"max_seqs": 4, "max_tokens": 64, "max_len": 128}
REAL: dict[str, Any] = {"max_seqs": 64, "max_tokens": 2048, "max_len": 4096, "cache_tokens": 65_536}


@contextmanager
def timed_guard() -> Iterator[list[float]]:
    """Inside, the seconds of every look of the guard are gathered."""
    seconds: list[float] = []
    look = Guard.look

    def timed(self: Guard, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return look(self, *args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    with patch.object(Guard, "look", timed):
        yield seconds


def opened(device: str, shape: str, verify: Any, mode: str) -> LLM:
    sizes = SMALL if shape == "tiny" else REAL
    asked = Asked((ask("guard", mode, origin="bench/guard.py"),))
    return EngineArguments(None, shape, device, EngineOptions(verify=verify, **sizes), asked).open()


def wrong_at_start(device: str, shape: str, verify: str) -> int:
    """Open an engine, and print what was found and what it took; returns how much is wrong."""
    begin = time.perf_counter()
    with timed_guard() as seconds:
        try:
            llm = opened(device, shape, verify, "refuse")
        except VerifyError as error:
            print(f"{shape} verify={verify}: {error}")
            return 1
    total = time.perf_counter() - begin
    findings = [found for report in llm.reports for found in report.findings]
    missing = [row for report in llm.reports for row in report.failures]
    capture = sum(report.seconds for report in llm.reports)
    checks = sum(len(report.checks) for report in llm.verified.values())
    verified = sum(report.seconds for report in llm.verified.values())
    print(
        f"{shape} verify={verify}: {sum(len(report.rows) for report in llm.reports)} recordings, {len(findings)} "
        f"findings, {len(missing)} missing; opened in {total:.2f} s, of it capture {capture:.2f} (guard "
        f"{sum(seconds):.2f}), verify {verified:.2f} with {checks} checks"
    )
    for found in findings:
        print(f"  finding: {found}")
    for row in missing:
        print(f"  missing: {row.key}: {row.error}")
    return len(findings) + len(missing)


def wrong_nodes(device: str, shape: str) -> int:
    """Compare the graphs of the largest and the smallest shapes node by node; returns how much is wrong."""
    llm, wrong = opened(device, shape, "off", "off"), 0
    for name, runner in llm.executor.runners.items():
        begin = time.perf_counter()
        with torch.inference_mode():
            report = guard(runner, sizes="ends", nodes=True)
        print(f"{shape} nodes of {name}, {time.perf_counter() - begin:.2f} s: {report}")
        wrong += len(report.findings) + len(report.failures)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "emulated")
    parser.add_argument("--shapes", nargs="+", default=["tiny", "smollm2-135m", "qwen3-0.6b"])
    parser.add_argument("--verify", nargs="+", default=["off", "fast", "all"])
    parser.add_argument("--no-nodes", action="store_true", help="leave the graphs' nodes alone")
    args = parser.parse_args()
    wrong = 0
    for shape in args.shapes:
        wrong += sum(wrong_at_start(args.device, shape, verify) for verify in args.verify)
        if not args.no_nodes:
            wrong += wrong_nodes(args.device, shape)
        gc.collect()  # an engine's graphs hold memory that the next one measures
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(f"{wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
