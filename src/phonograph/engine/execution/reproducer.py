"""Reproducer: a batch that a recording computed wrongly, read from a file, with the state that it started from."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from phonograph.engine.execution.fingerprint import difference, fingerprint
from phonograph.engine.execution.reproducer_files import FORMAT, EngineState, described_model
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.ops.queries import Span
from phonograph.errors import CheckpointError, VerifyError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.running.runner import Runner

_KINDS: Mapping[str, type] = {
    "format": int,
    "model": dict,
    "weights": dict,
    "phase": str,
    "size": int,
    "axes": list,
    "is_repeat": bool,
    "batch": dict,
    "rows": torch.Tensor,
    "columns": dict,
    "pages": torch.Tensor,
    "cache": list,
}
_LIMITS = "Open it with the limits of the engine that wrote it (--max-seqs, --max-step-tokens, --max-len)"


@dataclass(frozen=True)
class Reproducer:
    """What a file holds."""

    source: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Reproducer:
        """Open a file, and refuse what is none or is damaged; nothing in it is run."""
        try:
            file = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"reading {path}: {error.strerror}. Give a file from --shadow-dir.") from None
        with file:
            _refuse_damaged(path, file)
            try:
                found = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                raise CheckpointError(
                    f"reading {path}: it is not a reproducer ({type(error).__name__}). Give a file from --shadow-dir."
                ) from error
        if not isinstance(found, dict) or not {"phase", "rows", "cache"} <= found.keys():
            raise CheckpointError(f"reading {path}: it is not a reproducer. Give a file from --shadow-dir.")
        if found.get("format") != FORMAT:
            raise CheckpointError(
                f"reading {path}: it has the format {found.get('format')}, and this version of phonograph reads "
                f"{FORMAT}. Use the version that wrote it."
            )
        if not all(isinstance(found.get(name), kind) for name, kind in _KINDS.items()) or not _fits_itself(found):
            raise CheckpointError(f"reading {path}: its parts don't fit each other. Give a file from --shadow-dir.")
        return cls(path, found)

    @property
    def phase(self) -> str:
        return str(self.content["phase"])

    @property
    def lacks_cache(self) -> bool:
        """Whether keys and values were left out, since token ids were not allowed: the batch runs on noise then."""
        return bool(len(self.content["pages"])) and not any(one.shape[1] for one in self.content["cache"])

    @property
    def is_repeat(self) -> bool:
        """Whether the wrong replay was a repeat, whose input buffers are not in the file."""
        return bool(self.content["is_repeat"])

    def check_model(self, config: ModelConfig) -> None:
        """Refuse another model's."""
        theirs, ours = self.content["model"], described_model(config)
        for name in ours | theirs:
            if theirs.get(name) != ours.get(name):
                raise VerifyError(
                    f"{self.source}: it is of another model: {name} is {theirs.get(name)}, here {ours.get(name)}. "
                    "Open it with the model that was served."
                )

    def other_weights(self, engine: EngineState) -> str:
        """In words, how the weights that are loaded differ from those of the engine that wrote it; empty if they do
        not, as far as a sample shows."""
        return difference(self.content["weights"], fingerprint(engine.weights))

    def batch(self, runner: Runner) -> Any:
        """The batch, for a runner of its phase."""
        sizes = runner.phase.padded(int(self.content["size"]))
        keys = [key for key in runner.captured if _spelled(key.values) == self.content["axes"]]
        if not keys:
            raise VerifyError(
                f"{self.source}: nothing is captured for {self.content['axes']} of {self.phase}. "
                "Use --device emulated, or a GPU, and record that pass."
            )
        sample = runner.phase.sample_for(keys[0], Extent(sizes, sizes), 0).batch
        names = {field.name for field in dataclasses.fields(sample)}
        fields = {name: value for name, value in self.content["batch"].items() if name in names}
        for slot in runner.phase.slots:
            self._check_values(slot.name, fields.get(slot.name), slot.valid)
        given = {name: _given(value) for name, value in fields.items()}
        if "spans" in given:
            given["spans"] = tuple(Span(*numbers) for numbers in given["spans"])
        # What the requests need of the sampler is what a sample of the same product needs.
        return dataclasses.replace(sample, **given)

    @contextmanager
    def placed(self, engine: EngineState) -> Iterator[None]:
        """The state that the batch started from, in its rows and in the first pages; afterwards what was there."""
        self._check_engine(engine)
        content, tables, device = self.content, engine.tables, engine.tables.pages.device
        rows, own = content["rows"].to(device), slice(1, len(content["pages"]) + 1)
        tensors = [tensor for group in engine.caches for tensor in group.tensors]
        held = [tensor[:, own].clone() for tensor in tensors]
        held_columns = {name: tables[name][rows].clone() for name in content["columns"]}
        try:
            for number, (tensor, pages) in enumerate(zip(tensors, content["cache"], strict=True)):
                tensor[:, own] = _noise(tensor[:, own], number) if self.lacks_cache else pages.to(device)
            for name, values in content["columns"].items():
                placed = _renumbered(values, content["pages"]) if name == "pages" else values
                tables[name][rows] = placed.to(device)
            yield
        finally:
            for tensor, before in zip(tensors, held, strict=True):
                tensor[:, own] = before
            for name, before in held_columns.items():
                tables[name][rows] = before

    def _check_engine(self, engine: EngineState) -> None:
        """Refuse a file that does not fit this engine's limits."""
        content, tables = self.content, engine.tables
        tensors = [tensor for group in engine.caches for tensor in group.tensors]
        rows, count = content["rows"], len(content["pages"])
        if count >= tensors[0].shape[1] or int(rows.max()) >= tables.pages.shape[0]:
            raise VerifyError(
                f"{self.source}: it has {count} pages and row {int(rows.max())}; this engine has "
                f"{tensors[0].shape[1] - 1} and {tables.pages.shape[0] - 1} rows. Open it with larger limits."
            )
        ours = [_page_kind(tensor) for tensor in tensors]
        theirs = [_page_kind(tensor) for tensor in content["cache"]]
        if ours != theirs:
            raise VerifyError(f"{self.source}: a page of its cache is {theirs}, here {ours}. {_LIMITS}.")
        columns = {column.name for column in tables.columns if tables.is_made(column.group)}
        for name, values in content["columns"].items():
            if name not in columns:
                raise VerifyError(f"{self.source}: it has a column {name!r}, and this engine has none. {_LIMITS}.")
            if (found := _kind(values[:1])) != (expected := _kind(tables[name][:1])):
                raise VerifyError(f"{self.source}: a row of {name} is {found}, here {expected}. {_LIMITS}.")
        most = tables.sizes.num_positions or tables.pages.shape[1] * _page_size(engine)
        self._check_values("length", content["columns"].get("length"), (0, most))

    def _check_values(self, name: str, values: Any, valid: Any) -> None:
        """Refuse indices outside of the tables."""
        if not isinstance(values, torch.Tensor) or not values.numel() or valid is None:
            return
        least, most = values.min().item(), values.max().item()
        if least < valid[0] or most > valid[1]:
            raise VerifyError(
                f"{self.source}: {name} holds {least} to {most}, and this engine takes {valid[0]} to {valid[1]}. "
                f"{_LIMITS}."
            )


def _refuse_damaged(path: Path, file: BinaryIO) -> None:
    """Refuse what is no archive, or is one that lost or changed bytes on its way; torch does not look at the sums."""
    begins = file.read(2)
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:
        if begins == b"PK":
            raise CheckpointError(
                f"reading {path}: it is damaged, or its end is missing ({error}). Copy it again."
            ) from error
        what = "it is empty" if not begins else "it is not a reproducer"
        raise CheckpointError(f"reading {path}: {what}. Give a file from --shadow-dir.") from error
    if damaged is not None:
        raise CheckpointError(f"reading {path}: it is damaged ({damaged} has a wrong checksum). Copy it again.")
    file.seek(0)


def _fits_itself(content: Mapping[str, Any]) -> bool:
    """Whether the parts of a file have the shapes that they must have together."""
    rows, pages, cache, columns = (content[name] for name in ("rows", "pages", "cache", "columns"))
    numbers = all(one.dtype == torch.int64 and one.dim() == 1 for one in (rows, pages))
    return (
        numbers
        and len(rows) > 0
        and int(rows.min()) > 0
        and bool((pages.diff() > 0).all())
        and all(isinstance(one, torch.Tensor) and one.dim() > 1 for one in cache)
        and {one.shape[1] for one in cache} in (set(), {0}, {len(pages)})
        and all(isinstance(one, torch.Tensor) and one.shape[:1] == rows.shape for one in columns.values())
        and all(isinstance(text, str) for pair in content["weights"].items() for text in pair)
    )


def _given(value: Any) -> Any:
    """As a batch has it: an array, but for numbers of a kind that numpy may lack."""
    return value.numpy() if isinstance(value, torch.Tensor) and not value.is_floating_point() else value


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _page_kind(tensor: torch.Tensor) -> str:
    """Of one page, in all layers; the tensor may have none."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{[len(tensor), 1, *tensor.shape[2:]]}"


def _noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device=like.device, dtype=like.dtype)


def _page_size(engine: EngineState) -> int:
    return engine.caches[0].page_size


def _renumbered(listed: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Page numbers as places in the list of pages, from 1; others become 0."""
    if not len(pages):
        return torch.zeros_like(listed)
    places = torch.searchsorted(pages, listed.long()).clamp(max=len(pages) - 1)
    return torch.where(pages[places] == listed, places + 1, 0).to(listed.dtype)


def _spelled(values: Any) -> list[list[str]]:
    return [list(pair) for pair in values]
