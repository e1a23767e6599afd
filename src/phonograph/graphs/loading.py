"""One load: takes the values of a batch one by one, and issues as few copies as they allow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from phonograph.graphs.fields import Path
from phonograph.graphs.layout import Fit, Layout
from phonograph.graphs.values import shape_of


class LoadMode(Enum):
    """How a path takes its inputs."""

    GRAPH = "graph"
    """Into the buffers that graphs read; a neutral value stands for an absent input."""
    EAGER = "eager"
    """Into buffers that grow; an absent input stays None."""
    NO_COPY = "no_copy"
    """As EAGER, but device values are carried, not copied."""


@dataclass
class LoadCounts:
    """Copies that loads have issued."""

    transfers: int = 0
    """From host to device: one for all packed slots, and one for each other slot that got a host value."""
    grouped: int = 0
    """Device to device: all small contiguous values of a load in one call for each pair of dtypes."""
    plain: int = 0
    """Device to device: one large or strided value each."""


_Group = tuple[list[torch.Tensor], list[torch.Tensor]]


class Load:
    """The copies of one load, on their way."""

    def __init__(self, layout: Layout, mode: LoadMode, counts: LoadCounts) -> None:
        self._layout = layout
        self._mode = mode
        self._counts = counts
        self._index = -1
        self._start = 1 << 62  # the part of the block that this load writes, in bytes
        self._end = 0
        self._groups: dict[tuple[torch.dtype, torch.dtype], _Group] = {}
        self._plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._uploads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._packed: list[Fit] = []
        self._on_host: dict[Path, Any] = {}
        self.exposed: dict[Path, Any] = {}
        """Fields whose view is not the cell's: None, or a carried value."""
        self.absent: list[Path] = []
        """Fields of slots for which the batch has None."""

    def take(self, fit: Fit, value: Any) -> None:
        """Put one value on its way into its buffer, and its pad value into the tail."""
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
        """As `take`, for what a function gave: the used rows, or all padded rows, whose tail then stands.

        It is never carried: it may be memory of the host ring, which a later load writes.
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
        block = self._layout.block
        if block is not None and self._end:
            target, sources = self._layout.part(self._start, self._end)
            target.copy_(sources[self._index], non_blocking=True)
            block.ring[self._index].fence.record()
            self._counts.transfers += 1
        for targets, values in self._groups.values():
            torch._foreach_copy_(targets, values, non_blocking=True)
            self._counts.grouped += 1
        for target, value in self._plain:
            target.copy_(value, non_blocking=True)
            self._counts.plain += 1
        for target, value in self._uploads:
            # From pageable memory the copy has left the value when the call returns; from pinned memory it has not.
            target.copy_(value, non_blocking=not value.is_pinned())
            self._counts.transfers += 1

    def _carry(self, fit: Fit, value: torch.Tensor) -> bool:
        """Whether a device value is used where it is, in the mode that allows it."""
        if self._mode is not LoadMode.NO_COPY or value.dtype != fit.slot.dtype or fit.tails:
            return False
        fit.values.check(value, fit.shape)
        self.exposed[fit.path] = value
        return True

    def _take_tensor(self, fit: Fit, value: torch.Tensor) -> None:
        fit.values.check(value, fit.shape)
        if fit.empty:
            pass
        elif fit.slot.place == "host":
            fit.used.copy_(value)
        else:
            self._copy(fit, value)
        self._pad(fit)

    def _copy(self, fit: Fit, value: torch.Tensor) -> None:
        if self._layout.holds(value.data_ptr()):
            # A value that lies in a buffer is read before the buffers are written, or is in its place already.
            if not fit.packed and value.data_ptr() == fit.used.data_ptr() and value.stride() == fit.used.stride():
                return
            value = value.clone()
        if fit.grouped and value.is_contiguous():
            targets, values = self._groups.setdefault((fit.slot.dtype, value.dtype), ([], []))
            targets.append(fit.used)
            values.append(value)
        else:
            self._plain.append((fit.used, value))

    def _take_host(self, fit: Fit, value: Any) -> None:
        if fit.packed:
            index = self._ring(fit)
            fit.arrays[index][...] = fit.values.array(value, fit.shape)
            for tail in fit.array_tails[index]:
                tail[...] = fit.cell.filler
            self._packed.append(fit)
            return
        tensor = self._on_host[fit.path] = fit.values.tensor(value, fit.shape)
        if fit.slot.place == "host":
            fit.used.copy_(tensor)
        elif not fit.empty:
            self._uploads.append((fit.used, tensor))
        self._pad(fit)

    def _take_absent(self, fit: Fit) -> None:
        slot = fit.slot
        if not slot.optional:
            raise fit.values.missing()
        self.absent.append(fit.path)
        if slot.keyed or self._mode is not LoadMode.GRAPH:
            self.exposed[fit.path] = None
        elif fit.packed:
            fit.cell.arrays[self._ring(fit)][...] = fit.cell.absent
        else:
            assert slot.absent is not None
            fit.cell.view.fill_(slot.absent)

    def _pad(self, fit: Fit) -> None:
        if not fit.tails:
            return
        if fit.packed:
            # Unread tails too: the block holds other slots' bytes at other extents, and those need not be legal.
            for tail in fit.array_tails[self._ring(fit)]:
                tail[...] = fit.cell.filler
        elif not fit.slot.is_unread:
            for view in fit.tails:
                view.fill_(fit.slot.filler)

    def _ring(self, fit: Fit) -> int:
        """The number of the host block to write a packed slot in; the transfer will reach over its place."""
        if self._index < 0:
            self._index = self._layout.take()
        span = fit.cell.span
        self._start = min(self._start, span.start)
        self._end = max(self._end, span.stop)
        return self._index
