"""Child processes: a command with a time limit, and what it printed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from phonograph import settings

_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    seconds: float
    output: str
    timed_out: bool

    @property
    def failure(self) -> str:
        """What went wrong, empty if nothing did."""
        if self.timed_out:
            return f"ended after {self.seconds:.0f} s, its time limit"
        if self.status:
            last = [line for line in self.output.splitlines() if line.strip()][-3:]
            return f"status {self.status}: {' / '.join(last)}"
        return ""


def run_command(
    command: Sequence[str],
    *,
    seconds: float,
    log: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    folder: Path | None = None,
) -> Done:
    """Run to the end or to the time limit; the log file grows while it runs, and it has children ended with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=settings.environment(environment),
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
    text = log.read_text(errors="replace")
    return Done(process.returncode, time.monotonic() - begin, text, timed_out)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
