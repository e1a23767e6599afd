"""Cold start: from the start of a process to its first token, in fresh processes, with warm and cold kernel caches."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from phonograph.bench import first_token
from phonograph.bench.measurement import Bench
from phonograph.bench.processes import run_command
from phonograph.bench.report import Row, Subject
from phonograph.errors import PhonographError

SUBJECT = Subject(
    "cold_start",
    "From process start to first token",
    "s",
    how="Fresh processes, weights made on the device, one prompt of 16 tokens. Warm: a process before compiled "
    "the kernels; cold: the folder of compiled kernels is new. Peers: until their engine is up.",
)
_SECONDS = 600.0


def measure(bench: Bench) -> None:
    """Twice as users have it, of which the second counts; with `--cold`, once more in a new folder of kernels."""
    with tempfile.TemporaryDirectory() as folder:
        warm = None
        for _ in range(1 if bench.settings.quick else 2):
            if bench.has_time("start with a warm cache"):
                warm = _run(bench, Path(folder), cold=False)
        if warm is not None:
            _add(bench, "warm", warm)
        if bench.choose("cold", False, False) and bench.has_time("start with a cold cache"):
            _add(bench, "cold", _run(bench, Path(folder), cold=True))


def _run(bench: Bench, folder: Path, *, cold: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"max_seqs": 2, "max_tokens": 16, "max_len": 64} if bench.settings.quick else {}
    options |= bench.settings.options
    if "dtype" in options:
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    # Without the script's own folder in the path: its modules are no top-level ones.
    command = [sys.executable, "-P", first_token.__file__, repr(time.time()), bench.settings.shape]
    command += ["--device", bench.device.name, "--options", json.dumps(options)]
    environment = {"TRITON_CACHE_DIR": str(folder / "kernels")} if cold else {}
    limit = max(60.0, min(_SECONDS, bench.deadline.left))
    done = run_command(command, seconds=limit, log=folder / "first_token.log", environment=environment)
    if done.failure:
        raise PhonographError(f"measuring a cold start: {done.failure}")
    found: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return found


def _add(bench: Bench, series: str, found: dict[str, Any]) -> None:
    for part, seconds in found["parts"].items():
        bench.report.add(Row({"part": part}, series, "ours", seconds))
    bench.report.add(Row({"part": "all"}, series, "ours", found["total"]))
