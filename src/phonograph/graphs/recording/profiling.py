"""Capture profiler: traces of warm-ups and captures, to open in a viewer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from phonograph.errors import PlanError

log = logging.getLogger("phonograph")


@contextmanager
def profiled(folder: str | None, name: str) -> Iterator[None]:
    """Profile what runs inside and write its trace into the folder; without a folder, do nothing."""
    if folder is None:
        yield
        return
    file = Path(folder) / f"{re.sub('[^A-Za-z0-9_.-]', '_', name)}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise PlanError(f"profiling {name}: {file} can't be written ({error}). Name another folder.") from None
    with torch.profiler.profile() as profiler:
        yield
    profiler.export_chrome_trace(str(file))
    # A warning, since profiling makes this start slower than others.
    log.warning("profiled %s, which takes longer for it; the trace is in %s (ui.perfetto.dev shows it)", name, file)
