"""Opaque calls: functions that `tc_piecewise` records but does not trace or compile. Anywhere else, just functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

from phonograph.graphs.phases.context import is_traced
from phonograph.graphs.phases.marks import Fake, Mark, traced_call

P = ParamSpec("P")
R = TypeVar("R")


class Opaque(Generic[P, R]):
    """A function that is not traced; made by `opaque`."""

    def __init__(self, function: Callable[P, R], mark: Mark) -> None:
        self.inline = function
        self._mark = mark
        self._number = mark.number
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced():
            stand_in: R = traced_call(self._number, 0, *args, **kwargs)
            return stand_in
        return self.inline(*args, **kwargs)


def opaque(function: Callable[P, R], *, fake: Fake, mutates: Sequence[str] = ()) -> Opaque[P, R]:
    """Mark a function whose launches are part of the graph around it, and which is neither traced nor compiled.

    For custom kernels, and for writes to large state, which a compiler may copy where it sees them. `fake` is that of
    `graph_break`, and so are the arguments; `mutates` names those that are written. A method is made opaque for each
    object: `self.attend = opaque(self._attend, fake=…)`.
    """
    return Opaque(function, Mark(function, fake, tuple(mutates), breaks=False))
