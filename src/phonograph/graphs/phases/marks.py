"""Marks: functions that are not traced, by number, and the custom op that stands for their calls in a traced graph."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from phonograph.errors import CaptureError, DeclarationError

Fake = Callable[..., Any]
"""Takes the arguments of a marked call; returns tensors of the shapes and dtypes that the call returns."""

_numbers = itertools.count(1)
_marks: WeakValueDictionary[int, Mark] = WeakValueDictionary()


class Mark:
    """A function that a traced graph calls without tracing it."""

    def __init__(
        self, function: Callable[..., Any], fake: Fake | None, mutates: tuple[str, ...] = (), *, breaks: bool = True
    ) -> None:
        self.function = function
        self.breaks = breaks
        """Whether it runs between two graphs; else it is recorded with the pieces around it."""
        self.fake = fake
        self.mutates = mutates
        """The names of the arguments that it writes."""
        self.number = next(_numbers)
        """Its number in traced graphs, which can't hold Python functions."""
        _check_mutates(function, mutates)
        _marks[self.number] = self

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)


def marked(number: int) -> Mark:
    """The mark of this number."""
    return _marks[number]


def traced_call(number: int, owner: int, *args: Any, **kwargs: Any) -> Any:
    """Stands for a marked call in a traced graph: of the function, or of a method of the object with the id `owner`.
    Only the tracer runs it, for the shapes of its outputs."""
    mark = _marks[number]
    if mark.fake is None:
        raise CaptureError(
            f"tc_piecewise does not look into {mark.name}, and does not know what it returns",
            f"Say so: @graph_break(fake=lambda …: torch.empty_like(…)) takes the arguments of {mark.name} and returns "
            "tensors of the same shapes and dtypes",
        )
    return _contiguous(mark.fake(*args, **kwargs), args)


def _contiguous(result: Any, args: Any) -> Any:
    """A gap's outputs as graphs read them: each tensor in memory of its own, except arguments that it returns."""
    if isinstance(result, torch.Tensor):
        return result if any(result is one for one in args) else result.contiguous()
    if type(result) in (tuple, list):
        return type(result)(_contiguous(one, args) for one in result)
    return result


def _check_mutates(function: Callable[..., Any], mutates: tuple[str, ...]) -> None:
    if mutates:
        known = list(inspect.signature(function).parameters)
        wrong = [name for name in mutates if name not in known]
        if wrong:
            raise DeclarationError(f"mutates={wrong[0]!r} is no argument; there are {known}. Correct the name.")
