"""Dict versions: whether anything was stored in any of many dicts, in a few nanoseconds each.

From 3.12 on CPython reports stores (`dict_watcher`). Before, each dict has a version tag, which is read from memory
(`dict_memory`) or by torch's private guards. Where a self-test shows that a store goes unseen, versions are not used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phonograph.graphs.recording.dict_memory import unchanged_tags
from phonograph.graphs.recording.dict_watcher import dict_watcher
from phonograph.graphs.recording.lookup import class_dict

_GUARDS_MODULE = "torch._dynamo.guards"
_MANY = 64
"""From so many dicts on, one check of all is worth the import of torch's compiler, which it needs."""


def unchanged_check(dicts: Sequence[dict[Any, Any]]) -> Callable[[], bool]:
    """A function that tells whether none of the dicts was stored into since now."""
    if not dicts:
        return lambda: True
    watcher = dict_watcher()
    if watcher is not None:
        return watcher.watch(tuple(dicts))
    read = unchanged_tags(dicts, _version())
    if read is not None:
        return read
    if len(dicts) >= _MANY or _GUARDS_MODULE in sys.modules:
        found = _guarded(tuple(dicts))
        if found is not None:
            return found
    version, held = _version(), tuple(dicts)
    then = [version(one) for one in held]
    return lambda: [*map(version, held)] == then


def versions_of(dicts: Sequence[dict[Any, Any]]) -> list[int]:
    """How often each was stored into, more or less; of what is watched, since it is."""
    watcher = dict_watcher()
    version = watcher.num_stores if watcher is not None else _version()
    return [version(one) for one in dicts]


def are_cheap() -> bool:
    """Whether a check of a few dicts costs less than a look at what is in them: Python tells of stores, or has tags
    that are read from memory."""
    return dict_watcher() is not None or _has_tags()


def _has_tags() -> bool:
    try:
        return unchanged_tags([{}], _version()) is not None
    except ImportError:
        return False


@functools.cache
def are_reliable() -> bool:
    """Whether every store into a dict, an object and a class is seen, and reads are not."""
    try:
        return all(map(_moves, range(3))) and _guards_work()
    except Exception:
        return False


def _version() -> Callable[[Any], int]:
    from torch._C._dynamo import guards

    found: Callable[[Any], int] = guards.dict_version  # type: ignore[attr-defined,unused-ignore]
    return found


def _guarded(dicts: tuple[dict[Any, Any], ...]) -> Callable[[], bool] | None:
    try:
        from torch._C._dynamo.guards import RootGuardManager
        from torch._dynamo.guards import GuardManagerType

        root: Any = RootGuardManager()
        for index, one in enumerate(dicts):
            manager = root.tuple_getitem_manager(index, "", one, GuardManagerType.GUARD_MANAGER)
            try:
                manager.add_dict_version_guard(one, [""], None)
            except TypeError:
                manager.add_dict_version_guard(one, [""])
    except (ImportError, AttributeError, TypeError):
        return None
    return functools.partial(root.check, dicts)


class _Toy:
    number = 0


def _moves(kind: int) -> bool:
    """Whether the version stays with reads and moves with a store: into an object, a class, a module's parameters."""
    kind_of_toy: Any = type("Toy", (_Toy,), {})
    toy = kind_of_toy()
    module = torch.nn.Linear(1, 1, device="meta")
    toy.number = 1.5
    held: Any = (toy.__dict__, class_dict(kind_of_toy), module._parameters)[kind]
    check = unchanged_check([held])
    stays = toy.number == 1.5 and module.weight is not None and check()

    def store() -> None:
        if kind == 0:
            toy.number = toy.number + 1
        elif kind == 1:
            kind_of_toy.other = object()
        else:
            module.weight = torch.nn.Parameter(torch.empty(1, 1, device="meta"))

    seen = []
    for _ in range(40):  # Python goes over to other code for stores that are made often
        check = unchanged_check([held])
        store()
        seen.append(not check())
    return stays and all(seen)


def _guards_work() -> bool:
    """Of a few dicts: torch's compiler need not be imported for that."""
    one, other = {"a": 1}, {"b": 2}
    check = unchanged_check([one, other])
    before = check()
    other["b"] = 3
    return before and not check()
