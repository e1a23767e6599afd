"""Clients' environment: a Python that has other people's clients, and programs that it runs against a server.

`scripts/clients .venv/clients` makes it; PHONOGRAPH_CLIENTS_PYTHON names another.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
OWN = ROOT / ".venv" / "clients" / "bin" / "python"

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
    "TOKENIZERS_PARALLELISM": "false",
}
"""So that clients talk to the server under test, and to nobody else."""


def client_python(*modules: str) -> Path:
    """The Python of the clients' environment, which has all of these modules; skips the test where there is none."""
    python = Path(os.environ.get("PHONOGRAPH_CLIENTS_PYTHON") or OWN)
    if not python.exists():
        pytest.skip(f"needs the clients' environment, {python}. Run: scripts/clients .venv/clients")
    if missing := _missing(python, modules):
        pytest.skip(f"the clients' environment has no {', '.join(missing)}. Run: scripts/clients .venv/clients")
    return python


@cache
def _missing(python: Path, modules: tuple[str, ...]) -> list[str]:
    look = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
    return subprocess.run([python, "-c", look, *modules], capture_output=True, text=True, check=True).stdout.split()


def run_client(python: Path, *arguments: str, seconds: float = 120, **variables: str) -> str:
    """What a client prints; AssertionError with all of it where it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_BASE_URL")}
    env = {**kept, **QUIET, **variables}
    done = subprocess.run(
        [python, *arguments], capture_output=True, text=True, check=False, timeout=seconds, env=env, cwd=PROGRAMS
    )
    assert done.returncode == 0, f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_program(name: str, *arguments: str, needs: tuple[str, ...], seconds: float = 120) -> Any:
    """The JSON in the last line that a program of `programs/` prints."""
    said = run_client(client_python(*needs), f"{name}.py", *arguments, seconds=seconds)
    return json.loads(said.rstrip().rpartition("\n")[2])
