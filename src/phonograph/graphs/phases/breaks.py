"""Breaks: calls that run eagerly between two graphs of one recording."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from phonograph.graphs.phases.context import BREAKING, Breaker, Stage, current, is_traced
from phonograph.graphs.phases.live_arguments import shown
from phonograph.graphs.phases.marks import Fake, Mark, traced_call

log = logging.getLogger("phonograph")

P = ParamSpec("P")
R = TypeVar("R")


class GraphBreak(Generic[P, R]):
    """A function that breaks the graph where it is called; elsewhere it is just the function."""

    def __init__(self, function: Callable[P, R], mark: Mark | None = None) -> None:
        self.inline = function
        """The function itself: `f.inline(x)` does not break at this call site."""
        self._mark = mark if mark is not None else Mark(function, None)
        self._number = self._mark.number
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced():
            stand_in: R = traced_call(self._number, 0, *args, **kwargs)
            return stand_in
        now = current()
        breaker, stage = now.breaker, now.stage
        if breaker is None:
            if now.backend in BREAKING:  # inside another gap, or in an eager run of the body
                if stage is not Stage.EAGER:
                    args, kwargs = shown((args, kwargs))
            elif stage is Stage.CAPTURING:
                log.warning(
                    "%s is marked @graph_break, but this recording has no breaks: it is recorded with the rest, for "
                    "the current batch. Use backend='breakable', or call %s.inline",
                    *(self.inline.__qualname__, self.inline.__name__),
                )
            return self.inline(*args, **kwargs)
        result: R = _broken(breaker, self.inline, args, kwargs)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> GraphBreak[..., R]:
        if instance is None:
            return self
        if is_traced():  # an object can't be part of a traced graph, but its number can
            of_instance: Any = functools.partial(traced_call, self._number, id(instance))
            return of_instance  # type: ignore[no-any-return]
        return GraphBreak(self.inline.__get__(instance, owner), self._mark)


@overload
def graph_break(
    function: Callable[P, R], *, enabled: bool = True, fake: Fake | None = None, mutates: Sequence[str] = ()
) -> GraphBreak[P, R]: ...
@overload
def graph_break(
    *, enabled: bool = True, fake: Fake | None = None, mutates: Sequence[str] = ()
) -> Callable[[Callable[P, R]], GraphBreak[P, R]]: ...
def graph_break(
    function: Callable[..., Any] | None = None,
    *,
    enabled: bool = True,
    fake: Fake | None = None,
    mutates: Sequence[str] = (),
) -> Any:
    """Mark a function or method to run eagerly, with the live batch, between two graphs of one recording.

    At replay it is called with the tensors that it was captured with; containers, and objects that the
    body makes, hold what they held at this call; plain values keep the value that they had at capture;
    objects from outside, and live arguments, are those of the live call. What changes from step to step
    is in `current().batch`. Its outputs are copied to where the next graph reads them: return whatever
    that graph should see. With `enabled=False` the mark does nothing; `f.inline(...)` does the same at
    one call site.

    `tc_piecewise` traces the code around it and never looks inside: `fake` takes the arguments (of a method, without
    self) and returns tensors of the function's output shapes and dtypes, with any content; arguments are tensors and
    plain values. `mutates` names the arguments that it writes.
    """
    if function is None:
        return functools.partial(graph_break, enabled=enabled, fake=fake, mutates=mutates)
    return GraphBreak(function, Mark(function, fake, tuple(mutates))) if enabled else function


def break_graph() -> None:
    """End the graph here and begin the next one, with nothing between them."""
    if is_traced():
        traced_call(_NOTHING, 0)
        return
    breaker = current().breaker
    if breaker is not None:
        _broken(breaker, _nothing, (), {})


def _broken(breaker: Breaker, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a gap; a body that catches what it raises is recorded without the gap, and so must not be recorded."""
    try:
        return breaker.gap(function, args, kwargs)
    except Exception as error:
        refused = current().refused
        if refused is not None:
            refused.note(error)
        raise


def _nothing() -> None:
    return None


_mark_of_nothing = Mark(_nothing, _nothing)
_NOTHING = _mark_of_nothing.number
