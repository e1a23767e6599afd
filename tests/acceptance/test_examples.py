"""The examples and the benchmark scripts run, and show what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(script: str, *args: str) -> str:
    """Run a script as a user would; returns what it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *args], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_demo_prints_plan_progress_table_and_comparison() -> None:
    text = run("examples/decoder.py")
    assert "prefill.backend  breakable" in text
    assert "capturing decode[seqs=1]" in text
    assert "14 of 14 captured" in text
    assert "6 of 6 captured" in text
    assert "replay equals eager" in text
    assert "0 eager calls" in text
    assert text.count(" 0 failed") == 2


def test_an_unmodified_hugging_face_model_is_recorded() -> None:
    pytest.importorskip("transformers")
    text = run("examples/hf_decode.py", "--tokens", "8")
    assert "1 of 1 captured" in text
    assert "8 replays, 0 eager calls" in text
    assert "\nequal\n" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark is run for its figures")
def test_the_benchmark_runs_in_its_quick_form(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run("bench/graph_layer.py", "--quick", "--out", str(tmp_path))
    found = json.loads((tmp_path / "graph_layer_quick.json").read_text())
    assert found["figures"]["host time of a step with 8 slots"]["numpy_copies_per_load"]["transfers"] == 1
    assert found["machine"]["torch"] == torch.__version__
