"""Live arguments: placeholders while a body is recorded, so that no value of one call is frozen in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phonograph.devices.trace import is_asked_by_user, user_frame
from phonograph.errors import BreakError, CaptureError
from phonograph.graphs.inputs.fields import Path, expose, fetch, path_of
from phonograph.graphs.inputs.tree import Marker, map_values, reachable
from phonograph.graphs.phases.context import current

MISSING: Any = object()
_OF_VALUES = {name for kind in (int, float, complex, str, list, dict) for name in vars(kind)} - set(dir(object))
_READS = {name for name in _OF_VALUES if name.startswith("__")} | {
    *("__lt__", "__le__", "__gt__", "__ge__", "__str__", "__format__"),
    *("__bool__", "__call__", "__next__", "__enter__", "__exit__", "__matmul__", "__rmatmul__", "__array__"),
}


@dataclass(frozen=True)
class Live:
    """An argument, or a field of one, that only gaps and a tail outside of the recording read."""

    field: str
    default: Any = MISSING

    @property
    def path(self) -> Path:
        return path_of(self.field)


class LiveArgument(Marker):
    """Placeholder of a live argument in a recording: a gap gets the value of its call; any other read is refused."""

    def __init__(self, live: Live) -> None:
        self.__dict__["_live"] = live

    def now(self) -> Any:
        """The value in the call that is served now."""
        live, batch = value_of(self), current().batch
        holder = fetch(batch, {}, live.path[:-1]) if len(live.path) > 1 else batch
        is_there = live.path[-1] in holder if isinstance(holder, Mapping) else hasattr(holder, live.path[-1])
        if not is_there and live.default is MISSING:
            raise BreakError(
                f"calling a gap with the live argument {live.field!r}: this call does not have it. Pass it."
            )
        return fetch(batch, {}, live.path) if is_there else live.default

    def __repr__(self) -> str:
        return f"<live argument {value_of(self).field!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not is_asked_by_user(sys._getframe(1)):
            raise AttributeError(name)
        raise _read(self)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() asks
        if is_asked_by_user(sys._getframe(1)):
            raise _read(self)
        return LiveArgument

    def __eq__(self, other: object) -> bool:
        if is_asked_by_user(sys._getframe(1)):
            raise _read(self)
        return self is other

    def __hash__(self) -> int:
        if is_asked_by_user(sys._getframe(1)):
            raise _read(self)
        return id(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _read(next(found for _, found in reachable((args, kwargs)) if type(found) is LiveArgument))


def value_of(argument: LiveArgument) -> Live:
    """What an argument stands for."""
    live: Live = object.__getattribute__(argument, "__dict__")["_live"]
    return live


def _read(argument: LiveArgument) -> CaptureError:
    error = CaptureError(
        f"the body reads the live argument {value_of(argument).field!r}, and a recording would freeze its value",
        "Read it in a @graph_break of a breakable recording or in a tail that is not captured, make it a slot, or "
        "don't name it in live=",
        frame=user_frame(sys._getframe(1)),
    )
    refused = current().refused
    if refused is not None:
        refused.note(error)
    return error


def _refused(self: LiveArgument, *args: Any) -> Any:
    raise _read(self)


for _name in _READS:
    setattr(LiveArgument, _name, _refused)


def hidden(batch: Any, live: Sequence[Live]) -> Any:
    """The batch that a body is recorded with: live arguments are replaced by placeholders that can't be read."""
    values: dict[Path, Any] = {}
    for one in live:
        missing = len(one.path) == 1 and isinstance(batch, Mapping) and one.field not in batch
        if not missing or one.default is not MISSING:
            values[one.path] = LiveArgument(one)
    return expose(batch, values)


def refuse_returned(outputs: Any) -> None:
    """Raise if a body returns a live argument: a recording's outputs are those of its capture."""
    for _, found in reachable(outputs):
        if type(found) is LiveArgument:
            raise CaptureError(
                f"the body returns the live argument {value_of(found).field!r}, and a recording would repeat its value",
                "Leave it out of the outputs: the caller has it",
            )


def shown(tree: Any) -> Any:
    """A gap's arguments, with the values of this call for live arguments."""
    if not _holds_live(tree):
        return tree
    return map_values(tree, value_now, lambda _, found: None if _holds_live(found) else found)


def value_now(leaf: Any) -> Any:
    """The value of a leaf in this call."""
    return leaf.now() if type(leaf) is LiveArgument else leaf


def _holds_live(tree: Any) -> bool:
    return any(type(found) is LiveArgument for _, found in reachable(tree))
