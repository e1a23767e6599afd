"""Breaks: calls that run eagerly between two graphs of one recording."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from phonograph.graphs.phases.context import Stage, current
from phonograph.graphs.phases.live_arguments import shown

log = logging.getLogger("phonograph")

P = ParamSpec("P")
R = TypeVar("R")


class GraphBreak(Generic[P, R]):
    """A function that breaks the graph where it is called; elsewhere it is just the function."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.inline = function
        """The function itself: `f.inline(x)` does not break at this call site."""
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        breaker, stage = current().breaker, current().stage
        if breaker is None:
            if current().backend == "breakable":  # inside another gap, or in a run of the whole body at once
                if stage is not Stage.EAGER:
                    args, kwargs = shown((args, kwargs))
            elif stage is Stage.CAPTURING:
                log.warning(
                    "%s is marked @graph_break, but this recording has no breaks: it is recorded with the rest, for "
                    "the batch of now. Use backend='breakable', or call %s.inline",
                    *(self.inline.__qualname__, self.inline.__name__),
                )
            return self.inline(*args, **kwargs)
        result: R = breaker.gap(self.inline, args, kwargs)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> GraphBreak[..., R]:
        if instance is None:
            return self
        return GraphBreak(self.inline.__get__(instance, owner))


@overload
def graph_break(function: Callable[P, R], *, enabled: bool = True) -> GraphBreak[P, R]: ...
@overload
def graph_break(*, enabled: bool = True) -> Callable[[Callable[P, R]], GraphBreak[P, R]]: ...
def graph_break(function: Callable[..., Any] | None = None, *, enabled: bool = True) -> Any:
    """Mark a function or method to run eagerly, with the live batch, between two graphs of a `breakable` recording.

    At replay it is called with the tensors that it was captured with; containers, and objects that the
    body makes, hold what they held at this call, plain values keep the value they had at capture, and
    objects from outside are live, and so is a live argument. What changes from step to step is in
    `current().batch`. Its outputs are copied to where the next graph reads them: what that should see
    must be returned. With `enabled=False` the mark does nothing; at one call site, `f.inline(...)` does
    the same.
    """
    if function is None:
        return functools.partial(graph_break, enabled=enabled)
    return GraphBreak(function) if enabled else function


def break_graph() -> None:
    """End the graph here and begin the next one, with nothing between them."""
    breaker = current().breaker
    if breaker is not None:
        breaker.gap(_nothing, (), {})


def _nothing() -> None:
    return None
