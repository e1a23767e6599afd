"""Report: figures with where, when and by which command they were measured; written to a JSON file as they come."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from phonograph.bench.figures import Better, rounded
from phonograph.devices import Device, open_device

Kind = Literal["floor", "eager", "ours", "peer"]
Status = Literal["running", "complete", "partial", "failed"]
_VERSIONS = ("phonograph", "torch", "triton", "transformers")
_ABSOLUTE_PATH = re.compile(r"""(?<![^\s"'=,\[(])/[^"'=,\])]+""")
"""Also after a flag's `=`, or in the JSON of an argument; not the end of a URL or of a relative path."""


@dataclass(frozen=True)
class Subject:
    """What a measurement measures."""

    name: str
    title: str
    unit: str
    better: Better = "lower"
    how: str = ""
    """How the value of a row was found, in a sentence or two."""


@dataclass(frozen=True)
class Row:
    """One figure: of a case, for a series, with all that was found temporarys."""

    case: Mapping[str, int | str]
    series: str
    kind: Kind
    value: float
    figures: Mapping[str, Any] = field(default_factory=dict)


def machine(device: Device | None = None) -> dict[str, str]:
    """What the figures were measured on: this device, or the accelerator present."""
    device = device or open_device()
    name = "CPU only" if device.torch_device.type == "cpu" else device.hardware.name
    found = {"accelerator": name, "cpu": platform.processor() or platform.machine()}
    found["python"] = platform.python_version()
    for package in _VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    found["command"] = command()
    return found


def command() -> str:
    """As a user would type it; of an absolute path, what another machine may have too."""
    program = Path(sys.argv[0])
    own = {"__main__.py": "phonograph", "phonograph": "phonograph"}
    typed = [own.get(program.name, f"python {_portable(str(program))}"), *map(_portable, sys.argv[1:])]
    return " ".join(typed)


def _portable(argument: str) -> str:
    """Absolute paths from the working directory on; elsewhere, their last part."""

    def shortened(found: re.Match[str]) -> str:
        path = Path(found[0])
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name

    return _ABSOLUTE_PATH.sub(shortened, argument)


class Report:
    """The rows of one measurement; with a folder, the file there is written anew with every row."""

    def __init__(self, subject: Subject, settings: Mapping[str, Any], where: Mapping[str, str], folder: Path | None):
        self.subject = subject
        self.settings = dict(settings)
        self.where = dict(where)
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        """Figures that belong to no row."""
        self.notes: list[str] = []
        self.status: Status = "running"
        self.path = folder / f"{subject.name}.json" if folder is not None else None

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(replace(row, value=rounded(row.value)))
        self.write()

    def note(self, text: str) -> None:
        """Say something that a reader of the figures must know."""
        if text not in self.notes:
            self.notes.append(text)
            self.write()

    def fact(self, name: str, value: Any) -> None:
        """Note a figure that belongs to no row."""
        self.facts[name] = rounded(value) if isinstance(value, float) else value
        self.write()

    def finish(self, status: Status) -> None:
        """End the report."""
        self.status = status
        self.write()

    def as_json(self) -> dict[str, Any]:
        return {
            "measurement": asdict(self.subject),
            "machine": self.where,
            "settings": self.settings,
            "status": self.status,
            "notes": self.notes,
            "facts": self.facts,
            "rows": [asdict(row) for row in self.rows],
        }

    def write(self) -> None:
        """Write the file; a reader never sees half of it."""
        if self.path is not None:
            write_json(self.path, self.as_json())


def write_json(path: Path, content: Any) -> None:
    """Replace a file by this content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def read_report(path: Path) -> Report | None:
    """A report that was written before, or None for a JSON file of another kind."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("measurement"), dict):
        return None
    report = Report(Subject(**content["measurement"]), content["settings"], content["machine"], None)
    report.status, report.notes, report.facts = content["status"], content["notes"], content["facts"]
    report.rows = [Row(**row) for row in content["rows"]]
    return report
