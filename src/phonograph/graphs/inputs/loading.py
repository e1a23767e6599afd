"""Load: the values of one batch, taken one by one and written with as few copies as possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from phonograph.graphs.inputs.fields import Path, fetch
from phonograph.graphs.inputs.layout import Fit, Layout, Steps
from phonograph.graphs.inputs.slot import Number
from phonograph.graphs.inputs.values import shape_of


class LoadMode(Enum):
    """How a path takes its inputs."""

    GRAPH = "graph"
    """Into the buffers that graphs read."""
    EAGER = "eager"
    """Into buffers that grow."""
    NO_COPY = "no_copy"
    """Device values are passed as they are, and others are converted into new memory, which a body may keep."""


@dataclass
class LoadCounts:
    """Copies that loads have issued."""

    transfers: int = 0
    """From host to device: one for all packed slots, and one for each other slot that got a host value."""
    grouped: int = 0
    """Device to device: all small contiguous values of a load in one call for each pair of dtypes."""
    plain: int = 0
    """Device to device: one large or strided value each."""


_Copy = tuple[torch.Tensor, torch.Tensor]
_Group = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Where to, and from where."""


class _Copies:
    """The writes that are not packed."""

    def __init__(self) -> None:
        self.fills: list[tuple[torch.Tensor, Number]] = []
        self.groups: dict[tuple[torch.dtype, torch.dtype], _Group] = {}
        self.plain: list[_Copy] = []
        self.uploads: list[_Copy] = []
        self.within_host: list[_Copy] = []

    def issue(self, counts: LoadCounts) -> None:
        """Issue them all."""
        for target, number in self.fills:
            target.fill_(number)
        for targets, values in self.groups.values():
            torch._foreach_copy_(targets, values, non_blocking=True)
            counts.grouped += 1
        for target, value in self.plain:
            target.copy_(value, non_blocking=True)
            counts.plain += 1
        for target, value in self.uploads:
            # From pageable memory the call returns once the source was read; from pinned memory it may return before.
            target.copy_(value, non_blocking=not value.is_pinned())
            counts.transfers += 1
        for target, value in self.within_host:
            target.copy_(value)


class Load:
    """The writes of one load: collected first, so that a batch that is refused leaves the buffers as they were."""

    def __init__(self, layout: Layout, mode: LoadMode, counts: LoadCounts) -> None:
        self._layout = layout
        self._mode = mode
        self._counts = counts
        self._index = -1
        self._padded_before: object = None
        self._packed: list[Fit] = []
        self._padded: list[Fit] = []
        self._made: _Copies | None = None
        self._on_host: dict[Path, Any] = {}
        self.exposed: dict[Path, Any] = {}
        """Fields whose view is not the cell's: None, or a carried value."""
        self.absent: list[Path] = []
        """Fields of keyed slots for which the batch has None."""

    @property
    def _copies(self) -> _Copies:
        if self._made is None:
            self._made = _Copies()
        return self._made

    def take_all(self, steps: Steps, batch: Any, kwargs: Mapping[str, Any]) -> None:
        """Take the batch's value for each slot; the common case in line, since this is most of a step's host time."""
        plain = type(batch) is dict and not kwargs
        packed, index, tails_stand = self._packed, -1, False
        for fit in steps.loaded:
            value = batch.get(fit.name) if plain and fit.name else fetch(batch, kwargs, fit.path)
            if type(value) is np.ndarray and value.dtype is fit.kind and value.shape == fit.shape:
                if index < 0:
                    index = self._ring()
                    tails_stand = self._padded_before is steps
                fit.arrays[index][...] = value
                if not tails_stand:
                    for tail in fit.array_tails[index]:
                        tail[...] = fit.filler
                packed.append(fit)
            else:
                self.take(fit, value)
        if index >= 0 and len(packed) == len(steps.fits):
            self._layout.note_tails(index, steps)

    def take(self, fit: Fit, value: Any) -> None:
        """Schedule the write of one value into its buffer, and of its pad value into the tail."""
        if value is None:
            self._take_absent(fit)
            return
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.device == fit.device:
            if not self._carry(fit, value):
                self._take_tensor(fit, value)
        elif is_tensor and not value.is_cpu:
            raise fit.values.misplaced(value, fit.device)
        else:
            self._take_host(fit, value)

    def take_computed(self, fit: Fit, full: Fit, value: Any) -> None:
        """As `take`, for a computed value: the used rows, or all padded rows, whose tail is then kept.

        It is never passed as it is: it may be memory of the host ring, which a later load overwrites.
        """
        into = full if shape_of(value) == full.shape else fit
        if isinstance(value, torch.Tensor) and value.device == fit.device:
            self._take_tensor(into, value)
        else:
            self.take(into, value)

    def seen(self) -> dict[Path, Any]:
        """The used rows of what was loaded from the host so far, as tensors of the slots' dtypes."""
        return self._on_host | {fit.path: fit.host_rows(self._index) for fit in self._packed}

    def issue(self) -> None:
        """One transfer for all packed slots; after it, since it overwrites the block, the other copies."""
        if self._index >= 0:
            target, sources = self._layout.part(self._packed, self._padded)
            target.copy_(sources[self._index], non_blocking=True)
            self._layout.passed(self._index)
            self._counts.transfers += 1
        if self._made is not None:
            self._made.issue(self._counts)

    def _carry(self, fit: Fit, value: torch.Tensor) -> bool:
        """Whether a device value is used where it is, in the mode that allows it."""
        if self._mode is not LoadMode.NO_COPY or value.dtype != fit.slot.dtype or fit.tails:
            return False
        fit.values.check(value, fit.shape)
        if self._layout.holds(value.data_ptr()):  # this load may write there
            return False
        self.exposed[fit.path] = value
        return True

    def _take_tensor(self, fit: Fit, value: torch.Tensor) -> None:
        fit.values.check(value, fit.shape)
        if not fit.empty:
            self._copy(fit, value)
        self._pad(fit)

    def _copy(self, fit: Fit, value: torch.Tensor) -> None:
        if self._layout.holds(value.data_ptr()):
            # A value that lies in a buffer is read before any buffer is written, unless it is in its own place already.
            if not fit.packed and value.data_ptr() == fit.used.data_ptr() and value.stride() == fit.used.stride():
                return
            value = value.clone()
        if fit.slot.place == "host":
            self._copies.within_host.append((fit.used, value))
        elif fit.grouped and value.is_contiguous():
            targets, values = self._copies.groups.setdefault((fit.slot.dtype, value.dtype), ([], []))
            targets.append(fit.used)
            values.append(value)
        else:
            self._copies.plain.append((fit.used, value))

    def _take_host(self, fit: Fit, value: Any) -> None:
        if fit.packed:
            array = fit.values.array(value, fit.shape)
            index = self._ring()
            fit.arrays[index][...] = array
            for tail in fit.array_tails[index]:
                tail[...] = fit.filler
            self._packed.append(fit)
            return
        tensor = self._on_host[fit.path] = fit.values.tensor(value, fit.shape)
        if not fit.empty:
            copies = self._copies.within_host if fit.slot.place == "host" else self._copies.uploads
            copies.append((fit.used, tensor))
        self._pad(fit)

    def _take_absent(self, fit: Fit) -> None:
        slot = fit.slot
        if not slot.optional:
            raise fit.values.missing()
        if slot.keyed:
            self.absent.append(fit.path)
            self.exposed[fit.path] = None
            return
        assert slot.absent is not None
        if fit.packed:
            fit.arrays[self._ring()][...] = fit.values.absent
            self._padded.append(fit)
        elif not fit.empty:
            self._copies.fills.append((fit.used, slot.absent))
        self._pad(fit)

    def _pad(self, fit: Fit) -> None:
        if not fit.tails:
            return
        if fit.packed:
            # Unread tails too: the block holds other slots' bytes at other extents, and those need not be legal.
            for tail in fit.array_tails[self._ring()]:
                tail[...] = fit.filler
            self._padded.append(fit)
        elif not fit.slot.is_unread or fit.slot.valid is not None:
            # An unread tail may hold anything legal; where not everything is, another runner's rows need not be.
            self._copies.fills += [(view, fit.slot.filler) for view in fit.tails]

    def _ring(self) -> int:
        """The number of the host block to write packed slots in."""
        if self._index < 0:
            self._index, self._padded_before = self._layout.take()
        return self._index
