"""Gap watch: checks calls of gaps in trial runs for effects that a replay would not repeat."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch

from phonograph.devices.trace import is_outside
from phonograph.errors import CaptureError, Frame
from phonograph.graphs.inputs.snapshots import Same, snapshot
from phonograph.graphs.inputs.tree import reachable

_MAX_LOOKED_INTO = 1000
_MAX_STEPS = 4
_PLAIN = {str, int, float, bool, bytes, NoneType}
_AT_CALL = "Pass it as an argument, or as a default (def gap(q, scale=scale))"
_RETURN_IT = "Return what it makes, and put it into the container in the body"
_WRITE_IT_INSIDE = "Write it in the gap, or write to a copy (h = h.clone())"


@dataclass(frozen=True)
class Modes:
    """The modes of torch that a gap is called under; a replay is called under those of its caller."""

    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype
    default_dtype: torch.dtype

    @staticmethod
    def of(device: torch.device) -> Modes:
        kind = device.type
        return Modes(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.get_default_dtype())

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, wrapped to run under these modes."""

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.default_dtype)
                cast = torch.autocast(self.device_type, self.autocast_dtype, self.autocast, cache_enabled=False)
                stack.enter_context(cast)
                return function(*args, **kwargs)

        return call


@dataclass
class _Cell:
    """A closure variable of a gap."""

    cell: CellType
    name: str
    gap: str
    frame: Frame
    content: Any


@dataclass
class _Handed:
    """A tensor that a gap returned and did not make: the next graph reads a copy of it."""

    gap: str
    tensor: torch.Tensor
    version: int


class GapWatch:
    """Refuses a body that changes, after a gap was called, what the gap reads or has returned."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._handed: list[_Handed] = []

    @contextmanager
    def call(self, function: Callable[..., Any], name: str, arguments: tuple[Any, Any]) -> Iterator[None]:
        """Around one call: what a gap changes itself is fine, since it runs at every replay too."""
        self.check_body()
        for cell, variable, frame in _cells_of(function, set()):
            self._cells.setdefault(id(cell), _Cell(cell, variable, name, frame, _held(cell)))
        before = [(one, _content(one)) for one in _containers(arguments)]
        yield
        changed = {id(one) for one, was in before if _content(one) != was}
        if changed and _is_met_again(changed):
            problem = f"the gap {name} changes a container that it is passed, and at a replay it has a copy"
            raise CaptureError(problem, _RETURN_IT)
        for one in self._cells.values():
            one.content = _held(one.cell)
        for handed in self._handed:
            handed.version = _version(handed.tensor)

    def hand_out(self, gap: str, result: Any, is_own: Callable[[torch.Tensor], bool]) -> None:
        """Note the tensors that a gap returned, without those that are its own to return."""
        tensors = (found for _, found in reachable(result) if isinstance(found, torch.Tensor))
        self._handed += [_Handed(gap, one, _version(one)) for one in tensors if not is_own(one)]

    def check_body(self) -> None:
        """Raise if the body has changed something since the last gap."""
        for one in self._cells.values():
            if _held(one.cell) != one.content:
                raise CaptureError(
                    f"the body changes {one.name!r} after the gap {one.gap}, which reads it as a closure variable, and "
                    "a replay would see the last value only",
                    _AT_CALL,
                    frame=one.frame,
                )
        for handed in self._handed:
            if _version(handed.tensor) != handed.version:
                raise CaptureError(
                    f"the body writes in place to what the gap {handed.gap} returned, and a replay has a copy of it, "
                    "which nothing else reads",
                    _WRITE_IT_INSIDE,
                )


def is_unshared(tensor: object) -> bool:
    """Whether the caller's variable is all that refers to a tensor and to its memory."""
    if not isinstance(tensor, torch.Tensor) or sys.getrefcount(tensor) > _REFERENCES:
        return False
    return _num_users(tensor) <= _USERS


def _num_users(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _references(tensor: object) -> int:
    return sys.getrefcount(tensor)


def _references_of_one() -> int:
    """What `is_unshared` counts for a tensor that only its caller's variable refers to."""
    alone = torch.empty(1)
    return _references(alone)


_REFERENCES = _references_of_one()
_USERS = _num_users(torch.empty(1))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _content(value: Any) -> Any:
    """What is compared: plain values and containers by what they hold, objects and tensors by identity."""
    if isinstance(value, list | dict | set) and len(value) > _MAX_LOOKED_INTO:
        return Same(value)
    try:
        return snapshot(value)
    except RecursionError:
        return Same(value)


def _containers(value: Any) -> Iterator[Any]:
    """The containers that can be changed, among and in the arguments of a call."""
    if isinstance(value, list | dict | set):
        yield value
    if isinstance(value, list | tuple | dict) and len(value) <= _MAX_LOOKED_INTO:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _is_met_again(wanted: set[int]) -> bool:
    """Whether a caller of this gap can still reach one of these: by a variable, or through one."""
    frame: FrameType | None = sys._getframe(1)
    found: list[Any] = []
    while frame is not None:
        if is_outside(frame.f_code.co_filename):
            found += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    seen: set[int] = set()
    for step in range(_MAX_STEPS):
        new = {id(one): one for one in found if id(one) not in seen}
        if not wanted.isdisjoint(new):
            return True
        seen.update(new)
        # There may be a million of them: those after the last are not checked.
        found = [item for one in new.values() for item in _items(one)] if step + 1 < _MAX_STEPS else []
    return False


def _items(value: Any) -> list[Any]:
    if type(value) in _PLAIN or isinstance(value, ModuleType | type | torch.Tensor):
        return []
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else list(getattr(value, "__dict__", {}).values())


def _held(cell: CellType) -> Any:
    try:
        return _content(cell.cell_contents)
    except ValueError:  # not bound yet
        return None


def _cells_of(function: Any, seen: set[int]) -> Iterator[tuple[CellType, str, Frame]]:
    """The variables around a function, and around those that it finds there."""
    while isinstance(function, MethodType | functools.partial):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    code = function.__code__
    frame = Frame(code.co_filename, code.co_firstlineno, code.co_name)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield cell, name, frame
        try:
            yield from _cells_of(cell.cell_contents, seen)
        except ValueError:
            continue
