"""docs/architecture.md: what it names is there, and a step passes through the modules that it says."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import phonograph
from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.requests.request import Request

PACKAGE = Path(phonograph.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "architecture.md").read_text()
NAMED = re.compile(r"`((?:\w+/)*\w+\.py)`(?: `([A-Z]?\w+(?:\.\w+)?)`)?")


def section(title: str) -> str:
    found = PAGE.split(f"## {title}\n")[1]
    return found.split("\n## ")[0]


def defined_in(path: Path) -> set[str]:
    """Functions, classes and methods of a module, as `name` or `Class.method`."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{one.name}"
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_modules_and_names_are_there() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 40
    for path, name in named:
        assert (PACKAGE / path).is_file() or (PACKAGE.parents[1] / path).is_file(), path
        assert not name or name in defined_in(PACKAGE / path), (path, name)


@pytest.mark.parametrize(
    "page", [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "decisions"], ids=lambda page: page.name
)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()):
        assert (PACKAGE / name).is_file() or (PACKAGE.parents[1] / name).is_file(), name


def test_every_module_has_its_place_in_the_picture() -> None:
    picture = PAGE.split("```")[1]
    words = set(re.findall(r"\w+", picture))
    missing = {path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")} - words
    # Parts of a room that it names as a whole.
    rooms = ("ops", "text", "models", "triton", "bench", "checkpoints", "cli")
    rest = [path for path in PACKAGE.rglob("*.py") if path.stem in missing and not set(path.parts) & set(rooms)]
    assert rest == []


def test_a_steady_step_passes_through_these_modules() -> None:
    options = EngineOptions(
        max_seqs=4, max_tokens=64, max_len=256, page_size=16, cache_tokens=1024, dtype=torch.float32
    )
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for number in range(3):
        llm.core.add(Request(f"r{number}", (1, 2, 3, 4 + number), params))
    for _ in range(8):
        llm.core.step()
    passed, replays = set[str](), llm.executor.runners["decode"].stats.replays.total()

    def note(frame: FrameType, event: str, value: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            passed.add(path.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        llm.core.step()
    finally:
        sys.setprofile(before)
    assert llm.executor.runners["decode"].stats.replays.total() == replays + 1
    table = "\n".join(line for line in section("The walk of a decode step").splitlines() if line.startswith("|"))
    assert {name for name in passed if not name.startswith("devices/")} == {path for path, _ in NAMED.findall(table)}
