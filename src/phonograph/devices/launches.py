"""Launches: hook for kernels that bypass torch's dispatcher, which report their name, grid and arguments.

Our own launchers report to `followers` themselves. Triton's report through its `run`, which is replaced as long as
somebody follows: compiled kernels and interpreted ones.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

_LAUNCHERS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction"))
_TUNER = ("triton.runtime.autotuner", "Autotuner")

Follower = Callable[[str, Sequence[int], Mapping[str, object]], None]
"""Is called with a kernel's name, grid and arguments before it runs."""
Around = Callable[[], AbstractContextManager[None]]

followers: list[Follower] = []
"""The active followers. Launchers check it first, so that launches cost nothing extra where there are none."""
_around_tuning: list[Around] = []
_lock = threading.Lock()
_replaced: dict[tuple[Any, str], Any] = {}
"""By class and name, the methods that are replaced now."""


class _Here(threading.local):
    forwards = 0


_here = _Here()


@contextmanager
def following_launches(follower: Follower, *, around_tuning: Around = nullcontext) -> Iterator[None]:
    """Inside, a follower is called for every launch of this thread; Triton's too, if Triton is imported.

    The launches of Triton's autotuner, which measures candidates, are made inside `around_tuning`.
    """
    thread = threading.get_ident()

    def follow(name: str, grid: Sequence[int], arguments: Mapping[str, object]) -> None:
        if threading.get_ident() == thread:
            follower(name, grid, arguments)

    def around() -> AbstractContextManager[None]:
        return around_tuning() if threading.get_ident() == thread else nullcontext()

    with _lock:
        followers.append(follow)
        _around_tuning.append(around)
        _hook()
    try:
        yield
    finally:
        with _lock:
            followers.remove(follow)
            _around_tuning.remove(around)
            if not followers:
                _unhook()


@contextmanager
def forwarding() -> Iterator[None]:
    """Inside, a launcher passes on launches that it has reported: they are not reported again."""
    _here.forwards += 1
    try:
        yield
    finally:
        _here.forwards -= 1


def _hook() -> None:
    for module, name in _LAUNCHERS:
        _replace(module, name, "run", _reporting)
    _replace(*_TUNER, "_bench", _tuning)


def _replace(module: str, name: str, method: str, by: Callable[[Any], Any]) -> None:
    """Replace a method, if its module is imported: otherwise nothing can be launched through it."""
    kind: Any = getattr(sys.modules.get(module), name, None)
    if hasattr(kind, method) and (kind, method) not in _replaced:
        _replaced[kind, method] = getattr(kind, method)
        setattr(kind, method, by(getattr(kind, method)))


def _unhook() -> None:
    while _replaced:
        (kind, method), original = _replaced.popitem()
        setattr(kind, method, original)


def _reporting(run: Any) -> Any:
    def reporting(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        if warmup or _here.forwards:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        named = {name: _unwrapped(value) for name, value in given.items()}

        def report(found: Any) -> Any:
            for follow in tuple(followers):
                follow(self.__name__, tuple(map(operator.index, found)), named)
            return found

        # A grid that is a function is asked by Triton, once the kernel is compiled and its defaults are known.
        reported = (lambda meta: report(grid(meta))) if callable(grid) else report(grid)
        return run(self, *args, grid=reported, warmup=warmup, **kwargs)

    return reporting


def _tuning(bench: Any) -> Any:
    def tuning(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for around in tuple(_around_tuning):
                stack.enter_context(around())
            return bench(self, *args, **kwargs)

    return tuning


def _unwrapped(value: Any) -> Any:
    """A kernel's argument by what Triton wraps in it: tensors in descriptors, numbers in constants, names of types."""
    if isinstance(value, list | tuple):
        return [_unwrapped(one) for one in value]
    kind: Any = type(value)
    if not kind.__module__.startswith("triton."):
        return value
    if dataclasses.is_dataclass(value):
        return {one.name: _unwrapped(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if hasattr(value, "base"):  # a tensor of another type
        return {"base": value.base, "dtype": str(value.dtype)}
    if hasattr(value, "value"):
        return _unwrapped(value.value)
    has_name = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    return str(value) if has_name else value
