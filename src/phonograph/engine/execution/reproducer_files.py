"""Reproducer files: batches that recordings computed wrongly, written to a folder within bounds."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.execution.fingerprint import Fingerprint, fingerprint
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.state.tables import RequestTables
from phonograph.graphs.trust.shadow import Mismatch

FORMAT = 4
"""Of the files; one of another number is refused."""
_MAX_FILES = 8
_MAX_BYTES = 1 << 30
_OVERHEAD = 1 << 16
"""Bytes that a file has besides its tensors and what is told of weights, at most."""
_ENTRY = 32
"""Bytes that a pair of texts takes besides its characters, at most."""


@dataclass(frozen=True)
class EngineState:
    """What a batch runs on."""

    tables: RequestTables
    caches: Sequence[CacheGroup]
    config: ModelConfig
    weights: object
    """Of the model: tensors in dataclasses and tuples."""


def described_model(config: ModelConfig) -> dict[str, str]:
    """What tells one model from another: every number of its configuration."""
    return {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}


def told(mismatch: Mismatch, *, with_tokens: bool) -> str:
    """A mismatch in words; without values and places where token ids may not be written, since a key reveals them."""
    if with_tokens:
        return mismatch.detail
    words = "differs" if mismatch.of_integers else mismatch.words.partition(" (")[0]
    return f"{mismatch.where} {words}{mismatch.of_repeat}"


class Reproducers:
    """Writes at most 8 files and 1 GiB to a folder; where token ids are not allowed, only what is declared public.

    Keys and values are not: those of the first layer are a function of token and position, and reveal a prompt.
    """

    def __init__(self, folder: Path, *, with_tokens: bool) -> None:
        self._folder = folder
        self._with_tokens = with_tokens

    def write(
        self, mismatch: Mismatch, batch: Any, public: Collection[str], engine: EngineState, rows: torch.Tensor
    ) -> str:
        """Write what it takes to run a batch again; returns a sentence on where it is, or why there is none.

        `public` are the fields of the batch that reveal nothing of tokens. It never raises: the caller has a wrong step
        to undo.
        """
        partial: Path | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = [path.stat().st_size for path in self._folder.iterdir() if path.suffix in (".pt", ".part")]
            if len(held) >= _MAX_FILES:
                return f" No reproducer: {self._folder} has {len(held)} already."
            pages = engine.tables.pages[rows].long()
            pages = torch.unique(pages[pages > 0])
            weights = fingerprint(engine.weights)
            size = _num_bytes(batch, engine, len(rows), len(pages) if self._with_tokens else 0) + _text_size(weights)
            if sum(held) + size > _MAX_BYTES:
                return f" No reproducer: it would take {size:,} bytes, and {self._folder} may hold {_MAX_BYTES:,}."
            path = self._folder / f"{mismatch.key.phase}-{mismatch.key.size}-{time.time_ns()}.pt"
            partial = path.with_suffix(".part")
            content = self._content(mismatch, self._shown(_plain_fields(batch), public), engine, rows, pages)
            content["weights"] = weights
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                torch.save(content, file)
            os.replace(partial, path)
        except Exception as error:  # torch says a full disk by an error of its own
            with suppress(OSError):  # the folder may be gone, or closed to us
                if partial is not None:
                    partial.unlink(missing_ok=True)
            return f" No reproducer: writing to {self._folder} failed ({_reason(error)})."
        left_out = "" if self._with_tokens else " (without token ids, keys and values: --log-prompts allows them)"
        return f" Reproducer: {path}{left_out}"

    def _content(
        self,
        mismatch: Mismatch,
        batch: dict[str, Any],
        engine: EngineState,
        rows: torch.Tensor,
        pages: torch.Tensor,
    ) -> dict[str, Any]:
        tables, kept = engine.tables, pages if self._with_tokens else pages[:0]
        columns = [column for column in tables.columns if tables.is_made(column.group)]
        values = {column.name: tables[column.name][rows].cpu() for column in columns}
        return {
            "format": FORMAT,
            "model": described_model(engine.config),
            "phase": mismatch.key.phase,
            "size": mismatch.key.size,
            "axes": [list(pair) for pair in mismatch.key.values],
            "detail": told(mismatch, with_tokens=self._with_tokens),
            "is_repeat": mismatch.is_repeat,
            "with_tokens": self._with_tokens,
            "batch": batch,
            "rows": rows.cpu(),
            "columns": self._shown(values, {column.name for column in columns if column.is_public}),
            "pages": pages.cpu(),
            "cache": [tensor[:, kept].cpu() for group in engine.caches for tensor in group.tensors],
        }

    def _shown(self, found: dict[str, Any], public: Collection[str]) -> dict[str, Any]:
        """What may be written: of a tensor that is not public its shape alone, of anything else nothing."""
        if self._with_tokens:
            return found
        hidden = {name: value for name, value in found.items() if name not in public}
        shapes = {name: torch.zeros_like(value) for name, value in hidden.items() if isinstance(value, torch.Tensor)}
        return {name: value for name, value in found.items() if name in public} | shapes


def _num_bytes(batch: Any, engine: EngineState, num_rows: int, num_pages: int) -> int:
    """What a file takes, before anything is copied."""
    tables = engine.tables
    by_row = (tables[column.name][0] for column in tables.columns if tables.is_made(column.group))
    by_page = (tensor[:, 0] for group in engine.caches for tensor in group.tensors)
    total = num_rows * sum(map(_size, by_row)) + num_pages * sum(map(_size, by_page))
    return total + sum(map(_size, _tensors(_plain_fields(batch)))) + _OVERHEAD


def _text_size(weights: Fingerprint) -> int:
    return sum(len(name) + len(described) + _ENTRY for name, described in weights.items())


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


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


def _tensors(found: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in found.values() if isinstance(value, torch.Tensor))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
