"""Gap arguments: what a gap is called with at replay, as a live call would have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.errors import BreakError, OutputError
from phonograph.graphs.inputs.tree import (
    Marker,
    Noted,
    TreePath,
    is_closed,
    leaves,
    map_leaves,
    map_values,
    put_at,
    reachable,
)
from phonograph.graphs.phases.live_arguments import value_now

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
OfGraph = Callable[[torch.Tensor], torch.Tensor | None]
"""Takes a tensor; returns one over the same memory if graphs rewrite that memory at every replay, else None."""


class _Live(Marker):
    """An object that is passed itself at replay, after the tensors that graphs write are put back into it."""

    def __init__(self, value: Any, puts: list[tuple[TreePath, torch.Tensor]]) -> None:
        self.value = value
        self._puts = puts

    def now(self, gap: str) -> Any:
        for path, tensor in self._puts:
            try:
                put_at(self.value, path, tensor)
            except (AttributeError, KeyError, IndexError, TypeError):
                raise BreakError(
                    f"gap {gap}: its argument, a {type(self.value).__name__}, had a tensor of the graph at {path} when "
                    "it was captured, and has no such place now. Pass the tensor as an argument of its own."
                ) from None
        return self.value


@dataclass(frozen=True)
class Arguments:
    """The arguments of one gap.

    Containers, and objects that the body makes, are copied here, as the body may change them later; each replay gets
    a copy of its own. Objects from outside are passed themselves.
    """

    gap: str
    tree: tuple[Args, Kwargs]
    is_plain: bool

    @staticmethod
    def of(args: Args, kwargs: Kwargs, rehearsed: Noted, of_graph: OfGraph, gap: str) -> Arguments:
        """The arguments to call the gap with; objects that the rehearsal saw too are not made by the body."""

        def keep(path: TreePath, found: Any) -> Any:
            if is_closed(found):
                _check_closed(found, gap)
                return found
            if found not in rehearsed and _can_be_copied(found):
                return None
            inside = ((at, part) for at, part in reachable(found) if isinstance(part, torch.Tensor))
            return _Live(found, [(at, weak) for at, part in inside if (weak := of_graph(part)) is not None])

        def weaken(path: TreePath, leaf: Any) -> Any:
            weak = of_graph(leaf) if isinstance(leaf, torch.Tensor) else None
            return leaf if weak is None else weak

        plain = all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in (*args, *kwargs.values()))
        return Arguments(gap, map_leaves((args, kwargs), weaken, keep), plain)

    def now(self) -> tuple[Args, Kwargs]:
        """The arguments of one call."""
        if self.is_plain:
            return self.tree
        tree: tuple[Args, Kwargs] = map_values(self.tree, self._of_now, _closed_as_it_is)
        return tree

    def _of_now(self, leaf: Any) -> Any:
        return leaf.now(self.gap) if isinstance(leaf, _Live) else value_now(leaf)


def note_objects(args: Args, kwargs: Kwargs) -> Noted:
    """The objects among and in a gap's arguments."""
    noted = Noted(holds=True)
    for _, found in reachable((*args, *kwargs.values())):
        if not isinstance(found, torch.Tensor | dict | list | tuple | str | int | float | None):
            noted.add(found)
    return noted


def argument_tensors(args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The tensors among and in a gap's arguments, in one order."""
    return [found for _, found in reachable((*args, *kwargs.values())) if isinstance(found, torch.Tensor)]


def _can_be_copied(found: Any) -> bool:
    """Whether an object is a tree; one that holds itself is passed as it is."""
    try:
        return all(True for _ in leaves(found, _closed_as_it_is))
    except OutputError:
        return False


def _closed_as_it_is(path: TreePath, found: Any) -> Any:
    return found if is_closed(found) else None


def _check_closed(found: Any, gap: str) -> None:
    holds_tensors = isinstance(found, set | frozenset | deque) and any(isinstance(e, torch.Tensor) for e in found)
    if holds_tensors or isinstance(found, Iterator):
        why = "holds tensors where no replay can reach them" if holds_tensors else "is used up after one call"
        raise BreakError(f"gap {gap}: an argument is a {type(found).__name__}, which {why}. Pass a list or tuple.")
