"""Documentation: the site builds without a warning, what is made from the code is what the code says, blocks run."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import phonograph
import phonograph.hf
from phonograph import Graphed, Phase, Registry, Runner, RunnerOptions, graphed
from phonograph.cli.main import command_line, main
from server import tiny

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUNNING = (
    "tutorial/graphs-in-ten-minutes.md",
    "tutorial/why-was-it-eager.md",
    "how-to/verify.md",
    "how-to/bare-runner.md",
    "how-to/graph-breaks.md",
    "how-to/new-drafter.md",
    "tc-piecewise.md",
)
"""Pages whose blocks of Python run, in order, in one namespace, and print what the page says."""


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "scripts" / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the site ---------------------------------------------------------------------------------------------------------


def mkdocs() -> str | None:
    own = ROOT / ".venv" / "docs" / "bin" / "mkdocs"
    return str(own) if own.is_file() else shutil.which("mkdocs")


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    command = mkdocs()
    if command is None:
        pytest.skip("needs mkdocs: `scripts/docs .venv/docs` makes the environment that has it")
    off = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [command, "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **off},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)|<link[^>]+stylesheet[^>]+href=\"(https?:[^\"]+)"
    )
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    assert [page.name for page in pages if fetched.search(page.read_text())] == []
    api = (tmp_path / "reference" / "api.html").read_text()
    missing = [name for name in public() if f'id="phonograph.{name}"' not in api]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r"([\w/-]+\.md)", navigation))
    there = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert named <= there
    assert {name for name in there - named if not re.match(r"decisions/\d", name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


# -- what is made from the code ---------------------------------------------------------------------------------------


SCRIPT = _script()


@pytest.mark.parametrize("name", SCRIPT.PAGES)
def test_a_page_is_what_the_script_makes(name: str) -> None:
    assert (DOCS / name).read_text() == SCRIPT.PAGES[name](), "run `make reference`"


def test_every_flag_is_on_its_page_and_explained() -> None:
    page = (DOCS / "reference" / "commands.md").read_text()
    for name, parser in SCRIPT._commands(command_line()):
        assert f"## phonograph {name}\n" in page
        for action in parser._actions:
            assert action.help, f"phonograph {name}: {action.option_strings or action.dest} has no help"
            for flag in action.option_strings:
                assert flag in ("-h", "--help") or f"`{flag}`" in page, flag


def public() -> list[str]:
    """Public names that are no exceptions, which have a page of their own."""
    names = [name for name in phonograph.__all__ if name in phonograph._MODULES]
    return [*names, *(f"hf.{name}" for name in phonograph.hf.__all__)]


def test_the_transformers_that_tests_run_with_is_among_those_that_are_told() -> None:
    transformers = pytest.importorskip("transformers")
    sources = (
        DOCS / "hugging-face.md",
        DOCS / "explanation" / "compatibility.md",
        ROOT / "src/phonograph/hf/accelerate.py",
    )
    (told,) = {tuple(re.findall(r"5\.(\d+) to 5\.(\d+)", source.read_text())) for source in sources}
    ((first, last),) = told
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert (5, int(first)) <= (major, minor) <= (5, int(last))


def test_every_public_name_is_on_a_page() -> None:
    api, exceptions = (DOCS / "reference" / f"{name}.md" for name in ("api", "exceptions"))
    assert [name for name in public() if f"::: phonograph.{name}\n" not in api.read_text()] == []
    raised = [name for name in phonograph.__all__ if name not in phonograph._MODULES]
    assert len(raised) > 15
    assert [name for name in raised if f"| `{name}` |" not in exceptions.read_text()] == []


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in phonograph.__all__ if not inspect.getdoc(getattr(phonograph, name))] == []


def test_every_option_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` .*\| *([^|]*) \|$", (DOCS / "reference" / "options.md").read_text(), re.M)
    assert len(rows) > 60
    assert [name for name, text in rows if not text.strip()] == []


def test_help_of_graphed_names_every_parameter() -> None:
    text = inspect.getdoc(graphed) or ""
    explained = re.findall(r"^ {4}(\w+): \S", text.partition("Args:\n")[2], re.M)
    assert explained == list(inspect.signature(graphed).parameters)


# -- blocks of code ---------------------------------------------------------------------------------------------------


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of each block of a page."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


def assert_shown(expected: str, found: str) -> None:
    """Each line is there, in this order; `…` stands for anything, on a line of its own for any lines."""
    lines = iter(found.splitlines())
    for line in expected.splitlines():
        if line.strip() == "…":
            continue
        pattern = ".*".join(re.escape(part.rstrip()) for part in line.split("…"))
        pattern = re.sub(r"(?:\\ )+", r" +", pattern)
        assert any(re.search(pattern, one) for one in lines), f"{line!r} is not shown in:\n{found}"


@pytest.mark.parametrize("page", RUNNING)
def test_the_blocks_of_a_page_run_and_show_what_it_says(page: str) -> None:
    names: dict[str, object] = {}
    out, ran = "", 0
    for language, text in blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if language == "python":
                exec(compile(text, page, "exec"), names)
                ran += 1
            elif language == "bash" and page.startswith("tutorial/"):
                for command in text.splitlines():
                    words = shlex.split(command)
                    assert words[0] == "phonograph"
                    assert main(words[1:]) == 0
        if language in ("python", "bash"):
            out = printed.getvalue()
        elif language == "text":
            assert_shown(text, out)
    assert ran


def test_the_page_on_drafters_makes_one(tmp_path: Path) -> None:
    """Its file and its edits, in a copy of the package."""
    package, made = tmp_path / "phonograph", list(blocks("how-to/new-drafter.md"))
    shutil.copytree(ROOT / "src" / "phonograph", package, ignore=shutil.ignore_patterns("*.safetensors", "*.gguf"))
    (package / "engine" / "passes" / "bigram.py").write_text(next(text for name, text in made if name == "python"))
    for edits in next(text for name, text in made if name == "diff").split("--- ")[1:]:
        path, *places = re.split(r"\n@@\n", edits)
        source = (package / path).read_text()
        for lines in (place.splitlines() for place in places):
            old, new = ("\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
            assert source.count(f"{old}\n") == 1, old
            source = source.replace(f"{old}\n", f"{new}\n")
        (package / path).write_text(source)
    program = f"""
import torch
from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
asked, params = dict(max_seqs=2, max_len=64), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
def answers(**others):
    options = EngineOptions(dtype=torch.float32, **asked, **others)
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=options)
    return [one.tokens for one in llm.generate([[5, 9], [7]], params)], llm.explain()
torch.save(torch.arange(256), {str(tmp_path / "bigram.pt")!r})
(plain, _), (drafted, said) = answers(), answers(speculate="bigram", draft={str(tmp_path)!r})
assert plain == drafted
assert "speculation: bigram drafts 3 tokens a round" in said
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_the_line_that_asks_for_settings_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write(tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    ((language, text),) = blocks("reference/options.md")
    assert language == "python"
    names: dict[str, Any] = {}
    exec(compile(text, "options.md", "exec"), names)
    plan = names["llm"].plan.phase("decode")
    assert (plan.backend, plan.buckets) == ("full", (1, 2, 4))
    assert "asked by ask()" in names["llm"].explain()


def test_flags_in_shell_blocks_exist() -> None:
    known = {
        flag for _, parser in SCRIPT._commands(command_line()) for a in parser._actions for flag in a.option_strings
    }
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        if not page.is_file() or page.parent.name == "decisions":
            continue
        for block in re.findall(r"^```(?:bash|)\n(.*?)^```", page.read_text(), re.S | re.M):
            for line in re.findall(r"^\$? ?phonograph (.*)$", block, re.M):
                used = set(re.findall(r"(?<!\S)(--[\w-]+)", line.partition("#")[0]))
                assert used <= known | {"--version"}, f"{page.name}: {line}"


# -- coming from elsewhere --------------------------------------------------------------------------------------------


def test_names_of_ours_on_the_page_for_newcomers_exist() -> None:
    text = (DOCS / "coming-from-sglang-vllm.md").read_text()
    ours = [line.rsplit(" | ", 1)[1] for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    known = {
        flag for _, parser in SCRIPT._commands(command_line()) for a in parser._actions for flag in a.option_strings
    }
    flags = {flag for cell in ours for flag in re.findall(r"(?<![\w-])--[\w-]+", cell)}
    assert len(flags) > 25
    assert flags <= known
    kinds = {"Registry": Registry, "Runner": Runner, "Phase": Phase, "RunnerOptions": RunnerOptions, "Graphed": Graphed}
    for cell in ours:
        for kind, name in re.findall(r"`(\w+)\.(\w+)[`(]", cell):
            owner = kinds.get(kind) or getattr(phonograph, kind)
            assert hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {}), f"{kind}.{name}"
        for path in re.findall(r"`((?:\w+/)+\w+\.py)`", cell):
            assert (ROOT / "src" / "phonograph" / path).is_file(), path
