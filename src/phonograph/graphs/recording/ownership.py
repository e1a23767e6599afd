"""Ownership: whose code a file holds, and whose object a value is: a body's, torch's, Python's or the graph layer's."""

from __future__ import annotations

import builtins
import functools
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

_PACKAGES = tuple({f"{sysconfig.get_paths()[name]}/" for name in ("purelib", "platlib")})
_LIBRARY = tuple({f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib")})
_TORCH = f"{Path(torch.__file__).parent}/"
_TORCH_MODULES = f"{_TORCH}nn/modules/"
_OURS = Path(__file__).parents[2]
_CLOSED = (_TORCH, f"{_OURS}/graphs/", f"{_OURS}/devices/", f"{_OURS}/errors", "<frozen")


_OPEN_LIBRARY = ("builtins", "collections", "types", "functools", "argparse", "__main__")
"""Objects of these may be a user's values: dicts, lists, functions, namespaces."""


ASK_ONLY = (id, isinstance, type, hasattr, getattr, setattr, len, repr, str, print, callable, bool)
"""Functions that call none of their arguments."""


@functools.lru_cache(maxsize=4096)
def is_looked_into(file: str) -> bool:
    """Whether a source file may hold code of a body: not torch but its modules, the standard library, or ours."""
    if file.startswith(_TORCH_MODULES):
        return not file.endswith("/module.py")  # calls of modules: what it reads is noted for each module met
    if file.startswith(_CLOSED) or any(f"/{name}/" in file for name in ("numpy", "triton")):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_LIBRARY)


def is_installed(namespace: dict[str, Any]) -> bool:
    """Whether globals are those of an installed package, or of Python's own."""
    file = str(namespace.get("__file__") or "")
    return namespace is vars(builtins) or file.startswith((*_PACKAGES, *_LIBRARY))


def is_ours(value: Any) -> bool:
    """Whether an object is the graph layer's: its values are no facts of a body."""
    module = str(type(value).__module__)
    return module.startswith(("phonograph.graphs.", "phonograph.devices")) and module != f"{__package__}.facts"


def is_of_library(value: Any) -> bool:
    """Whether an object is one of the standard library's own, such as a logger or a queue."""
    module = str(type(value).__module__)
    is_open = module in _OPEN_LIBRARY or isinstance(value, types.ModuleType | type)
    return not is_open and module.partition(".")[0] in sys.stdlib_module_names


def file_of(kind: Any) -> str:
    """The file of a class's module, if it has one."""
    module = sys.modules.get(str(kind.__module__))
    return str(getattr(module, "__file__", None) or "")
