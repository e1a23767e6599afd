"""Request state on the device: a row per sequence, which graphs gather from and scatter to. Row 0 is null."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from phonograph.devices import Device
from phonograph.engine.request import SamplingParams
from phonograph.engine.sampler import SamplingRows
from phonograph.errors import DeviceError
from phonograph.graphs.buffers import LoadMode, Registry
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.slots import Pad, Slot

_FLOATS = ("temperature", "top_p", "min_p")
_INTS = ("top_k",)
_LARGEST = 2**31 - 1
"""More than any vocabulary has."""


@contextmanager
def allocating(what: str, remedy: str) -> Iterator[None]:
    """A block that does nothing but allocate: where there is no room, says for what, and what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # what torch raises depends on the size
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise DeviceError(f"allocating {what}: {why}. {remedy}") from error


@dataclass
class TableUpdates:
    """What the host changes in the tables before a step: all of it goes over in one transfer."""

    rows: list[int] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, index, page)"""

    def __bool__(self) -> bool:
        return bool(self.rows or self.pages)

    def enter(self, row: int, params: SamplingParams, seed: int, length: int) -> None:
        """A sequence takes a row."""
        self.rows.append(row)
        self.params.append(params)
        self.seeds.append(seed)
        self.lengths.append(length)


class RequestTables:
    """Owned by the engine, never pooled: a row means something from the entry of its sequence to its retirement."""

    def __init__(self, device: Device, max_seqs: int, max_pages: int) -> None:
        on, size = device.torch_device, max_seqs + 1
        self.last_token = torch.zeros(size, dtype=torch.int64, device=on)
        self.length = torch.zeros(size, dtype=torch.int64, device=on)
        self.pages = torch.zeros(size, max_pages, dtype=torch.int32, device=on)
        self.temperature = torch.zeros(size, dtype=torch.float32, device=on)
        self.top_p = torch.ones(size, dtype=torch.float32, device=on)
        self.min_p = torch.zeros(size, dtype=torch.float32, device=on)
        self.top_k = torch.zeros(size, dtype=torch.int32, device=on)
        self.seed = torch.zeros(size, dtype=torch.int64, device=on)
        slots = [
            Slot("rows", ("entries",), torch.int64, pad=Pad.fill(0)),
            Slot("seeds", ("entries",), torch.int64, pad=Pad.fill(0)),
            Slot("lengths", ("entries",), torch.int64, pad=Pad.fill(0)),
            Slot("floats", (len(_FLOATS), "entries"), torch.float32),
            Slot("ints", (len(_INTS), "entries"), torch.int32, pad=Pad.fill(0)),
            Slot("places", (3, "placed"), torch.int64, pad=Pad.fill(0)),
        ]
        dims = {"entries": Dim("entries"), "placed": Dim("placed")}
        self._registry = Registry(device, slots, dims, owner="request tables")

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of it, for those who save and restore rows."""
        return (
            self.last_token,
            self.length,
            self.pages,
            self.temperature,
            self.top_p,
            self.min_p,
            self.top_k,
            self.seed,
        )

    def apply(self, updates: TableUpdates) -> None:
        """Write the host's changes, after all steps launched so far."""
        if not updates:
            return
        batch = _as_arrays(updates)
        used = {"entries": len(updates.rows), "placed": len(updates.pages)}
        view = self._registry.load(batch, Extent(used, used), mode=LoadMode.EAGER).batch
        if updates.rows:
            rows = view["rows"]
            self.length[rows] = view["lengths"]
            self.seed[rows] = view["seeds"]
            for index, name in enumerate(_FLOATS):
                getattr(self, name)[rows] = view["floats"][index]
            for index, name in enumerate(_INTS):
                getattr(self, name)[rows] = view["ints"][index]
        if updates.pages:
            row, index_, page = view["places"]
            self.pages[row, index_] = page.int()

    def put_back(self, row: int, last_token: int, length: int) -> None:
        """Undo what a step wrote into a row, so that it can be run again."""
        self.last_token[row] = last_token
        self.length[row] = length

    def sampling(self, rows: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
        """The sampling parameters of these rows, for the token at these positions."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            positions,
        )


def _as_arrays(updates: TableUpdates) -> dict[str, Any]:
    params: Sequence[SamplingParams] = updates.params
    places = np.asarray(updates.pages, dtype=np.int64).reshape(-1, 3).T
    return {
        "rows": np.asarray(updates.rows, dtype=np.int64),
        "seeds": np.asarray(updates.seeds, dtype=np.int64),
        "lengths": np.asarray(updates.lengths, dtype=np.int64),
        "floats": np.asarray([[getattr(p, name) for p in params] for name in _FLOATS], dtype=np.float32),
        "ints": np.asarray([[min(getattr(p, name), _LARGEST) for p in params] for name in _INTS], dtype=np.int32),
        "places": places,
    }
