"""Every kind of drafter for a tiny model, and engines that speculate with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_head import write_random_head

from mixed_steps import DEPTH, PLACES
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.checkpoints.mtp import MtpCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.eagle import eagle
from phonograph.engine.passes.mtp import mtp
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.ngram_eagle import ngram_eagle
from random_modules import written
from speculation import MAX_LEN, plain_llm, speculating

TARGET = SHAPES["tiny"]
DRAFTERS = ["ngram", "eagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ngram+eagle", "mtp"))]
every_drafter = pytest.mark.parametrize("drafting", DRAFTERS, indirect=True)
"""For a fixture `drafting` that calls `made`."""


def made(name: str, folder: Path) -> Drafting:
    """By its name; all but the first leave tokens unread."""
    if name == "ngram":
        return ngram(DEPTH)
    model, most = drafted_for(plain_llm().executor.model), MAX_LEN + 16
    if name == "mtp":
        return mtp(MtpCheckpoint.open(written(folder / "modules"), TARGET).load(model, most, DEPTH), DEPTH, PLACES)
    write_random_head(folder / "head", TARGET, 100, torch.float32)
    head = DraftCheckpoint.open(folder / "head", TARGET).load(model, most)
    return (eagle if name == "eagle" else ngram_eagle)(head, DEPTH, PLACES)


def engine(drafting: Drafting, backend: str = "full", **changes: Any) -> EngineCore[Executor]:
    places = 0 if drafting.unread is None else drafting.unread.places
    return speculating(drafting, backend, unread_places=places, **changes)
