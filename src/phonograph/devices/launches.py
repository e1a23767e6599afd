"""Launches: kernels that torch does not dispatch tell of themselves here, with their arguments by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

_TRITON = "triton.runtime.jit"

Follower = Callable[[str, Sequence[int], Mapping[str, object]], None]
"""Is called with a kernel's name, grid and arguments before it runs."""

followers: list[Follower] = []
"""Who follows what runs now. Launchers look here first, so that nobody pays where nobody follows."""


@contextmanager
def following_launches(follower: Follower, *, of_triton: bool = False) -> Iterator[None]:
    """Inside, a follower hears of every launch; on request also of those through Triton's own launcher.

    Triton tries out candidates by launches too, and a launcher of ours may pass one on: both are heard then.
    """
    followers.append(follower)
    try:
        with _telling(_TRITON, follower) if of_triton and _TRITON in sys.modules else nullcontext():
            yield
    finally:
        followers.remove(follower)


@contextmanager
def _telling(launcher: str, follower: Follower) -> Iterator[None]:
    """Triton is looked up among what is loaded: where it is not, nobody has launched by it."""
    functions: Any = sys.modules[launcher].JITFunction
    run = functions.run

    def told(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        if not warmup:
            named = dict(zip(self.arg_names, args, strict=False)) | kwargs
            follower(self.__name__, grid if isinstance(grid, tuple) else (), named)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    functions.run = told
    try:
        yield
    finally:
        functions.run = run
