"""Fact: an assumption of a recording: a value, where it is stored, and what it was at capture."""

from __future__ import annotations

import enum
import math
import types
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.nn.modules import module as every_module

from phonograph.errors import Frame
from phonograph.graphs.recording.places import ABSENT, PLAIN, same

FactKind = Literal[
    "mode", "global", "closure", "attribute", "item", "items", "default", "hooks", "class", "tensor", "address"
]

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
TENSOR_PARTS = ("_version", "requires_grad", "grad")


class Source(Protocol):
    """Where a fact's value is stored. Reading it runs no user code."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for sources of one place."""
        ...

    def get(self) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class InDict:
    """An entry of a dict: of an object, a class, a module, or a dict itself."""

    holder: dict[Any, Any]
    key: Any

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("dict", id(self.holder), self.key)

    def get(self) -> Any:
        return dict.get(self.holder, self.key, ABSENT)


@dataclass(frozen=True, slots=True, eq=False)
class InCell:
    """The content of a closure cell."""

    holder: types.CellType

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("cell", id(self.holder))

    def get(self) -> Any:
        try:
            return self.holder.cell_contents
        except ValueError:
            return ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class InSlot:
    """A slot of an object."""

    holder: Any
    slot: types.MemberDescriptorType

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("slot", id(self.holder), self.slot.__name__)

    def get(self) -> Any:
        try:
            return self.slot.__get__(self.holder)
        except AttributeError:
            return ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class InList:
    """An item of a list."""

    holder: list[Any]
    index: int

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("list", id(self.holder), self.index)

    def get(self) -> Any:
        try:
            return list.__getitem__(self.holder, self.index)
        except IndexError:
            return ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class AllItems:
    """What a list, a set or a dict of modules holds, one level deep."""

    holder: Any

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("items", id(self.holder))

    def get(self) -> Any:
        holder = self.holder
        return tuple(items_of(holder)) if isinstance(holder, dict) else tuple(holder)


@dataclass(frozen=True, slots=True, eq=False)
class OfFunction:
    """A part of a function that can be replaced: its code, its defaults."""

    holder: types.FunctionType
    part: str
    """One of `FUNCTION_PARTS`."""

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.part, id(self.holder))

    def get(self) -> Any:
        found = getattr(self.holder, self.part)
        return tuple(found.items()) if isinstance(found, dict) else found


@dataclass(frozen=True, slots=True, eq=False)
class ClassOf:
    """The class of an object, which can be exchanged for another."""

    holder: Any

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("class", id(self.holder))

    def get(self) -> Any:
        return type(self.holder)


@dataclass(frozen=True, slots=True, eq=False)
class AddressOf:
    """Where the memory of a tensor begins, and how it is laid out."""

    holder: torch.Tensor

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("address", id(self.holder))

    def get(self) -> Any:
        return address_of(self.holder)


@dataclass(frozen=True, slots=True, eq=False)
class OfTensor:
    """What Python keeps about a tensor, besides its memory."""

    holder: torch.Tensor
    part: str
    """One of `TENSOR_PARTS`."""

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.part, id(self.holder))

    def get(self) -> Any:
        try:
            with torch._C.DisableTorchFunction():
                return getattr(self.holder, self.part)
        except RuntimeError:  # one that was made in inference mode has no version
            return ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class HooksOf:
    """The hooks around a module's forward pass: the numbers that torch gave them."""

    holder: torch.nn.Module | None
    """None for the hooks of all modules."""

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("hooks", id(self.holder))

    def get(self) -> Any:
        if self.holder is None:
            return tuple(every_module._global_forward_hooks), tuple(every_module._global_forward_pre_hooks)
        return tuple(self.holder._forward_hooks), tuple(self.holder._forward_pre_hooks)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A mode of torch, read by its own function."""

    name: str
    ask: Callable[[], Any]

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("mode", self.name)

    def get(self) -> Any:
        try:
            found = self.ask()
        except RuntimeError:  # old and new settings of precision were mixed: torch won't tell
            return ABSENT
        return tuple(found) if isinstance(found, list) else found


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """An assumption of a recording."""

    kind: FactKind
    name: str
    source: Source
    value: Any
    """What it was at capture."""
    read_as: str = ""
    """The expression that read it."""
    frame: Frame | None = None
    """Where it was read."""
    short: str = ""
    """A name without the path to it, by the class of its owner."""

    @property
    def differs(self) -> bool:
        """Whether it is another now."""
        return not unchanged(self.value, self.source.get())

    @property
    def change(self) -> str:
        """In words, its value now and at capture."""
        where = f" ({self.frame.file}:{self.frame.line})" if self.frame is not None else ""
        now, then = self._shown(self.source.get()), self._shown(self.value)
        if now == then:
            return f"{self.name} is another {now} than at capture{where}"
        now += _other_parameters(self.value, self.source.get())
        return f"{self.name} is {now}, was {then} at capture{where}"

    def _shown(self, value: Any) -> str:
        if self.kind != "address" or value is None:
            return shown(value)
        pointer, shape, dtype, (strides, *_) = value
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} at {pointer:#x} by strides {list(strides)}"

    def is_named(self, patterns: Sequence[str]) -> bool:
        """Whether one of these dotted names means it: its whole name, or the end of it."""
        return any(is_named(one, patterns) for one in (self.name, self.read_as, self.short))

    def __str__(self) -> str:
        where = f"  {self.frame.file}:{self.frame.line}" if self.frame is not None else ""
        return f"{self.kind:<9} {self.name} = {self._shown(self.value)}{where}"


def _other_parameters(then: Any, now: Any) -> str:
    """Which parameters of a module are others in the one that took its place."""
    if not isinstance(then, torch.nn.Module) or not isinstance(now, torch.nn.Module):
        return ""
    known = dict(then.named_parameters())
    other = [name for name, one in now.named_parameters() if known.get(name) is not one]
    more = ", …" if len(other) > _MAX_ITEMS else ""
    return f" with another {', '.join(other[:_MAX_ITEMS])}{more}" if other else ""


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of these dotted names is a name, or the end of it; `cache.hits` means `Cache.hits` too."""
    known = name.lower()
    return any(known == one.lower() or known.endswith(f".{one.lower()}") for one in patterns)


def unchanged(then: Any, now: Any) -> bool:
    """Whether one may stand in the place of the other: the same object, or an equal plain value."""
    if then is now:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(then, PLAIN):
        return same(then, now)
    if isinstance(then, tuple):  # a list's items are facts about that list
        return len(then) == len(now) and all(map(unchanged, then, now))
    if isinstance(then, frozenset):
        return bool(then == now)
    return isinstance(then, types.MethodType) and then.__self__ is now.__self__ and then.__func__ is now.__func__


def items_of(holder: dict[Any, Any]) -> ItemsView[Any, Any]:
    """The entries of a dict in their order, without running code: an `OrderedDict` has another than its dict."""
    return OrderedDict.items(holder) if isinstance(holder, OrderedDict) else dict.items(holder)


def address_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where a tensor's memory begins, its shape, dtype and further layout; None for one without memory of its own."""
    if tensor.is_meta:
        return None
    try:
        return (
            tensor.data_ptr(),
            tuple(tensor.shape),
            tensor.dtype,
            (tensor.stride(), tensor.is_conj(), tensor.is_neg()),
        )
    except RuntimeError:
        return None


def shown(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} at {_pointer(value)}"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, PLAIN) or value is ABSENT:
        text = repr(value)
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(shown, value)))}}}"
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        value = value[1:]  # what a container holds, after its kind
    if isinstance(value, tuple | list):
        more = ", …" if len(value) > _MAX_ITEMS else ""
        return f"({', '.join(map(shown, value[:_MAX_ITEMS]))}{more})"
    if isinstance(value, type | types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__name__} at {id(value):#x}"


def _pointer(tensor: torch.Tensor) -> str:
    found = address_of(tensor)
    return f"{found[0]:#x}" if found is not None else "no address"


_MAX_SHOWN = 80
_MAX_ITEMS = 8
