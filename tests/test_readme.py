"""What the README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phonograph import CheckpointError
from phonograph.cli.main import command_line
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


def test_the_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "LLM()" in block)
    exec(compile(code, "README.md", "exec"), {})
    assert "The capital of France is Paris." in capsys.readouterr().out


def test_the_two_lines_accelerate_generate() -> None:
    pytest.importorskip("transformers")
    from hugging_face import DECODERS, made, prompt

    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "accelerate(model)" in block)
    assert len(code.splitlines()) == 2
    model = made(DECODERS["llama"])
    plain, ids = model.generate, prompt(1, 5)
    wanted = plain(ids, max_new_tokens=12, do_sample=False)
    names: dict[str, Any] = {"model": model}
    exec(compile(code, "README.md", "exec"), names)
    assert model.generate(ids, max_new_tokens=12, do_sample=False).tolist() == wanted.tolist()
    assert int(re.findall(r"(\d+) replays", names["fast"].explain())[0]) > 5
    names["fast"].undo()
    assert model.generate == plain


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`make (\w+)`", README))))
def test_every_make_command_exists(command: str) -> None:
    done = subprocess.run(["make", "-n", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_that_is_linked_exists() -> None:
    linked = [target for target in re.findall(r"\]\(([^)#\s]+)", README) if "://" not in target]
    assert len(linked) > 15
    assert [target for target in linked if not (ROOT / target).exists()] == []


def test_lines_are_short_and_blocks_are_run() -> None:
    assert [line for line in README.splitlines() if len(line) > 120] == []
    known = (
        "graphed(step",
        "LLM()",
        "accelerate(model)",
        "OpenAI(",
    )  # the last runs in tests/server/test_openai_client.py
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        assert any(part in block for part in known), block


def test_every_command_of_the_shell_blocks_parses() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    commands = [line.partition("#")[0] for block in blocks for line in re.findall(r"^phonograph (.*)$", block, re.M)]
    assert len(commands) >= 2
    for command in commands:
        command_line().parse_args(shlex.split(command))


def test_prompts_are_completed_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    page = (ROOT / "docs/how-to/generate.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(code, "generate.md", "exec"), {})
    shown = capsys.readouterr().out
    assert " length 16" in shown
    assert "The capital of France is Paris." in shown


def test_a_hugging_face_model_generates_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    page = (ROOT / "docs/hugging-face.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "accelerate(model)" in block)
    names: dict[str, object] = {}
    exec(compile(code, "hugging-face.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "1 generations with graphs, 0 without" in shown
    assert "decode steps: 29 replays, 2 eager" in shown


def test_an_encoder_by_batch_and_length_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    text = (ROOT / "docs/hugging-face.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "GraphedGrid(" in block)
    names: dict[str, object] = {}
    exec(compile(code, "hugging-face.md", "exec"), names)
    assert tuple(getattr(names["hidden"], "shape", ())) == (3, 20, 32)
    assert "length=32: encode: backend full" in capsys.readouterr().out
