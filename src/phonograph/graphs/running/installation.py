"""Installation: replaces a module's calls by callables that are installed on it, the latest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from phonograph.graphs.recording.modules import ModuleCall


class Installation:
    """Replaces a module's call, from the first installation until the last is removed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._installed: list[Callable[..., Any]] = []
        self._place = ExitStack()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._installed[-1](*args, **kwargs)

    def add(self, run: Callable[..., Any]) -> None:
        if not self._installed:
            self._place.enter_context(ModuleCall(self._module).replaced_by(self))
            _installations[self._module] = self
        self._installed.append(run)

    def remove(self, run: Callable[..., Any]) -> None:
        last = max(index for index, one in enumerate(self._installed) if one is run)
        del self._installed[last]
        if not self._installed:
            del _installations[self._module]
            self._place.close()


_installations: WeakKeyDictionary[torch.nn.Module, Installation] = WeakKeyDictionary()
"""The installation of each module that has one."""


@contextmanager
def installed(module: torch.nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Have `run` serve calls of the module within a block."""
    installation = _installations.get(module) or Installation(module)
    installation.add(run)
    try:
        yield
    finally:
        installation.remove(run)
