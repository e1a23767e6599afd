"""Dict watcher: CPython's dict watchers (C API, 3.12 and later), which are called for every store into a watched dict.

Many dicts then cost as little to check as one: a flag that is cleared. The callback only clears it, since a dict may
not be touched during a store.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_DEALLOCATED = 5
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Unchanged:
    """Whether none of some dicts was stored into since it was made."""

    __slots__ = ("__weakref__", "holds")

    def __init__(self) -> None:
        self.holds = True

    def __call__(self) -> bool:
        return self.holds


class DictWatcher:
    """The watcher of this process."""

    def __init__(self) -> None:
        self._flags: dict[int, list[weakref.ref[Unchanged]]] = {}
        """By address of a dict, the flags to clear."""
        self._num_stores: dict[int, int] = {}
        self._callback = _Callback(self._told)  # kept: Python has its address from now on
        add = ctypes.pythonapi.PyDict_AddWatcher
        add.argtypes, add.restype = (_Callback,), ctypes.c_int
        self._number = add(self._callback)
        self._is_over = False
        atexit.register(self._end)  # stores during interpreter shutdown can't be reported

    def watch(self, dicts: Sequence[dict[Any, Any]]) -> Unchanged:
        """A flag for these dicts; while it is there, they are."""
        flag = Unchanged()
        reference = weakref.ref(flag)
        for one in dicts:
            self._flags.setdefault(id(one), []).append(reference)
            ctypes.pythonapi.PyDict_Watch(self._number, ctypes.py_object(one))
        weakref.finalize(flag, self._forget, reference, dicts).atexit = False
        return flag

    def num_stores(self, one: dict[Any, Any]) -> int:
        """How often a dict was stored into while it was watched."""
        return self._num_stores.get(id(one), 0)

    def _end(self) -> None:
        self._is_over = True
        ctypes.pythonapi.PyDict_ClearWatcher(self._number)

    def _forget(self, reference: weakref.ref[Unchanged], dicts: Iterable[dict[Any, Any]]) -> None:
        for one in dicts:
            left = [other for other in self._flags.get(id(one), ()) if other is not reference]
            if left:
                self._flags[id(one)] = left
            else:
                self._flags.pop(id(one), None)
                if not self._is_over:
                    ctypes.pythonapi.PyDict_Unwatch(self._number, ctypes.py_object(one))

    def _told(self, event: int, address: int, key: int | None, value: int | None) -> int:
        if event == _DEALLOCATED:
            self._flags.pop(address, None)
            self._num_stores.pop(address, None)
            return 0
        self._num_stores[address] = self._num_stores.get(address, 0) + 1
        for reference in self._flags.get(address, ()):
            flag = reference()
            if flag is not None:
                flag.holds = False
        return 0


@functools.cache
def dict_watcher() -> DictWatcher | None:
    """The watcher; None where this Python has none, or gives no more of them."""
    if sys.version_info < (3, 12) or not hasattr(ctypes.pythonapi, "PyDict_AddWatcher"):
        return None
    found: Callable[[], DictWatcher] = DictWatcher
    try:
        return found()
    except (RuntimeError, SystemError):  # all eight are taken
        return None
