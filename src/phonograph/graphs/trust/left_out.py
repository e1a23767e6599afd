"""ReadsOfLeftOut: whether a recorded body reads a slot that graphs leave out, whose value a replay keeps for good."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from phonograph.devices.trace import tensors_in, user_frame, watching_ops
from phonograph.graphs.phases.context import BREAKING, Current


class ReadsOfLeftOut:
    """Watches one run. Gaps get the value of each call, so they may read it."""

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in given.items()}
        self._in_gap = False
        self.problem = ""
        """Which slot is read, and where; empty if none is."""

    def current(self, now: Current) -> Current:
        """What is current in the run: it tells where gaps are."""
        return replace(now, breaker=self) if now.backend in BREAKING else now

    def gap(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a gap, which may read anything."""
        before, self._in_gap = self._in_gap, True
        try:
            return function(*args, **kwargs)
        finally:
            self._in_gap = before

    def watching(self) -> AbstractContextManager[None]:
        """Watches the ops that run inside."""
        return watching_ops(self._before, lambda *_: None)

    def _before(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._in_gap or self.problem:
            return
        for tensor in tensors_in((args, kwargs)):
            name = self._names.get(tensor.untyped_storage()._cdata)
            if name is not None:
                op, frame = str(func).removesuffix(".default"), user_frame()
                where = f" ({frame})" if frame is not None else ""
                self.problem = (
                    f"{op} reads the slot {name!r}, which graphs leave out{where}: a replay has the tensor of the "
                    f"sample for good. Take {name!r} out of without=, or read it in a @graph_break or a tail"
                )
                return
