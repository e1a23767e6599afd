"""scripts/gpu: every part names programs that are there, and flags that they take."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed(*parts: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "gpu"), "/nowhere/is/written", *parts]
    environment = {**os.environ, "LIST": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_what_is_run_is_there() -> None:
    lines = listed().stdout.splitlines()
    said = re.search(r"^#   (.*)$", (ROOT / "scripts" / "gpu").read_text(), re.M)
    assert said is not None
    assert len(lines) >= len(said[1].split())
    for line in lines:
        programs = re.findall(r"\b(?:bench|tests)/[\w./]+", line)
        assert programs, line
        for program in programs:
            assert (ROOT / program).exists(), program
            if program.startswith("bench/"):
                taken = (ROOT / program).read_text()
                for flag in re.findall(r"(--[a-z][a-z0-9-]*)", line):
                    assert f'"{flag}"' in taken, f"{program} does not take {flag}"


def test_a_part_that_is_not_there_is_refused() -> None:
    found = listed("sweet")
    assert found.returncode == 2
    assert "no part is called sweet" in found.stderr
