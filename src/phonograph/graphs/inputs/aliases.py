"""Tensor aliases: tensors of foreign objects, found by path, grouped by shared memory, moved together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from phonograph.errors import DeclarationError


@dataclass(frozen=True, eq=False)
class FoundTensor:
    """A tensor in a field of an object."""

    owner: str
    path: str
    tensor: torch.Tensor
    put: Callable[[torch.Tensor], None]
    """Puts another tensor in its place."""

    @property
    def start(self) -> int:
        return self.tensor.data_ptr()

    @property
    def end(self) -> int:
        return self.start + reach(self.tensor)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Equal for two fields that are the same view of the same memory."""
        tensor = self.tensor
        return (self.start, tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class Aliases:
    """Fields that view the same memory; the root's view covers all of it."""

    root: FoundTensor
    members: Sequence[FoundTensor] = ()
    """The others."""
    tangled: str = ""
    """The path of another field whose memory overlaps partially, so that no single buffer can hold both; else empty."""

    def move_to(self, memory: torch.Tensor) -> None:
        """Copy the values into flat memory, and put views of it in place of all fields."""
        root = self.root.tensor
        with torch.inference_mode(False), torch.no_grad():
            view = memory.view(root.shape)
            view.copy_(root)
            views = [self._as_before(view, member) for member in self.members]
        self.root.put(view)
        for member, shown in zip(self.members, views, strict=True):
            member.put(shown)

    def _as_before(self, view: torch.Tensor, member: FoundTensor) -> torch.Tensor:
        if member.geometry == self.root.geometry:
            return view
        offset = (member.start - self.root.start) // view.element_size()
        return view.as_strided(member.tensor.shape, member.tensor.stride(), view.storage_offset() + offset)


def reach(view: torch.Tensor) -> int:
    """Bytes from a view's first element to the end of its last one."""
    if not view.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * view.element_size()


def group_aliases(found: Sequence[FoundTensor]) -> list[Aliases]:
    """Every field once, grouped by shared memory; independent of the order in which they were found."""
    groups: list[list[FoundTensor]] = []
    end, device = 0, None
    for one in sorted(found, key=_in_memory_order):
        if groups and one.tensor.device == device and 0 < one.start < min(end, one.end):
            groups[-1].append(one)
            end = max(end, one.end)
        else:
            groups.append([one])
            end, device = one.end, one.tensor.device
    rooted = [aliases for group in groups for aliases in _rooted(group)]
    return sorted(rooted, key=lambda aliases: (aliases.root.owner, aliases.root.path))


def _in_memory_order(one: FoundTensor) -> tuple[object, ...]:
    """By address; of those with one start the longest first, which can be the others' root."""
    tensor = one.tensor
    return str(tensor.device), one.start, -one.end, not tensor.is_contiguous(), one.path, one.owner


def _rooted(group: Sequence[FoundTensor]) -> Iterator[Aliases]:
    """The group under its root; or each alone, where no field covers all of its memory."""
    root, *members = group  # starts first, reaches farthest
    whole = max(one.end for one in group)
    same = all(one.geometry == root.geometry for one in members)
    inside = root.end == whole and root.tensor.is_contiguous()
    if same or (inside and all(one.tensor.dtype == root.tensor.dtype for one in members)):
        yield Aliases(root, members)
        return
    for one in group:
        other = next(other for other in group if other is not one)
        yield Aliases(one, tangled=f"{other.owner}.{other.path}")


def find_tensors(target: Any, owner: str) -> list[FoundTensor]:
    """Every tensor below a container."""
    return [FoundTensor(owner, path, tensor, put) for path, tensor, put in _walk(target, "", ())]


_Put = Callable[[torch.Tensor], None]


def _walk(target: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor, _Put]]:
    """Every tensor below a container, with its dotted path and the way to replace it."""
    if id(target) in above:
        raise DeclarationError(f"sharing buffers: {path} holds itself. Leave it out.")
    for name, value in _items(target, path):
        where = f"{path}.{name}" if path else str(name)
        if isinstance(value, torch.Tensor):
            yield where, value, _putter(target, name)
        elif value is not None:
            yield from _walk(value, where, (*above, id(target)))


def _items(target: Any, path: str) -> list[tuple[Any, Any]]:
    if isinstance(target, dict):
        return list(target.items())
    if isinstance(target, SimpleNamespace):
        return list(vars(target).items())
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        return [(f.name, getattr(target, f.name, None)) for f in dataclasses.fields(target)]
    raise DeclarationError(
        f"sharing buffers: {path or 'the object'} is a {type(target).__name__}; "
        "tensors, None, dataclasses, namespaces and dicts can be adopted. Leave it out or wrap it."
    )


def _putter(target: Any, name: Any) -> _Put:
    def put(view: torch.Tensor) -> None:
        if isinstance(target, dict):
            target[name] = view
        else:
            object.__setattr__(target, name, view)  # a frozen dataclass is adopted too

    return put
