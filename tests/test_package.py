"""Wheel and source distribution: built, checked, and imported with no more than each extra brings."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import phonograph

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

MODULES = {"prometheus-client": "prometheus_client"}
"""What a distribution is imported as, where that is not its name."""
USES = {
    "": """
import torch
from phonograph import Slot, graphed
run = graphed(lambda x: x * 2, slots=[Slot("x", ("n", 2), torch.float32)], bucketed="n", buckets=[2], device="cpu")
run.capture()
assert run(x=torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
""",
    "engine": """
import torch
from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
options = EngineOptions(max_seqs=2, max_tokens=32, max_len=64, dtype=torch.float32)
llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=options)
assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].tokens) == 3
""",
    "grammar": "import llguidance, phonograph.engine.text.guidance",
    "server": "import phonograph.server.app, phonograph.server.run, phonograph.server.observe.watch",
    "hf": "from phonograph.hf import accelerate",
    "bench": "import phonograph.bench.run_all, phonograph.bench.serving.command, matplotlib, aiohttp",
}
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (not in this extra)", name=name)
sys.meta_path.insert(0, Blocked())
"""

HEAD = "phonograph/engine/checkpoints/SmolLM2-135M-Instruct.eagle3/model.safetensors"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("build", "hatchling"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}, of the extra `dev`")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def names_of(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    return [name.partition("/")[2] for name in tarfile.open(archive).getnames()]


@pytest.mark.slow
def test_both_hold_the_package_and_nothing_of_the_work_on_it(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert f"phonograph-{phonograph.__version__}" in wheel.name
    here = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "phonograph").rglob("*.py")}
    assert here <= set(names_of(wheel))
    assert {f"src/{name}" for name in here} <= set(names_of(source))
    assert {"phonograph/py.typed", "phonograph/engine/ops/tuned.json", HEAD} <= set(names_of(wheel))
    for archive in (wheel, source):
        tops = {re.sub(r"^src/", "", name).partition("/")[0] for name in names_of(archive)}
        assert not tops & {"tests", "bench", "docs", "examples", "scripts", "site", ".venv", ".ci"}
        assert not [name for name in names_of(archive) if "__pycache__" in name or name.endswith(".pyc")]
        assert archive.stat().st_size < 20 << 20, "most of it is the default model's draft head"


@pytest.mark.slow
def test_twine_finds_nothing_wrong(built: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("needs the package twine, of the extra `dev`")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def modules_of(extra: str) -> set[str]:
    """What the distributions of an extra are imported as, with those of the extras that it names."""
    found = set()
    for text in PROJECT["optional-dependencies"].get(extra, ()):
        if (within := re.match(r"phonograph\[([\w,]+)\]", text)) is not None:
            found |= {module for name in within[1].split(",") for module in modules_of(name)}
        else:
            name = re.split(r"[^\w.-]", text)[0]
            found.add(MODULES.get(name, name.replace("-", "_")))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("extra", USES)
def test_the_wheel_works_with_no_more_than_an_extra_brings(extra: str, built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    brought = modules_of(extra)
    missing = [name for name in brought if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    # jinja2 comes with torch, which every extra has; what transformers brings comes with it.
    free = {"jinja2"} | ({"safetensors", "tokenizers"} if extra == "hf" else set())
    blocked = {name for one in USES for name in modules_of(one)} - brought - free
    code = f"BLOCKED = {blocked!r}\n{BLOCK}\n{USES[extra]}\nimport phonograph\nprint(phonograph.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path))


# -- files of the project ---------------------------------------------------------------------------------------------


def test_the_dockerfile_passes_its_linter() -> None:
    beside = Path(sys.executable).parent / "hadolint"
    linter = str(beside) if beside.is_file() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint, of the extra `dev`")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_copies_what_is_there_and_asks_for_health() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.M) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert set(copied) == set(allowed)
    assert "/health" in text.partition("HEALTHCHECK")[2]


def test_the_workflow_runs_what_ci_runs() -> None:
    assert "- run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    steps = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert steps == ["check", "docs", "test", "test-slow"]


@pytest.mark.parametrize("name", ["bug", "eager"])
def test_templates_ask_for_what_helps(name: str) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text()
    assert "phonograph doctor --json" in text
    assert "phonograph explain" in text
