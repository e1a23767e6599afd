"""Reproducers: without leave to write token ids, files have nothing that is not declared to tell nothing of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phonograph import EmulatedDevice, ShapeKey
from phonograph.engine.execution.reproducer_files import EngineState, Reproducers
from phonograph.engine.models.config import SHAPES
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.state.column import Column, Form, TableSizes, Width, Writer
from phonograph.engine.state.columns import MASKS, PENALTIES, PLACE
from phonograph.engine.state.tables import RequestTables
from phonograph.graphs.trust.shadow import Mismatch

NEW = Column("drafted", torch.int64, width=Width.PAGES, writer=Writer.GRAPH, form=Form.RESET)
"""Its author did not think of files."""
COLUMNS = (*PLACE, *TorchSampler.columns, *PENALTIES, *MASKS, NEW)
PRIVATE = {"last_token", "counts", "prompted", "bias_ids", "bias", "allowed", "drafted"}


@dataclass(frozen=True)
class Batch:
    rows: Any
    tokens: Any
    drafts: Any
    width: int
    first_token: int
    needs: None = None


def written(folder: Path, *, with_tokens: bool) -> dict[str, Any]:
    tables = RequestTables(EmulatedDevice(), COLUMNS, TableSizes(max_seqs=4, vocab=40, max_pages=8))
    tables.make_all()
    for column in COLUMNS:
        tables[column.name].fill_(1)
    batch = Batch(np.array([1, 2]), np.array([7, 8]), torch.tensor([9]), 3, 7)
    mismatch = Mismatch(ShapeKey("decode", "seqs", 2), "the output tokens", "differs")
    files = Reproducers(folder, with_tokens=with_tokens)
    engine = EngineState(tables, (), SHAPES["tiny"], ())
    assert "Reproducer: " in files.write(mismatch, batch, ("rows", "width"), engine, torch.tensor([1, 2]))
    (path,) = folder.iterdir()
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def test_what_is_not_declared_public_is_not_written(tmp_path: Path) -> None:
    found = written(tmp_path, with_tokens=False)
    assert {name for name, values in found["columns"].items() if not values.any()} == PRIVATE
    assert found["batch"].keys() == {"rows", "tokens", "drafts", "width"}, "a number has no shape to keep"
    assert found["batch"]["rows"].tolist() == [1, 2]
    assert found["batch"]["tokens"].tolist() == [0, 0]
    assert found["batch"]["drafts"].tolist() == [0]


def test_all_is_written_where_token_ids_may_be(tmp_path: Path) -> None:
    found = written(tmp_path, with_tokens=True)
    assert all(values.all() for values in found["columns"].values())
    assert found["batch"]["tokens"].tolist() == [7, 8]
    assert found["batch"]["first_token"] == 7


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_a_column_made_from_tokens_is_private(column: Column) -> None:
    assert column.is_public == (column.name not in PRIVATE)
