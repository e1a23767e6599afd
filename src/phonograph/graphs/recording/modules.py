"""Module calls: modules as bodies, with their hooks; a hook that changes after capture is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from phonograph.graphs.phases.context import Stage, current

_replaced: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
"""How many replacements of its call each module has."""


class ModuleCall:
    """Calls a module as its users do, hooks and all; remembers the hooks that a recording was made with."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = self.__wrapped__ = module
        self._recorded: list[tuple[dict[int, Any], tuple[int, ...]]] = []
        self._num_registered = -1

    def __call__(self, **arguments: Any) -> Any:
        if current().stage is Stage.CAPTURING:
            self._recorded, self._num_registered = self._hooks(), RemovableHandle.next_id
        # While it is installed, a call of the module would come back here.
        call: Any = self.module._call_impl if self.module in _replaced else self.module
        return call(**arguments)

    @property
    def hooks_changed(self) -> bool:
        """Whether a hook was registered or removed since the recording, on the module, below it, or for all modules."""
        if any(tuple(hooks) != then for hooks, then in self._recorded):
            return True
        if RemovableHandle.next_id == self._num_registered:
            return False
        if [then for _, then in self._hooks()] != [then for _, then in self._recorded]:
            return True
        self._num_registered = RemovableHandle.next_id  # the hook is on another module
        return False

    @contextmanager
    def replaced_by(self, call: Any) -> Iterator[None]:
        """Calls of the module are `call`'s inside, hooks and all; a direct call of its `forward` is not."""
        before = self.module.__dict__.get("_compiled_call_impl")
        self.module._compiled_call_impl = call
        _replaced[self.module] = _replaced.get(self.module, 0) + 1
        try:
            yield
        finally:
            _replaced[self.module] -= 1
            if not _replaced[self.module]:
                del _replaced[self.module]
            if before is None:
                del self.module._compiled_call_impl
            else:
                self.module._compiled_call_impl = before

    def _hooks(self) -> list[tuple[dict[int, Any], tuple[int, ...]]]:
        """All hooks around forward passes: where they are registered, and the numbers that torch gave them."""
        places: list[dict[int, Any]] = [torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks]
        for module in self.module.modules():
            places += [module._forward_hooks, module._forward_pre_hooks]
        return [(hooks, tuple(hooks)) for hooks in places if hooks]
