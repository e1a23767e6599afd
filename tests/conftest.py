"""What all tests share: the devices that are present."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from phonograph.devices import Device, EmulatedDevice, open_device

with suppress(ImportError):  # where only other tests are run
    import hypothesis

    # How long an example takes says how busy the machine is.
    hypothesis.settings.register_profile("phonograph", deadline=None)
    hypothesis.settings.load_profile("phonograph")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Before anything imports Triton, as transformers may: kernels are interpreted from the first import on, or not.
    os.environ["TRITON_INTERPRET"] = "1"

_OPEN: dict[str, Callable[[], Device]] = {
    "emulated": EmulatedDevice,
    "emulated-poison": lambda: EmulatedDevice(poison=True),
}
if HAS_GPU:
    _OPEN["cuda"] = lambda: open_device("cuda")


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.gpu] if n == "cuda" else []) for n in _OPEN])
def device(request: pytest.FixtureRequest) -> Device:
    """Every device present: a test that takes it runs once on each."""
    return _OPEN[request.param]()


_MANY_IMPORTS = 50
_frozen = {"modules": 0}


@pytest.fixture(autouse=True)
def _imports_frozen() -> None:
    """Every capture collects garbage: all that tests have imported need not be walked over each time."""
    if len(sys.modules) > _frozen["modules"] + _MANY_IMPORTS:
        _frozen["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


class _Faults(logging.Handler):
    """Warnings of an engine that something failed which it then does in another way: no output tells of it."""

    _TELLING = (
        "trying its sequences one by one",
        "is computed again",
        "its rows go on as they are",
        "the drafter failed",
        "was not measured",
        "could not be measured",
        "recorded all the same",
    )

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if any(telling in message for telling in self._TELLING):
            self.found.append(message)


@pytest.fixture(autouse=True)
def _no_hidden_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """A step that fails is tried row by row, and its tokens are right: a test that makes none fail must see none."""
    log, faults = logging.getLogger("phonograph"), _Faults()
    log.addHandler(faults)
    try:
        yield
    finally:
        log.removeHandler(faults)
    if not request.node.get_closest_marker("faults"):
        assert not faults.found, "the engine went on after a fault; mark a test that wants it with `faults`"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU; torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
