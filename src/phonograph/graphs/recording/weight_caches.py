"""Weight caches: values that torch's autocast and parametrizations derive from a weight, and cache.

A recording that hits such a cache reads that value for good, and misses in-place changes of the weight. One that fills
it leaves graph memory for eager code to read.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phonograph.graphs.recording.fact import InDict

_PARAMETRIZE = "torch.nn.utils.parametrize"


@contextmanager
def weights_uncached() -> Iterator[None]:
    """Inside, the caches are off, so that every use of a weight derives its value; afterwards they are as before."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with _parametrizations_uncached():
            yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(was_enabled)


@contextmanager
def _parametrizations_uncached() -> Iterator[None]:
    """As if outside of `parametrize.cached()`; torch has no other way to say so."""
    module: Any = sys.modules.get(_PARAMETRIZE)
    if module is None:
        yield
        return
    depth, cache = module._cache_enabled, module._cache
    module._cache_enabled, module._cache = 0, {}
    try:
        yield
    finally:
        module._cache_enabled, module._cache = depth, cache


def parametrize_caching(getter: Any) -> InDict | None:
    """Where torch has it whether parametrized weights are cached, which their getters ask; None for other getters."""
    is_torchs = isinstance(getter, types.FunctionType) and getter.__module__ == _PARAMETRIZE
    return InDict(getter.__globals__, "_cache_enabled") if is_torchs else None
