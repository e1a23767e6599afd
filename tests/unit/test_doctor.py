"""`phonograph doctor`: what is there, what is not, and the line that installs it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from phonograph.cli import doctor
from phonograph.cli.main import main


def by_name(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {one.name: one for one in findings}


def without(monkeypatch: pytest.MonkeyPatch, *missing: str, **versions: str) -> None:
    """As if packages were not installed, or had other versions."""
    real = metadata.version

    def version(name: str) -> str:
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name, real(name))

    monkeypatch.setattr(metadata, "version", version)


def test_a_complete_installation_lacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "Nothing is missing." in shown
    assert "torch" in shown
    assert "SmolLM2-135M-Instruct" in shown


def test_every_extra_for_users_is_looked_at() -> None:
    known = set(metadata.metadata("phonograph").get_all("Provides-Extra") or ()) - {"dev", "docs", "clients"}
    assert known == {*doctor._EXTRAS}
    wanted = doctor._requirements()
    assert all(wanted[extra] for extra in known)
    assert {one.name for one in wanted[""]} == {"torch", "numpy"}


def test_what_is_missing_or_too_old_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "tokenizers", starlette="0.44.9")
    found = by_name(list(doctor.examined()))
    assert found["engine"].remedy == "pip install 'tokenizers>=0.21'"
    assert found["server"].remedy == "pip install 'starlette>=0.45' 'tokenizers>=0.21'"
    assert found["server"].found.startswith("2 of ")
    assert found["hf"].remedy == ""


def test_json_is_for_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "llguidance")
    assert main(["doctor", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["grammar"]["remedy"].startswith("pip install 'llguidance>=")


def test_what_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file\nand more")

    monkeypatch.setattr(doctor, "_torch", broken)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "OSError: libcudart.so.13: cannot open shared object file" in shown
    assert "and more" not in shown
    assert "of these can be fixed" in shown


def test_it_runs_where_torch_is_not_installed(tmp_path: Path) -> None:
    hiding = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
    program = hiding + "from phonograph.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "torch" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("version", "least", "holds"),
    [("2.13.0+cpu", "2.11", True), ("2.11.0a0+git", "2.11", True), ("2.9", "2.11", False), ("5.22.2", "5.17", True)],
)
def test_versions_are_compared_by_number(version: str, least: str, holds: bool) -> None:
    assert doctor._is_at_least(version, least) is holds


def test_a_gpu_that_torch_can_t_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_smi", lambda: ["NVIDIA H200, 143771 MiB, 580.95.05"])
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    found = by_name(list(doctor.examined()))
    assert found["nvidia-smi"].found.startswith("NVIDIA H200")
    assert "This torch has no CUDA" in found["device"].remedy
