"""The bug zoo: every bug is caught, and no correct model raises an alarm.

An animal is marked as a strict xfail as long as the product lets it through, so that a fix takes the mark away.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from conftest import HAS_GPU
from phonograph import Device, EmulatedDevice, open_device, verify
from zoo.animals import Animal, captured, fresh, moved_by_capture
from zoo.by_hand import bites
from zoo.every import BUGS, CORRECT
from zoo.judge import alarm, judge, names_it

DEVICES = ("emulated", "cuda")


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    """Every capture collects garbage first, unless somebody has the collector off: most of the zoo's time."""
    gc.disable()
    yield
    gc.enable()


def on_each_device(animals: Sequence[Animal]) -> list[Any]:
    """Every animal on every device that it can live on."""
    params = []
    for name in DEVICES:
        for animal in animals:
            if animal.kills_gpu if name == "cuda" else animal.needs_gpu:
                continue
            marks = [pytest.mark.gpu] if name == "cuda" else []
            if animal.open_on(name):
                marks.append(pytest.mark.xfail(strict=True, reason=animal.open_on(name)))
            params.append(pytest.param(animal, name, marks=marks, id=f"{animal.name}-{name}"))
    return params


def opened(name: str) -> Device:
    return open_device("cuda") if name == "cuda" and HAS_GPU else EmulatedDevice()


@pytest.mark.parametrize(("animal", "name"), on_each_device(BUGS))
def test_every_bug_is_caught_and_named(animal: Animal, name: str) -> None:
    verdict = judge(animal, opened(name))
    assert verdict.is_caught, f"{animal.says} {verdict}"
    assert (verdict.how == "harmless") is bool(animal.harmless_on(name)), f"{animal.says} {verdict}"
    assert names_it(animal, verdict), f"{animal.says} What is told does not name it: {verdict}"


MOVED = {"lazily_made_state": "what the first run makes is kept, though later ones write it"}
"""Animals whose state capture or verify changes today, and why; a fix takes them from here."""


def test_capture_and_verify_leave_state_alone() -> None:
    animals = [animal for animal in [*BUGS, *CORRECT] if not animal.needs_gpu]
    moved = {animal.name: told for animal in animals if (told := moved_by_capture(animal.make, EmulatedDevice()))}
    assert moved.keys() == MOVED.keys(), {name: moved.get(name) for name in moved.keys() ^ MOVED.keys()}


def test_nothing_recorded_is_not_verified() -> None:
    animal = next(animal for animal in BUGS if animal.name == "python_counter")
    made = captured(fresh(animal.make, EmulatedDevice().torch_device), EmulatedDevice())
    assert not made.runner.captured
    assert not verify(made.runner).ok


BITING = [animal for animal in BUGS if not animal.needs_gpu]


@pytest.mark.parametrize("animal", BITING, ids=lambda animal: animal.name)
def test_every_bug_bites_graphs_made_by_hand(animal: Animal) -> None:
    """Else it would be no bug, and that it is caught would say nothing."""
    assert bites(animal), animal.says


@pytest.mark.parametrize(("animal", "name"), on_each_device(CORRECT))
def test_no_correct_model_raises_an_alarm(animal: Animal, name: str) -> None:
    assert not (told := alarm(animal, opened(name))), f"{animal.says} {told}"


def test_the_zoo_is_large_and_every_animal_says_what_it_is() -> None:
    assert len(BUGS) >= 36
    assert len(CORRECT) >= 34
    twice = [name for name, count in Counter(animal.name for animal in [*BUGS, *CORRECT]).items() if count > 1]
    assert not twice
    assert all(animal.says.endswith(".") for animal in [*BUGS, *CORRECT])
    kinds = ("SILENT: ", "CRASHED: ", "UNNAMED: ", "FALSE ALARM: ")
    assert all(animal.open.startswith(kinds) for animal in [*BUGS, *CORRECT] if animal.open)
