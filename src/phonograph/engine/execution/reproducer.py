"""Reproducer: a batch that a recording computed wrongly, in a file, with the state that it started from."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.ops.queries import Span
from phonograph.engine.state.tables import RequestTables
from phonograph.errors import CheckpointError, VerifyError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.shadow import Mismatch

_MAX_FILES = 8
_MAX_BYTES = 1 << 30


class Reproducers:
    """Writes at most 8 files and 1 GiB to a folder; where token ids are not allowed, only what is declared public."""

    def __init__(self, folder: Path, *, with_tokens: bool) -> None:
        self._folder = folder
        self._with_tokens = with_tokens

    def write(
        self,
        mismatch: Mismatch,
        batch: Any,
        public: Collection[str],
        tables: RequestTables,
        caches: Sequence[CacheGroup],
        rows: torch.Tensor,
    ) -> str:
        """Write what it takes to run a batch again; returns a sentence on where it is, or why it is nowhere.

        `public` are the fields of the batch that tell nothing of tokens.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = [path.stat().st_size for path in self._folder.glob("*.pt")]
            if len(held) >= _MAX_FILES:
                return f" No reproducer: {self._folder} has {len(held)} already."
            found = self._content(mismatch, batch, public, tables, caches, rows)
            size = sum(value.numel() * value.itemsize for value in _tensors(found))
            if sum(held) + size > _MAX_BYTES:
                return f" No reproducer: it would take {size:,} bytes, and {self._folder} may hold {_MAX_BYTES:,}."
            path = self._folder / f"{mismatch.key.phase}-{mismatch.key.size}-{time.time_ns()}.pt"
            partial = path.with_suffix(".part")
            torch.save(found, partial)
            os.replace(partial, path)
        except OSError as error:
            return f" No reproducer: writing to {self._folder} failed ({error.strerror or error})."
        return f" Reproducer: {path}"

    def _content(
        self,
        mismatch: Mismatch,
        batch: Any,
        public: Collection[str],
        tables: RequestTables,
        caches: Sequence[CacheGroup],
        rows: torch.Tensor,
    ) -> dict[str, Any]:
        pages = tables.pages[rows].long()
        pages = torch.unique(pages[pages > 0])
        columns = [column for column in tables.columns if tables.is_made(column.group)]
        return {
            "phase": mismatch.key.phase,
            "size": mismatch.key.size,
            "axes": [list(pair) for pair in mismatch.key.values],
            "detail": mismatch.detail,
            "with_tokens": self._with_tokens,
            "batch": self._told(_plain_fields(batch), public),
            "rows": rows.cpu(),
            "columns": self._told(
                {column.name: tables[column.name][rows].cpu() for column in columns},
                {column.name for column in columns if column.is_public},
            ),
            "pages": pages.cpu(),
            "cache": [tensor[:, pages].cpu() for group in caches for tensor in group.tensors],
        }

    def _told(self, found: dict[str, Any], public: Collection[str]) -> dict[str, Any]:
        """What may be written: of a tensor that is not public its shape alone, of anything else nothing."""
        if self._with_tokens:
            return found
        hidden = {name: value for name, value in found.items() if name not in public}
        shapes = {name: torch.zeros_like(value) for name, value in hidden.items() if isinstance(value, torch.Tensor)}
        return {name: value for name, value in found.items() if name in public} | shapes


@dataclass(frozen=True)
class Reproducer:
    """What a file holds."""

    source: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Reproducer:
        """Open a file; nothing in it is run."""
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointError(f"reading {path}: {error.strerror}. Give a file that --shadow-dir got.") from None
        except Exception as error:
            raise CheckpointError(f"reading {path}: it is no reproducer ({type(error).__name__}).") from error
        if not isinstance(found, dict) or not {"phase", "batch", "rows", "columns", "pages", "cache"} <= found.keys():
            raise CheckpointError(f"reading {path}: it is no reproducer. Give a file that --shadow-dir got.")
        return cls(path, found)

    @property
    def phase(self) -> str:
        return str(self.content["phase"])

    def batch(self, runner: Runner) -> Any:
        """The batch, for a runner of its phase."""
        fields = self.content["batch"]
        sizes = runner.phase.padded(int(self.content["size"]))
        keys = [key for key in runner.captured if _spelled(key.values) == self.content["axes"]]
        if not keys:
            raise VerifyError(f"{self.source}: nothing is captured for {self.content['axes']} of {self.phase}.")
        sample = runner.phase.sample_for(keys[0], Extent(sizes, sizes), 0).batch
        given = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
        if "spans" in given:
            given["spans"] = tuple(Span(*numbers) for numbers in given["spans"])
        # What the requests need of the sampler is what a sample of the same product needs.
        return dataclasses.replace(sample, **given)

    @contextmanager
    def placed(self, tables: RequestTables, caches: Sequence[CacheGroup]) -> Iterator[None]:
        """The state that the batch started from, in its rows and in the first pages; afterwards what was there."""
        content, device = self.content, tables.pages.device
        rows, count = content["rows"].to(device), len(content["pages"])
        tensors = [tensor for group in caches for tensor in group.tensors]
        if count >= tensors[0].shape[1] or int(rows.max()) >= tables.pages.shape[0]:
            raise VerifyError(
                f"{self.source}: it has {count} pages and row {int(rows.max())}; this engine has "
                f"{tensors[0].shape[1] - 1} and {tables.pages.shape[0] - 1} rows. Open it with larger limits."
            )
        own, known = slice(1, count + 1), {column.name for column in tables.columns}
        columns = {name: values for name, values in content["columns"].items() if name in known}
        held = [tensor[:, own].clone() for tensor in tensors]
        held_columns = {name: tables[name][rows].clone() for name in columns}
        try:
            for tensor, pages in zip(tensors, content["cache"], strict=True):
                tensor[:, own] = pages.to(device)
            for name, values in columns.items():
                placed = _renumbered(values, content["pages"]) if name == "pages" else values
                tables[name][rows] = placed.to(device)
            yield
        finally:
            for tensor, before in zip(tensors, held, strict=True):
                tensor[:, own] = before
            for name, before in held_columns.items():
                tables[name][rows] = before


def _renumbered(listed: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Page numbers as places in the list of pages, from 1; 0 stays."""
    numbers = torch.zeros(int(max(pages.tolist(), default=0)) + 1, dtype=listed.dtype)
    numbers[pages] = torch.arange(1, len(pages) + 1, dtype=listed.dtype)
    return numbers[listed.long().clamp(0, len(numbers) - 1)]


def _plain_fields(batch: Any) -> dict[str, Any]:
    """The fields of a batch that are arrays, tensors or numbers."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            found[field.name] = torch.from_numpy(value.copy())
        elif isinstance(value, torch.Tensor):
            found[field.name] = value.cpu()
        elif isinstance(value, int):
            found[field.name] = value
        elif field.name == "spans" and value is not None:
            found[field.name] = [list(dataclasses.astuple(span)) for span in value]
    return found


def _spelled(values: Any) -> list[list[str]]:
    return [list(pair) for pair in values]


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, list):
        for value in found:
            yield from _tensors(value)
