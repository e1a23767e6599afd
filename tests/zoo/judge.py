"""Judge: whether a bug was caught, and how; whether a correct model was served without an alarm."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phonograph import Device, PhonographError, Reason
from zoo.animals import Animal, Make, Mechanism, Served, difference, played_eagerly, played_through_graphs, verified

_EXPECTED = {Reason.CAPTURE_FAILED, Reason.TOO_LARGE}
"""Reasons of eager calls that are no finding: the first is told as a refusal."""

BUGS: list[Animal] = []
CORRECT: list[Animal] = []


def bug(mechanism: Mechanism, **more: Any) -> Callable[[Make], Make]:
    """Keep a model that has the bug of its docstring."""

    def keep(make: Make) -> Make:
        BUGS.append(Animal(make.__name__, _sentence(make), make, mechanism, **more))
        return make

    return keep


def correct(**more: Any) -> Callable[[Make], Make]:
    """Keep a model that is right, and unusual as its docstring says."""

    def keep(make: Make) -> Make:
        CORRECT.append(Animal(make.__name__, _sentence(make), make, **more))
        return make

    return keep


def _sentence(make: Make) -> str:
    return " ".join((make.__doc__ or "").split())


@dataclass(frozen=True)
class Verdict:
    """What became of a bug."""

    how: str
    """refused, raised, eager, failed verify, harmless; or SILENT, CRASHED."""
    told: str = ""
    """What the product says about it; for a wrong result, what is wrong."""
    phase: str = ""
    """The phase that it is a bug of."""

    @property
    def is_caught(self) -> bool:
        return self.how not in {"SILENT", "CRASHED"}

    def __str__(self) -> str:
        return f"{self.how}: {self.told}" if self.told else self.how


def judge(animal: Animal, device: Device) -> Verdict:
    """Play a bug eagerly and through graphs; wrong results are caught only if verify fails right after capture."""
    wanted = played_eagerly(animal.make, device)
    served, _ = played_through_graphs(animal.make, device)
    crash = ""
    if served.raised is not None and not isinstance(served.raised, PhonographError | type(wanted.raised)):
        crash = f"{type(served.raised).__name__}: {served.raised}"
    wrong = _wrong(served, wanted) or crash
    refusals = "; ".join(str(row.error) for row in served.report.failures) if served.report else ""
    is_excused = animal.differs_by_itself and not served.replays and not crash
    if refusals and (not wrong or is_excused):
        return Verdict("refused", refusals, served.phase)
    if not wrong and any(reason not in _EXPECTED for reason in served.eager):
        return Verdict("eager", "; ".join(line for line in served.logged if "runs eagerly" in line), served.phase)
    if served.raised is not None and not wrong:
        return Verdict("raised", str(served.raised), served.phase)
    try:
        report = verified(animal.make, device)
    except Exception as error:
        return Verdict("CRASHED", f"verify raised {type(error).__name__}: {error}")
    if report is not None and not report.ok:
        return Verdict("failed verify", str(report), served.phase)
    return Verdict("CRASHED" if crash else "SILENT", wrong) if wrong else Verdict("harmless")


def _wrong(served: Served, wanted: Served) -> str:
    """The first result that differs from that of the same call made eagerly, or the state after the last."""
    for index, (found, expected) in enumerate(zip(served.results, wanted.results, strict=False)):
        told = difference(found, expected, f"call {index + 1}")
        if told:
            return told
    return "" if served.raised is not None else difference(served.state, wanted.state, "state")


def names_it(animal: Animal, verdict: Verdict) -> bool:
    """Whether what is told names the phase, the op or value, and the line where one is at fault."""
    if verdict.how == "harmless":
        return True
    each = verdict.told.splitlines()[1:] if verdict.how == "failed verify" else [verdict.told]
    has_phase = bool(verdict.phase) and all(re.search(rf"\b{re.escape(verdict.phase)}\b", one) for one in each)
    has_line = not animal.has_line or all(_has_its_line(animal, one) for one in each)
    return has_phase and has_line and re.search(animal.names, verdict.told) is not None


def _has_its_line(animal: Animal, told: str) -> bool:
    """Whether a line is named that is the animal's, or of what it calls, and not of another animal."""
    lines = [(file, int(line)) for file, line in re.findall(r"(\w+\.py):(\d+)", told)]
    others = [_source(other) for other in BUGS if other is not animal]
    return any(not any(file == name and line in span for name, span in others) for file, line in lines)


@functools.cache
def _source(animal: Animal) -> tuple[str, range]:
    """The file of an animal, and its lines there."""
    own, first = inspect.getsourcelines(animal.make)
    return Path(inspect.getfile(animal.make)).name, range(first, first + len(own))


def alarm(animal: Animal, device: Device) -> str:
    """What is wrong with how a correct model is served; empty where nothing is."""
    wanted = played_eagerly(animal.make, device)
    served, report = played_through_graphs(animal.make, device, verified=True)
    if served.raised is not None or wanted.raised is not None:
        return f"raised {served.raised or wanted.raised!r}"
    if served.report is not None and served.report.failures:
        return f"refused: {served.report.failures[0].error}"
    if report is None or not report.ok or not report.checks:
        return f"verify: {report}"
    if served.eager or served.replays != len(served.results):
        return f"eager: {dict(served.eager)}"
    return _wrong(served, wanted)
