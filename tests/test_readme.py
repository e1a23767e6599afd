"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from phonograph import CheckpointError
from phonograph.engine.checkpoints import default_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "graphed(step" in block)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "12 of 12 captured" in shown
    assert "1 replays, 0 eager calls" in shown
    assert ", 0 failed" in shown
    y = names["y"]
    assert tuple(getattr(y, "shape", ())) == (5, 16)


def test_the_runner_beneath_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {}
    for part in ("graphed(step", "Runner(phase"):
        exec(compile(next(block for block in blocks if part in block), "README.md", "exec"), names)
    assert tuple(getattr(names["z"], "shape", ())) == (5, 16)
    assert "decode[seqs=8]" in capsys.readouterr().out


def test_the_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "LLM()" in block)
    exec(compile(code, "README.md", "exec"), {})
    assert "The capital of France is Paris." in capsys.readouterr().out


@pytest.mark.parametrize("command", re.findall(r"^make (\w+)", README, re.M))
def test_every_make_command_exists(command: str) -> None:
    done = subprocess.run(["make", "-n", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:docs|examples|bench)/[\w./-]+)`", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_no_placeholder_is_left() -> None:
    assert "MEASURED_TABLE" not in README


def test_a_hugging_face_model_generates_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "accelerate(model)" in block)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "1 generations with graphs, 0 without" in shown
    assert "decode steps: 29 replays, 2 eager" in shown


def test_an_encoder_by_batch_and_length_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    text = (ROOT / "docs/how-to/hugging-face.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "GraphedGrid(" in block)
    names: dict[str, object] = {}
    exec(compile(code, "hugging-face.md", "exec"), names)
    assert tuple(getattr(names["hidden"], "shape", ())) == (3, 20, 32)
    assert "length=32: encode: backend full" in capsys.readouterr().out
