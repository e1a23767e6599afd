"""Slot values: the checks on what a batch gives a slot, and host values as numpy data."""

from __future__ import annotations

import numbers
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from phonograph.errors import LoadError
from phonograph.graphs.inputs.slot import Number, Slot

Array = np.ndarray[Any, np.dtype[Any]]

# numpy has no bfloat16 or float8: their bits are written, in a type of the same size.
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


@lru_cache(maxsize=64)
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """numpy's name for a torch dtype, or None (bfloat16, float8 …)."""
    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return None


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, array, number or nested list; None where it has none."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    try:
        return tuple(np.shape(value))
    except ValueError:  # rows of different lengths
        return None


class SlotValues:
    """The values of one slot: what fits it, and how numpy writes it."""

    def __init__(self, slot: Slot, owner: str) -> None:
        self.slot = slot
        self._who = f"loading {owner}: slot {slot.name!r}"
        named = numpy_dtype(slot.dtype)
        self.has_bits = named is None
        self._bits = _BITS.get(slot.dtype.itemsize, torch.uint8)
        self.kind: np.dtype[Any] = named if named is not None else np.dtype(str(self._bits).removeprefix("torch."))
        self._safe: set[np.dtype[Any]] = {self.kind}
        self.filler = self._number(slot.filler)
        self.absent = self._number(slot.absent) if slot.absent is not None else None

    def _number(self, number: Number) -> Any:
        """A number as numpy writes it into the slot."""
        if not self.has_bits:
            return self.kind.type(number)
        return torch.tensor(number, dtype=self.slot.dtype).view(self._bits).numpy()[()]

    def array(self, value: Any, shape: tuple[int, ...]) -> Array:
        """A host value as data to write into numpy memory of `kind`; refused where that would lose it."""
        if type(value) is np.ndarray and value.dtype is self.kind:
            found: Array = value
        else:
            found = self._tensor_array(value) if isinstance(value, torch.Tensor) else self._plain_array(value)
        if found.shape != shape:
            if found.size or 0 not in shape:
                raise self.wrong_shape(found.shape, shape)
            found = found.reshape(shape)  # [] does not show its inner axes
        return found

    def tensor(self, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """A host value as a host tensor of the slot's dtype."""
        array = self.array(value, shape)
        if array.dtype != self.kind or not (array.flags.c_contiguous and array.flags.writeable):
            array = array.astype(self.kind, order="C")
        return self.over(array)

    def over(self, array: Array) -> torch.Tensor:
        """The same memory as a tensor of the slot's dtype."""
        tensor = torch.from_numpy(array)
        return tensor.view(self.slot.dtype) if self.has_bits else tensor

    def check(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that doesn't fit.

        The range of integers is checked on the host only: the device would have to be waited for.
        """
        self._check_strided(tensor)
        if tensor.shape != shape:
            raise self.wrong_shape(tuple(tensor.shape), shape)
        if tensor.dtype != self.slot.dtype:
            self._check_cast(tensor)
            if tensor.is_cpu:
                self._tensor_array(tensor)

    def misplaced(self, tensor: torch.Tensor, wanted: torch.device) -> LoadError:
        """The error for a tensor on a device that the slot is not on."""
        return LoadError(f"{self._who} is on {wanted}, the batch has a tensor on {tensor.device}. Move it first.")

    def missing(self) -> LoadError:
        """The error for a value that the batch doesn't have."""
        declined = "its compute declined and " if self.slot.compute is not None else ""
        return LoadError(
            f"{self._who}: {declined}the batch has no {self.slot.field!r}; expected {self.slot.dtype} of shape "
            f"{self.slot.shape}. Give it a value, or declare the slot with absent=… or keyed=True."
        )

    def wrong_shape(self, found: tuple[int, ...], expected: tuple[int, ...]) -> LoadError:
        """The error for a value of another shape."""
        return LoadError(
            f"{self._who} has shape {self.slot.shape}, here {expected}, but the batch has {tuple(found)}. "
            "Give it the used rows."
        )

    def _check_strided(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_nested:
            found = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise LoadError(
                f"{self._who} is a dense tensor, the batch has a {found} one. Make it dense (to_dense(), or "
                "to_padded_tensor() of a nested one), or pass its indices and values in slots of their own."
            )

    def _tensor_array(self, value: torch.Tensor) -> Array:
        self._check_strided(value)
        same = value.dtype == self.slot.dtype
        if not same:
            self._check_cast(value)
        if self.has_bits or numpy_dtype(value.dtype) is None:
            return self._converted(value, value)
        array: Array = value.numpy(force=True)  # of a host tensor: detached, without a copy
        return array if same else self._fitting(array)

    def _plain_array(self, value: Any) -> Array:
        array: Array = value if isinstance(value, np.ndarray) else self._listed(value)
        if self.has_bits:
            if array.dtype.kind not in "biuf":
                raise self._wrong_dtype(array.dtype)
            return self._converted(torch.from_numpy(array.astype(np.float64)), array)
        return array if array.dtype in self._safe else self._fitting(array)

    def _listed(self, value: Any) -> Array:
        """A list or a number as an array."""
        if not isinstance(value, list | tuple | numbers.Number | np.generic):
            raise LoadError(
                f"{self._who} got a {type(value).__name__}; expected a tensor, an array, a list or a number. "
                "Convert it."
            )
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise LoadError(
                f"{self._who} got a {type(value).__name__} that is not an array: {error}. "
                f"Give values of {self.slot.dtype} in the shape {self.slot.shape}."
            ) from None
        return array if array.size else array.astype(self.kind)  # numpy gives [] the type float64

    def _check_cast(self, value: torch.Tensor) -> None:
        if not torch.can_cast(value.dtype, self.slot.dtype):
            raise self._wrong_dtype(value.dtype)

    def _fitting(self, array: Array) -> Array:
        """The array, if its values fit the slot's dtype."""
        found, kind = array.dtype, self.kind
        if np.can_cast(found, kind, "safe"):
            self._safe.add(found)
        elif found.kind in "iu" and kind.kind in "iu":
            limits = np.iinfo(kind)
            if array.size and (array.min() < limits.min or array.max() > limits.max):
                raise self._out_of_range(array)
        elif found.kind in "iuf" and kind.kind == "f":
            try:
                with np.errstate(over="raise"):
                    return array.astype(kind)
            except FloatingPointError:
                raise self._out_of_range(array) from None
        elif not np.can_cast(found, kind, "same_kind"):
            raise self._wrong_dtype(found)
        return array

    def _converted(self, value: torch.Tensor, given: torch.Tensor | Array) -> Array:
        """Through torch, where numpy lacks the type."""
        with torch.no_grad():
            made = value.to(self.slot.dtype).contiguous()
            if made.dtype != value.dtype and bool((value.isfinite() & ~made.double().isfinite()).any()):
                raise self._out_of_range(given)
            array: Array = (made.view(self._bits) if self.has_bits else made).numpy(force=True)
        return array

    def _wrong_dtype(self, found: object) -> LoadError:
        return LoadError(f"{self._who} is {self.slot.dtype}, the batch has {found}. Convert it.")

    def _out_of_range(self, given: torch.Tensor | Array) -> LoadError:
        return LoadError(
            f"{self._who} is {self.slot.dtype}, and a value of the batch ({given.min()} … {given.max()}) "
            "does not fit. Declare a wider dtype."
        )
