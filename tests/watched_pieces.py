"""Pieces of traced bodies that are watched: what they read, write, copy and return of memory that is not theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phonograph.graphs.recording.backends.compilers import COMPILERS


@dataclass(frozen=True)
class Op:
    """One op of a piece: tensors by the address of their memory, and their shapes."""

    name: str
    read: Sequence[tuple[int, tuple[int, ...]]]
    written: Sequence[int]
    made: Sequence[tuple[int, tuple[int, ...]]]


@dataclass(eq=False)
class Watched:
    """What all pieces did."""

    num_calls: int = 0
    taken: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    ops: list[Op] = field(default_factory=list)

    def reads(self, memory: Iterable[torch.Tensor]) -> bool:
        """Whether a piece has this memory among its inputs, or holds it."""
        places = set(map(_place, memory))
        return bool(places & (self.taken | {place for op in self.ops for place, _ in op.read}))

    def misuses(self, memory: Iterable[torch.Tensor]) -> list[str]:
        """What pieces do to this memory besides reading some of it."""
        places = set(map(_place, memory))
        found = ["returned"] if places & self.returned else []
        for op in self.ops:
            if places & set(op.written):
                found.append(f"{op.name} writes")
            whole = {shape for place, shape in op.read if place in places}
            fresh = {shape for place, shape in op.made if place not in {at for at, _ in op.read}}
            if whole & fresh:
                found.append(f"{op.name} copies")
        return found


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ops: list[Op]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        writes = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        written = [_place(one) for name in writes for one in _tensors(named.get(name))]
        read = [_seen(one) for one in _tensors((args, kwargs))]
        self._ops.append(Op(str(func), read, written, [_seen(one) for one in _tensors(result)]))
        return result


@contextmanager
def watched_pieces(patch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Inside, pieces that the compiler `eager` makes are watched whenever they run."""
    watched, compiled = Watched(), COMPILERS["eager"]

    def compile_watched(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        run = compiled(module)

        def noted(*inputs: Any) -> Sequence[Any]:
            with _Noting(watched.ops):
                outputs = run(*inputs)
            watched.num_calls += 1
            watched.taken |= {_place(one) for one in _tensors(inputs)}
            watched.returned |= {_place(one) for one in _tensors(outputs)}
            return outputs

        return noted

    with patch.context() as inside:
        inside.setitem(COMPILERS, "eager", compile_watched)
        yield watched


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _seen(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return _place(tensor), tuple(tensor.shape)
