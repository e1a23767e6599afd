"""Slots: the description of each input of a forward pass, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.fields import Path, path_of
from phonograph.numbers import is_whole

Number = bool | int | float
Placement = Literal["device", "host"]
Compute = Callable[[Any, Extent], Any]
"""Takes the batch and the extent; returns the slot's value, or None to load the batch's own."""

# Finite, unlike what a model computes, and different: verify writes one, then the other.
_FLOAT_POISON = (-173.0, 211.0)


@dataclass(frozen=True)
class Pad:
    """The value of the rows after the used ones, up to the padded size."""

    value: Number | None
    because: str = ""
    null: bool = False
    """Whether the value names a place that nobody uses, a null row or page: padded rows may write there."""

    def __post_init__(self) -> None:
        if self.null and self.value is None:
            raise DeclarationError("a pad without a value names no null row. Write Pad.fill(value, null=True).")
        if self.value is None and not self.because:
            raise DeclarationError(
                "declaring a pad: it has neither a value nor a reason. Write Pad.fill(value), or, if nothing reads "
                "the padding, Pad.unread(because='…')."
            )

    @staticmethod
    def fill(value: Number, because: str = "", *, null: bool = False) -> Pad:
        """Every load writes this value into the padding; one outside the slot's legal range needs a reason.

        With `null` it names a row or page that no live row uses, such as row 0 of a KV cache: what padded rows write
        there is no state. `verify` fails where padding writes anywhere else.
        """
        return Pad(value, because, null)

    @staticmethod
    def unread(because: str) -> Pad:
        """Nothing reads the padding, for this reason; `verify` poisons it to prove the claim."""
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
    """The value of padded rows. Floating-point slots default to 0, or the smallest legal value; others need one."""
    source: str | None = None
    """The field of the batch, or a keyword argument; may be dotted. Default: the slot's name."""
    compute: Compute | None = None
    """Computes the value from the batch and the extent, after the other slots are loaded."""
    absent: Number | None = None
    """A neutral value for when the batch has None here, in a replay and on the eager path alike."""
    keyed: bool = False
    """The batch may have None here, and graphs are recorded with and without it; a computed slot is then absent."""
    place: Placement = "device"
    valid: tuple[Number, Number] | None = None
    """The smallest and largest legal value; samples and poison stay inside it."""
    shared: bool = True
    """Whether runners of one pool may use the same memory in turn; False where it is read after its replay."""

    def __post_init__(self) -> None:
        self._check_kinds()
        for what, name in (("name", self.name), ("source", self.field)):
            if not all(part.isidentifier() for part in name.split(".")):
                raise DeclarationError(
                    f"slot {self.name!r}: the {what} {name!r} is not a dotted field name. "
                    "Write one such as 'inputs.ids'."
                )
        self._check_shape()
        if self.compute is not None and not callable(self.compute):
            raise DeclarationError(
                f"slot {self.name!r}: compute is {self.compute!r}, expected a function. Give compute=f(batch, extent)."
            )
        if self.absent is not None and self.keyed:
            raise DeclarationError(
                f"slot {self.name!r} has absent= and keyed=True. Give absent= for one recording that reads a "
                "neutral value, or keyed=True for recordings with and without it."
            )
        self._check_valid()
        self._check_pad()

    def _check_kinds(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise DeclarationError(
                f"slot {self.name!r}: dtype is {self.dtype!r}, expected a torch.dtype. Write torch.float32."
            )
        if self.pad is not None and not isinstance(self.pad, Pad):
            raise DeclarationError(
                f"slot {self.name!r}: pad is {self.pad!r}, expected a Pad. Write pad=Pad.fill({self.pad!r})."
            )
        if self.valid is not None and (not isinstance(self.valid, tuple) or len(self.valid) != 2):
            raise DeclarationError(
                f"slot {self.name!r}: valid is {self.valid!r}, expected a pair. Write valid=(smallest, largest)."
            )

    def _check_shape(self) -> None:
        if not isinstance(self.shape, tuple):
            raise DeclarationError(f"slot {self.name!r}: the shape {self.shape!r} is not a tuple. Write ('tokens',).")
        for size in self.shape:
            is_name = isinstance(size, str) and size != ""
            if not is_name and not is_whole(size, 1):
                raise DeclarationError(
                    f"slot {self.name!r}: {size!r} in its shape is neither a dim's name nor a size. "
                    "Write names and positive whole numbers."
                )
        if len(set(self.dims)) != len(self.dims):
            raise DeclarationError(
                f"slot {self.name!r}: a dim is twice in its shape {self.shape}. Give the second axis its own dim."
            )

    def _check_valid(self) -> None:
        if self.valid is None:
            return
        for bound in self.valid:
            self._check_number("valid", bound)
            if not math.isfinite(bound):
                raise DeclarationError(f"slot {self.name!r}: valid={self.valid} is not finite. Write finite bounds.")
        if self.valid[0] > self.valid[1]:
            raise DeclarationError(f"slot {self.name!r}: valid={self.valid} is empty. Write (smallest, largest).")

    def _check_pad(self) -> None:
        if self.pad is None:
            if self.dims and not self.dtype.is_floating_point:
                raise DeclarationError(
                    f"slot {self.name!r} has dims {self.dims} and no pad value, and 0 may be a legal {self.dtype}. "
                    "Add pad=Pad.fill(value), or pad=Pad.unread(because=…)."
                )
            legal = self.valid is None or self.valid[0] <= 0 <= self.valid[1]
            object.__setattr__(self, "pad", Pad.fill(0 if legal or self.valid is None else self.valid[0]))
        elif self.pad.value is not None:
            self._check_number("pad", self.pad.value)
        elif self.valid is None and not self.dtype.is_floating_point and self.dtype != torch.bool:
            raise DeclarationError(
                f"slot {self.name!r}: its padding is declared unread, and verify poisons it only within a legal "
                "range. Add valid=(smallest, largest)."
            )
        if self.absent is not None:
            self._check_number("absent", self.absent)
        assert self.pad is not None
        low, high = self.valid if self.valid is not None and self.dims else (-math.inf, math.inf)
        is_told = bool(self.pad.because) or self.pad.null  # a null row is no live row's
        if self.pad.value is not None and not is_told and not low <= self.pad.value <= high:
            raise DeclarationError(
                f"slot {self.name!r}: padded rows hold {self.pad.value!r}, outside of valid={self.valid}. Pad with a "
                f"legal value, widen valid, or say why none is needed: Pad.fill({self.pad.value!r}, because='…')."
            )

    def _check_number(self, what: str, number: Number) -> None:
        """Refuse a number that the dtype can't hold."""
        if self.dtype.is_floating_point:
            fits = not math.isfinite(number) or abs(number) <= torch.finfo(self.dtype).max
        elif self.dtype == torch.bool:
            fits = number in (0, 1)
        elif self.dtype.is_complex:
            fits = True
        else:
            limits = torch.iinfo(self.dtype)
            fits = limits.min <= number <= limits.max and number == int(number)
        if not fits:
            raise DeclarationError(
                f"slot {self.name!r}: {what} has {number!r}, which {self.dtype} can't hold. Change one of them."
            )

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(size for size in self.shape if isinstance(size, str))

    @property
    def field(self) -> str:
        return self.source or self.name

    @property
    def path(self) -> Path:
        return path_of(self.field)

    @property
    def optional(self) -> bool:
        return self.absent is not None or self.keyed

    @property
    def is_unread(self) -> bool:
        """Whether the slot claims that nothing reads its padding."""
        return self.pad is not None and self.pad.value is None

    @property
    def filler(self) -> Number:
        """What the padding holds: the pad value, or a legal one where nothing reads it."""
        assert self.pad is not None
        if self.pad.value is not None:
            return self.pad.value
        return self.valid[0] if self.valid is not None else 0

    def poison(self, pattern: int) -> Number:
        """A finite value inside the legal range; the two patterns differ wherever the range allows."""
        if self.valid is not None:
            return self.valid[pattern]
        if self.dtype.is_floating_point:
            return _FLOAT_POISON[pattern]
        return bool(pattern) if self.dtype == torch.bool else 0

    def sizes(self, of: Mapping[str, int]) -> tuple[int, ...]:
        """The slot's shape with sizes in the place of names."""
        return tuple(of[size] if isinstance(size, str) else size for size in self.shape)


def check_slots(slots: Sequence[Slot]) -> None:
    """Refuse two slots of one name or one source, which would write the same buffer or field."""
    for what, values in (("name", [s.name for s in slots]), ("source", [s.field for s in slots])):
        repeated = next((value for i, value in enumerate(values) if value in values[:i]), None)
        if repeated is not None:
            raise DeclarationError(f"two slots have the {what} {repeated!r}. Remove or rename one.")
    for slot in slots:
        inside = next((s for s in slots if s is not slot and s.path[: len(slot.path)] == slot.path), None)
        if inside is not None:
            raise DeclarationError(
                f"the source {inside.field!r} of slot {inside.name!r} lies inside slot {slot.name!r}, a tensor. "
                "Change one of the sources."
            )


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


def check_known(slots: Sequence[Slot], dims: Mapping[str, Dim]) -> None:
    """Refuse slots over dims that are not declared, and a size and a slot that fill one field."""
    fields = {slot.field: f"slot {slot.name!r}" for slot in slots}
    for slot in slots:
        unknown = next((name for name in slot.dims if name not in dims), None)
        if unknown is not None:
            raise DeclarationError(
                f"slot {slot.name!r} has the unknown dim {unknown!r} (known: {', '.join(dims)}). "
                f"Declare Dim({unknown!r}), or correct the name."
            )
    for name, dim in dims.items():
        if dim.field in fields:
            raise DeclarationError(
                f"dim {name!r} puts its size into the field {dim.field!r}, which is {fields[dim.field]}'s. Rename one."
            )
        if dim.field is not None:
            fields[dim.field] = f"dim {name!r}"
