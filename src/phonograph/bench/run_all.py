"""`phonograph bench all`: the measurements one after the other, the most important first, within a time limit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from phonograph.bench.peers import measure_peers, results_in
from phonograph.bench.processes import run_command
from phonograph.bench.report import machine, write_json
from phonograph.bench.report_pages import reports_in
from phonograph.bench.tables import printed
from phonograph.bench.timing import Deadline

_SHARE = 0.5
"""A measurement may take this share of what is left; the last one all of it."""
_GRACE = 90.0
"""Seconds that a case which was begun in time may take beyond that."""


class MeasurementLog:
    """What became of each measurement, written as it becomes known."""

    def __init__(self, out: Path, minutes: float) -> None:
        self._path = out / "all.json"
        self._content: dict[str, Any] = {"machine": machine(), "minutes": minutes, "measurements": {}}
        self.num_failed = 0

    def note(self, name: str, status: str, seconds: float, problem: str = "") -> None:
        entry = {"status": status, "seconds": round(seconds, 1)} | ({"problem": problem} if problem else {})
        self._content["measurements"][name] = entry
        self.num_failed += status == "failed"
        write_json(self._path, self._content)
        print(f"{name:<12} {status:<9} {seconds:6.1f} s  {problem}", flush=True)


def run_all(args: argparse.Namespace, names: tuple[str, ...]) -> int:
    """Every measurement in a process of its own, so that none spoils the next; peers come last."""
    deadline = Deadline(args.minutes * 60)
    progress = MeasurementLog(args.out, args.minutes)
    extra = {"cold_start": ["--cold"] if args.cold else []}
    for index, name in enumerate(names):
        if deadline.is_past:
            progress.note(name, "skipped", 0.0, "out of time")
            continue
        limit = deadline.left if index == len(names) - 1 else deadline.left * _SHARE
        command = [sys.executable, "-m", "phonograph", "bench", name, "--out", str(args.out)]
        command += ["--time-limit", f"{limit:.0f}", *_common(args), *extra.get(name, [])]
        done = run_command(command, seconds=limit + _GRACE, log=args.out / f"{name}.txt")
        progress.note(name, "failed" if done.failure else "complete", done.seconds, done.failure)
        print(done.output, flush=True)
    _run_peers(args, deadline, progress)
    return 1 if progress.num_failed else 0


def _common(args: argparse.Namespace) -> list[str]:
    """The flags that every measurement gets."""
    flags = ["--quick"] if args.quick else []
    for name, value in (("shape", args.shape), ("device", args.device), ("backends", ",".join(args.backends))):
        flags += [f"--{name}", value] if value else []
    return flags + [part for option in args.option for part in ("--option", option)]


def _run_peers(args: argparse.Namespace, deadline: Deadline, progress: MeasurementLog) -> None:
    shape = args.shape or ("tiny" if args.quick else "qwen3-8b")
    for name, problem in measure_peers(args, shape, args.out, deadline.left).items():
        progress.note(name, "failed", 0.0, problem)
    if results_in(args.out):
        for report in reports_in(args.out).values():
            report.write()
            print(printed(report), end="\n\n")
