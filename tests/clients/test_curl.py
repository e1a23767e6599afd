"""The `curl` lines of README and docs, as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server.conftest import Server

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"

pytestmark = pytest.mark.slow


def lines() -> list[tuple[str, str]]:
    """Every command of a code block that begins with `curl`, with what a backslash continues."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in re.findall(r"```\w*\n(.*?)```", path.read_text(), re.S):
            for command in re.findall(r"^curl (?:.*\\\n)*.*", block, re.M):
                found.append((path.name, command))
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("page", "command"), lines())
def test_a_line_of_the_docs_gets_an_answer(page: str, command: str, client_server: Server) -> None:
    assert ADDRESS in command
    command = command.replace(ADDRESS, client_server.url).replace(
        "curl ", "curl --silent --show-error --fail-with-body ", 1
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{page}: {done.stdout}{done.stderr}"
    assert done.stdout.strip()


def test_the_docs_have_such_lines() -> None:
    assert {page for page, _ in lines()} >= {"README.md", "serving.md", "serve-a-model.md"}


def test_the_line_that_the_screen_shows(client_server: Server) -> None:
    (line,) = [line for line in client_server.lines if line.startswith("try ")]
    command = line.removeprefix("try ").strip().replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"choices"' in done.stdout
