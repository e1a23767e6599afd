"""GgufHeader: metadata of a GGUF file, and where each tensor lies, checked against the length of the file.

The `gguf` package has a reader too; it takes seconds for a vocabulary, and its errors on a truncated file don't say
where.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phonograph.errors import CheckpointError
from phonograph.numbers import is_whole
from phonograph.sizes import is_power_of_two, round_up

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_HEADER_BYTES = 2**28
_MAX_FIELDS = 2**16
_MAX_TENSORS = 2**17
_MAX_ITEMS = 2**23
"""Of all arrays together. The limits are far above any model: a corrupt count is refused before it costs anything."""
_DAMAGED = "The file is cut short or damaged: get it again."


@dataclass(frozen=True)
class GgmlType:
    """How the numbers of a tensor are stored: numbers in a block, and its bytes."""

    name: str
    block: int
    block_bytes: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", 256, 136),
    30: GgmlType("BF16", 1, 2),
}
"""By the number that files use."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file, and how."""

    shape: tuple[int, ...]
    """Outermost dim first, as torch has it; GGUF writes it the other way round."""
    type: GgmlType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Everything in a GGUF file but the weights."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read and check the header; refuse a file that can't hold what its header says."""
        if path.stat().st_size == 0:
            raise CheckpointError(f"reading {path}: the file is empty. Get it again.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()


class _Cursor:
    """A cursor in the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.num_items = 0
        """Of all arrays so far."""
        self.doing = "the first bytes"

    def header(self) -> GgufHeader:
        if (magic := self.take(4)) != MAGIC:
            raise self.error(f"it starts with {magic!r}, not {MAGIC!r}", "This is no GGUF file: give one.")
        if (version := self.scalar(4)) not in VERSIONS:
            raise self.error(f"GGUF version {version} is not known", f"Supported are {VERSIONS}: convert it again.")
        num_tensors, num_fields = self.count(_MAX_TENSORS, "tensors"), self.count(_MAX_FIELDS, "metadata fields")
        metadata: dict[str, object] = {}
        for index in range(num_fields):
            self.doing = f"metadata field {index} of {num_fields}"
            name = self.string()
            self.doing = f"metadata field {name[:80]}"
            if name in metadata:
                raise self.error(f"{name[:80]!r} is there twice")
            metadata[name] = self.value(self.integer())
        self.refuse_part(metadata)
        stored = [self.tensor(f"description of tensor {i} of {num_tensors}") for i in range(num_tensors)]
        tensors = self.placed(stored, metadata)
        return GgufHeader(self.path, metadata, tensors)

    def placed(
        self, stored: list[tuple[str, tuple[int, ...], GgmlType, int]], metadata: Mapping[str, object]
    ) -> dict[str, StoredTensor]:
        """The tensors with their places in the file, which must be inside it and apart from each other."""
        self.doing = "the places of the tensors"
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not is_whole(alignment) or not is_power_of_two(alignment):
            raise self.error(f"general.alignment is {alignment!r}; expected a power of two")
        data_start = round_up(self.at, alignment)
        tensors: dict[str, StoredTensor] = {}
        end_before, name_before = data_start, "the header"
        for name, shape, kind, offset in sorted(stored, key=lambda tensor: tensor[3]):
            start, num_bytes = data_start + offset, math.prod(shape) // kind.block * kind.block_bytes
            if name in tensors:
                raise self.error(f"tensor {name} is there twice")
            if offset % alignment or start < end_before:
                raise self.error(f"tensor {name} starts at byte {start}, inside {name_before} or off the alignment")
            if start + num_bytes > len(self.data):
                raise self.error(
                    f"tensor {name} lies at bytes {start} to {start + num_bytes}, but the file ends at {len(self.data)}"
                )
            tensors[name] = StoredTensor(shape, kind, start, num_bytes)
            end_before, name_before = start + num_bytes, name
        if len(self.data) > round_up(end_before, alignment):  # writers fill up to the alignment
            raise self.error(f"the tensors end at byte {end_before}, but the file goes on to {len(self.data)}")
        return tensors

    def tensor(self, doing: str) -> tuple[str, tuple[int, ...], GgmlType, int]:
        self.doing = doing
        name = self.string()
        self.doing = f"description of tensor {name}"
        if (num_dims := self.integer()) > _MAX_DIMS:
            raise self.error(f"tensor {name} has {num_dims} dims; expected at most {_MAX_DIMS}")
        shape = tuple(reversed([self.length() for _ in range(num_dims)]))
        number, offset = self.integer(), self.length()
        if number not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            remedy = f"Supported are {known}: use a file with those."
            raise self.error(f"tensor {name} has the quantisation number {number}, which is not supported", remedy)
        if not shape or shape[-1] % TYPES[number].block:
            raise self.error(f"tensor {name} of shape {list(shape)} can't be {TYPES[number].name}")
        return name, shape, TYPES[number], offset

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, num_items = self.integer(), self.count(_MAX_ITEMS - self.num_items, "items of arrays")
            self.num_items += num_items
            if item_kind == _STRING:
                return [self.string() for _ in range(num_items)]
            dtype = self.dtype(item_kind)
            return np.frombuffer(self.take(num_items * dtype.itemsize), dtype).tolist()
        return self.scalar(kind)

    def scalar(self, kind: int) -> object:
        dtype = self.dtype(kind)
        found: object = np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        return found

    def dtype(self, kind: int) -> np.dtype[np.generic]:
        if kind not in _SCALARS:
            raise self.error(f"type number {kind} is not known")
        return np.dtype(_SCALARS[kind])

    def integer(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def length(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        found = self.take(self.length())
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise self.error(f"a string is not UTF-8: {found[:40]!r}") from None

    def count(self, most: int, what: str) -> int:
        if (found := self.length()) > most:
            raise self.error(f"there should be {found:,} {what}; expected at most {most:,}")
        return found

    def refuse_part(self, metadata: Mapping[str, object]) -> None:
        """Refuse a file that is one of several, before it is found to lack what the others have."""
        num_parts = metadata.get("split.count", 0)
        if is_whole(num_parts, 2):
            number = metadata.get("split.no", 0)
            part = f"part {number + 1} of {num_parts}" if isinstance(number, int) else f"one of {num_parts} parts"
            remedy = f"Join them: llama-gguf-split --merge {self.path.name} JOINED.gguf, with the first part's name."
            raise self.error(f"this is {part} of a split model", remedy)

    def take(self, num_bytes: int) -> bytes:
        if self.at + num_bytes > len(self.data):
            raise self.error(f"{num_bytes} bytes are wanted at byte {self.at}, but the file ends at {len(self.data)}")
        if self.at + num_bytes > _MAX_HEADER_BYTES:
            raise self.error(f"the header is longer than {_MAX_HEADER_BYTES:,} bytes, the most that is read")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def error(self, problem: str, remedy: str = _DAMAGED) -> CheckpointError:
        return CheckpointError(f"reading {self.path}, {self.doing}: {problem}. {remedy}")
