"""Slots: the description of each input of a forward pass, as frozen data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from phonograph.errors import DeclarationError
from phonograph.graphs.extent import Dim, Extent

Number = bool | int | float
Place = Literal["device", "host"]
Compute = Callable[[Any, Extent], Any]
"""Takes the batch and the extent; returns the slot's value, or None to carry the batch's own."""


@dataclass(frozen=True)
class Pad:
    """What stands in the rows between used and padded."""

    value: Number | None
    because: str = ""

    @staticmethod
    def fill(value: Number) -> Pad:
        """Every load writes this value into the tail."""
        if value is None:
            raise DeclarationError("Pad.fill needs a value. If nobody reads the tail, say Pad.unread(because=…).")
        return Pad(value)

    @staticmethod
    def unread(because: str) -> Pad:
        """Nobody reads the tail, for this reason; `verify` poisons it to prove the claim."""
        if not because:
            raise DeclarationError("Pad.unread needs a reason: because='…'.")
        return Pad(None, because)


@dataclass(frozen=True)
class Slot:
    """One input: `Slot("mrope_positions", (3, "tokens"), torch.int64, pad=Pad.fill(0))`.

    A name in the shape is a dim, and stands where the axis to slice is.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    pad: Pad | None = None
    """What stands in padded rows. Floating-point slots default to 0; others must say."""
    source: str | None = None
    """The field of the batch, or of what is passed beside it; may be dotted. Default: the slot's name."""
    compute: Compute | None = None
    """Computes the value from the batch and the extent, after the other slots are loaded."""
    absent: Number | None = None
    """A neutral value for graphs when the batch has None here; the eager view carries None."""
    keyed: bool = False
    """The batch may have None here, and graphs are recorded with and without it."""
    place: Place = "device"
    valid: tuple[Number, Number] | None = None
    """The smallest and largest legal value; samples and poison stay inside it."""

    def __post_init__(self) -> None:
        if not self.name or any(not part.isidentifier() for part in self.field.split(".")):
            raise DeclarationError(f"slot {self.name!r}: the source {self.field!r} is not a dotted field name.")
        for size in self.shape:
            if isinstance(size, bool) or not isinstance(size, int | str) or (isinstance(size, int) and size < 1):
                raise DeclarationError(f"slot {self.name!r}: {size!r} in its shape is neither a dim's name nor a size.")
        if len(set(self.dims)) != len(self.dims):
            raise DeclarationError(f"slot {self.name!r}: a dim stands twice in its shape {self.shape}.")
        if self.absent is not None and self.keyed:
            raise DeclarationError(f"slot {self.name!r}: give absent= or keyed=True, not both.")
        self._check_pad()

    def _check_pad(self) -> None:
        if self.pad is None:
            if self.dims and not self.dtype.is_floating_point:
                raise DeclarationError(
                    f"slot {self.name!r} has dims {self.dims} and no pad value, and 0 may be a legal {self.dtype}. "
                    "Add pad=Pad.fill(value), or pad=Pad.unread(because=…)."
                )
            object.__setattr__(self, "pad", Pad.fill(0))
        elif self.pad.value is None and self.valid is None and not self.dtype.is_floating_point:
            raise DeclarationError(
                f"slot {self.name!r}: verify poisons an unread tail inside the legal range. Add valid=(low, high)."
            )
        if self.valid is not None and self.valid[0] > self.valid[1]:
            raise DeclarationError(f"slot {self.name!r}: valid={self.valid} is empty. Write (smallest, largest).")

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(size for size in self.shape if isinstance(size, str))

    @property
    def field(self) -> str:
        return self.source or self.name

    @property
    def optional(self) -> bool:
        return self.absent is not None or self.keyed

    def sizes(self, of: Mapping[str, int]) -> tuple[int, ...]:
        """The slot's shape with sizes in the place of names."""
        return tuple(of[size] if isinstance(size, str) else size for size in self.shape)


def check_slots(slots: Iterable[Slot]) -> None:
    """Refuse two slots of one name or one source, which would write the same buffer or field."""
    for attribute in ("name", "field"):
        seen: set[str] = set()
        for slot in slots:
            value: str = slot.name if attribute == "name" else slot.field
            if value in seen:
                raise DeclarationError(f"two slots have the {attribute} {value!r}. Remove or rename one.")
            seen.add(value)


def collect_dims(slots: Iterable[Slot], declared: Iterable[Dim | str]) -> dict[str, Dim]:
    """Every dim that the slots use, with its declaration where there is one."""
    dims: dict[str, Dim] = {}
    for item in declared:
        dim = Dim(item) if isinstance(item, str) else item
        if dim.name in dims:
            raise DeclarationError(f"dim {dim.name!r} is declared twice. Remove one.")
        dims[dim.name] = dim
    for slot in slots:
        for name in slot.dims:
            dims.setdefault(name, Dim(name))
    return dims
