"""Launches: hook for kernels that bypass torch's dispatcher, which report their name, grid and arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

_TRITON = "triton.runtime.jit"

Follower = Callable[[str, Sequence[int], Mapping[str, object]], None]
"""Is called with a kernel's name, grid and arguments before it runs."""

followers: list[Follower] = []
"""The active followers. Launchers check it first, so that launches cost nothing extra where there are none."""


@contextmanager
def following_launches(follower: Follower, *, of_triton: bool = False) -> Iterator[None]:
    """Inside, a follower is called for every launch; on request also for those through Triton's own launcher.

    That includes autotuning launches of Triton, and a launch that one of our launchers forwards is reported twice.
    """
    followers.append(follower)
    try:
        with _telling(_TRITON, follower) if of_triton and _TRITON in sys.modules else nullcontext():
            yield
    finally:
        followers.remove(follower)


@contextmanager
def _telling(launcher: str, follower: Follower) -> Iterator[None]:
    """Triton's launcher, if Triton is imported: otherwise nothing can be launched through it."""
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
