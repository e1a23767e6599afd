"""Tree walk: the tensors in what a forward pass or a gap takes and returns, down to the attributes of any object.

Dicts, lists and tuples are opened by their items, every other object by its attributes (`vars` and `__slots__`).
Nothing of an object's class is run: no `__init__`, no property, no overridden `__setattr__` or `items`.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from phonograph.errors import OutputError

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, range, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_NUMBERS = (bool, int, float, complex)
_DICTS = (OrderedDict, defaultdict, dict)
_ITEMS = (dict, list, tuple)
_INSTEAD = "Return tensors in a tuple, list, dict or plain object"
_HEAP_TYPE = 1 << 9  # in a type's flags: made by a class statement


class Marker:
    """Base of placeholders in a tree; never opened."""


class Item(NamedTuple):
    """A step into a dict, list or tuple, by a key that keeps its type."""

    key: Any


class TreePath(tuple[str | Item, ...]):
    """The steps from the root to a part: a name for an attribute, an `Item` for a key. Shown as it is written."""

    __slots__ = ()

    def __str__(self) -> str:
        steps = (f"[{_key_shown(step.key)}]" if isinstance(step, Item) else f".{step}" for step in self)
        return "".join(steps).removeprefix(".")

    def to(self, step: str | Item) -> TreePath:
        return TreePath((*self, step))


def _key_shown(key: object) -> str:
    return "a tensor" if isinstance(key, torch.Tensor) else repr(key)


Parts = list[tuple[str | Item, Any]]
Keep = Callable[[TreePath, Any], Any]
"""Takes what is neither leaf nor dict, list or tuple; returns what replaces it as a whole, or None to open it."""
_MAX_DEPTH = 4  # a bound for objects that outlive a call: the whole program may be reachable from them


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number, or a set of some; a member of an Enum is a name."""
    if isinstance(leaf, set | frozenset):
        return any(map(is_number, leaf))
    return isinstance(leaf, _NUMBERS) and not isinstance(leaf, Enum)


def leaves(tree: Any, keep: Keep | None = None, path: TreePath = TreePath()) -> Iterator[tuple[TreePath, Any]]:
    """Everything that is not opened, with its path; what is at two places comes twice. None is a leaf."""
    yield from _leaves(tree, path, keep, ())


def map_leaves(tree: Any, change: Callable[[TreePath, Any], Any], keep: Keep | None = None) -> Any:
    """The same structure, made anew, with every leaf replaced by `change(path, leaf)`.

    What is at two places is changed once, and is at both again.
    """
    return _Mapping(lambda trail, leaf: change(_path_of(trail), leaf), keep).of(tree, None)


def map_values(tree: Any, change: Callable[[Any], Any], keep: Keep | None = None) -> Any:
    """As `map_leaves`, for a change that does not depend on the path: calls do this."""
    return _Mapping(lambda _, leaf: change(leaf), keep).of(tree, None)


def is_object(tree: Any) -> bool:
    """Whether it is neither leaf nor container but an object of some class that can be opened."""
    container = isinstance(tree, (*_ITEMS, types.SimpleNamespace)) or is_dataclass(tree)
    return not container and not _is_leaf(tree) and not _why_closed(tree)


def is_closed(tree: Any) -> bool:
    """Whether it is neither leaf nor can be opened."""
    return not _is_leaf(tree) and bool(_why_closed(tree))


def reachable(tree: Any) -> Iterator[tuple[TreePath, Any]]:
    """All parts at most four steps below, once each; closed ones are not opened. For objects that outlive a call."""
    found: list[tuple[TreePath, Any]] = [(TreePath(), tree)]
    seen: set[int] = set()
    for path, value in found:
        yield path, value
        if len(path) < _MAX_DEPTH and id(value) not in seen and not _is_leaf(value) and not _why_closed(value):
            seen.add(id(value))
            found += [(path.to(step), part) for step, part in _parts(value, path)]


def put_at(tree: Any, path: TreePath, value: Any) -> None:
    """Replace the part at a path, in the tree itself."""
    for step in path[:-1]:
        tree = tree[step.key] if isinstance(step, Item) else dict(attributes(tree))[step]
    last = path[-1]
    if isinstance(last, Item):
        tree[last.key] = value
    else:
        put_attribute(tree, last, value)


class Noted:
    """A set of visited objects; held weakly where their class allows it."""

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds
        """Whether objects that can't be held weakly are held strongly, or left out."""
        self._references: dict[int, Callable[[], Any]] = {}

    def add(self, met: Any) -> None:
        try:
            self._references[id(met)] = weakref.ref(met)
        except TypeError:
            if self._holds:
                self._references[id(met)] = lambda: met

    def __contains__(self, met: Any) -> bool:
        reference = self._references.get(id(met))
        return reference is not None and reference() is met


def attributes(tree: Any) -> Parts:
    """What an object holds by name: its `__dict__`, and the slots of its classes that are set."""
    found: Parts = []
    for kind in type(tree).__mro__:
        if "__slots__" in vars(kind):
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        found.append((name, member.__get__(tree)))
                    except AttributeError:
                        continue  # a slot that is not set
    held = _dict_of(tree)
    return found + list(held.items()) if held is not None else found


def _leaves(tree: Any, path: TreePath, keep: Keep | None, above: tuple[int, ...]) -> Iterator[tuple[TreePath, Any]]:
    if _is_leaf(tree):
        yield path, tree
        return
    kept = keep(path, tree) if keep is not None and not isinstance(tree, _ITEMS) else None
    if kept is not None:
        yield path, kept
        return
    if id(tree) in above:
        raise _closed(tree, path, "holds itself")
    for step, value in _parts(tree, path):
        yield from _leaves(value, path.to(step), keep, (*above, id(tree)))


_Trail = tuple[Any, Any, bool] | None
"""A path during a walk, formatted only when it is shown: the parent, the step, whether it is an item."""


def _path_of(trail: _Trail) -> TreePath:
    steps: list[str | Item] = []
    while trail is not None:
        trail, step, is_item = trail
        steps.append(Item(step) if is_item else step)
    return TreePath(reversed(steps))


class _Mapping:
    """One pass of `map_leaves` or `map_values`, which remembers what it has changed."""

    def __init__(self, change: Callable[[_Trail, Any], Any], keep: Keep | None) -> None:
        self._change = change
        self._keep = keep
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()

    def of(self, tree: Any, trail: _Trail) -> Any:
        if isinstance(tree, _CONSTANTS):
            return self._change(trail, tree)
        identity = id(tree)  # held by the caller, so its id() is not reused
        if identity not in self._done:
            if identity in self._open:
                raise _closed(tree, _path_of(trail), "holds itself")
            self._open.add(identity)
            self._done[identity] = self._made(tree, trail)
            self._open.discard(identity)
        return self._done[identity]

    def _made(self, tree: Any, trail: _Trail) -> Any:
        kind = type(tree)
        if kind is torch.Tensor:
            return self._change(trail, tree)
        if kind is tuple or kind is list:
            return kind([self.of(value, (trail, index, True)) for index, value in enumerate(tree)])
        if kind is dict:
            return {key: self.of(value, (trail, key, True)) for key, value in tree.items()}
        if _is_leaf(tree):
            return self._change(trail, set(tree) if isinstance(tree, set) else tree)
        if self._keep is not None and not isinstance(tree, _ITEMS):
            kept = self._keep(_path_of(trail), tree)
            if kept is not None:
                return self._change(trail, kept)
        made: Parts = []
        for step, value in _parts(tree, _path_of(trail)):
            below = (trail, step.key, True) if isinstance(step, Item) else (trail, step, False)
            made.append((step, self.of(value, below)))
        return _rebuilt(tree, made)


def _is_leaf(tree: Any) -> bool:
    if isinstance(tree, set | frozenset):
        return all(isinstance(element, _CONSTANTS) for element in tree)
    return isinstance(tree, (torch.Tensor, Marker, *_CONSTANTS)) or _is_atom(tree)


def _is_atom(tree: Any) -> bool:
    """Whether it is a value of the standard library that holds no other object: a date, a decimal."""
    kind = type(tree)
    if isinstance(tree, _ITEMS):
        return False
    return kind.__hash__ is not None and kind.__module__ in sys.stdlib_module_names and not gc.is_tracked(tree)


def _parts(tree: Any, path: TreePath) -> Parts:
    """The parts of what can be opened; raises for what can't."""
    reason = _why_closed(tree)
    if reason:
        raise _closed(tree, path, reason)
    if isinstance(tree, dict):
        return [(Item(key), value) for key, value in dict.items(tree)] + attributes(tree)
    if isinstance(tree, tuple):
        names = getattr(tree, "_fields", None)
        steps = names if names is not None else map(Item, range(len(tree)))
        return list(zip(steps, tuple.__iter__(tree), strict=True)) + _own_attributes(tree)
    if isinstance(tree, list):
        return [(Item(index), value) for index, value in enumerate(list.__iter__(tree))] + attributes(tree)
    return attributes(tree)


def _own_attributes(tree: tuple[Any, ...]) -> Parts:
    return attributes(tree) if _dict_of(tree) is not None else []


def _dict_of(tree: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, whatever its class makes of attribute access."""
    try:
        held: dict[str, Any] = object.__getattribute__(tree, "__dict__")
    except AttributeError:
        return None
    return held


def _why_closed(tree: Any) -> str:
    if isinstance(tree, (*_ITEMS, types.SimpleNamespace)):
        return ""
    if isinstance(tree, torch.nn.Module):
        return "belongs to the model, not to one call"
    if type(tree).__module__.split(".")[0] == "numpy":
        return "shares or freezes the numbers of one call"
    if isinstance(tree, Iterator):
        return "is used up after one call"
    if isinstance(tree, types.FunctionType | types.MethodType | types.BuiltinFunctionType | types.ModuleType):
        return "no copy can be made of"
    kind: Any = type(tree)
    if not _is_pythons(kind):
        return "keeps what it holds out of reach"
    return ""


@functools.lru_cache(maxsize=1024)
def _is_pythons(kind: Any) -> bool:
    """Whether what an object holds is among its attributes; not so where a base is written in C."""
    bases = kind.__mro__[:-1]
    for base in bases:
        if not base.__flags__ & _HEAP_TYPE or isinstance(vars(base).get("__new__"), types.BuiltinFunctionType):
            return False
    return bool(kind.__dictoffset__) or any(vars(base).get("__slots__") for base in bases)


def _closed(tree: Any, path: TreePath, reason: str) -> OutputError:
    return OutputError(f"the output{f' {path}' if path else ''} is a {type(tree).__name__}, which {reason}", _INSTEAD)


def _rebuilt(tree: Any, parts: Parts) -> Any:
    """An object like `tree` of these parts, without running code of its class."""
    items = [value for step, value in parts if isinstance(step, Item)]
    kind: Any = type(tree)
    base: Any
    made: Any
    if isinstance(tree, tuple):
        return _rebuilt_tuple(tree, parts)
    if isinstance(tree, dict):
        base = next(one for one in kind.__mro__ if one in _DICTS)
        made = base.__new__(kind)
        for key, value in zip(dict.keys(tree), items, strict=True):
            base.__setitem__(made, key, value)
        if isinstance(tree, defaultdict):
            made.default_factory = tree.default_factory
    elif isinstance(tree, list):
        made = list.__new__(kind)
        list.extend(made, items)
    else:
        base = types.SimpleNamespace if isinstance(tree, types.SimpleNamespace) else object
        made = base.__new__(kind)
    _put_attributes(made, [(step, value) for step, value in parts if not isinstance(step, Item)])
    return made


def _rebuilt_tuple(tree: tuple[Any, ...], parts: Parts) -> Any:
    kind: Any = type(tree)
    values = [value for _, value in parts[: len(tree)]]
    if kind is tuple:
        return tuple(values)
    if all(value is before for value, before in zip(values, tree, strict=True)) and len(parts) == len(tree):
        return tree  # immutable, and nothing in it changed: torch.Size
    if hasattr(kind, "n_sequence_fields"):
        return kind(values)  # what torch.max and torch.topk return
    made = tuple.__new__(kind, values)
    _put_attributes(made, parts[len(tree) :])
    return made


def _put_attributes(made: Any, parts: Parts) -> None:
    for name, value in parts:
        put_attribute(made, str(name), value)


def put_attribute(made: Any, name: str, value: Any) -> None:
    """Set an attribute past the class's own `__setattr__`, as a frozen dataclass needs it."""
    for kind in type(made).__mro__:
        member = vars(kind).get(name)
        if isinstance(member, types.MemberDescriptorType):
            member.__set__(made, value)
            return
    held = _dict_of(made)
    assert held is not None, f"{type(made).__name__} has no place for its part {name!r}"
    held[name] = value
