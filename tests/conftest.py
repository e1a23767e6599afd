"""What all tests share: the devices that are present."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU; torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
