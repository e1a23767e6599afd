"""Compilers of pieces: `eager` runs the traced ops as they are, `inductor` fuses them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from phonograph.settings import use_compile_cache

Compile = Callable[[fx.GraphModule], Callable[..., Sequence[Any]]]
"""Takes the ops of a piece; what runs them, for all sizes that they were traced for."""


def _eager(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    forward: Callable[..., Sequence[Any]] = module.forward
    return forward


def _inductor(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    # Cache entries are keyed by content: ops, shapes and options, versions, and the chip.
    use_compile_cache(
        torch.__version__, importlib.import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir()
    )
    inductor = importlib.import_module("torch._inductor")
    examples = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    # Random ops draw what they would without a compiler.
    with importlib.import_module("torch._inductor.config").patch(fallback_random=True):
        compiled: Callable[..., Sequence[Any]] = inductor.standalone_compile(
            module, examples, dynamic_shapes="from_graph"
        )
    return compiled


class CompileOnce:
    """Compiles pieces of one trace; pieces that differ only in their inputs' memory are compiled once.

    Weights are inputs, so that the layers of a model are one piece. Of one trace, since its sizes have conditions that
    the compiler may build upon.
    """

    def __init__(self, compile_piece: Compile) -> None:
        self._compile = compile_piece
        self._compiled: dict[Any, Callable[..., Sequence[Any]]] = {}
        self.num_compiled = 0
        """How often it had to compile."""

    def __call__(self, module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        name = computation_of(module)
        found = self._compiled.get(name) if name is not None else None
        if found is None:
            found = self._compile(module)
            self.num_compiled += 1
            if name is not None:
                self._compiled[name] = found
        return found


def computation_of(module: fx.GraphModule) -> tuple[Any, ...] | None:
    """What a piece computes, equal for pieces that compute the same; None for one that holds tensors of its own."""
    numbers: dict[fx.Node, str] = {}
    storages: dict[int, int] = {}
    found: list[Any] = []
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return None
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":
            found.append(_input(node.meta.get("example_value"), storages))
        else:
            # fx.Node shows itself by its name, which differs between layers.
            args = map_arg((node.args, node.kwargs), lambda used: _Number(numbers[used]))
            found.append((node.op, node.target, repr(args)))
    return tuple(found)


class _Number(str):
    """The number of a value, as an argument."""

    def __repr__(self) -> str:
        return str(self)


def _input(value: Any, storages: dict[int, int]) -> tuple[Any, ...]:
    """What a compiler may build upon: type, shape and layout, and which inputs share memory."""
    if not isinstance(value, torch.Tensor):
        return (type(value), repr(value))
    shape, strides = repr(tuple(value.shape)), repr(value.stride()) if value.layout is torch.strided else ""
    shared = storages.setdefault(value.untyped_storage()._cdata, len(storages)) if strides else -1
    kind = (type(value), value.dtype, value.device, value.layout, value.requires_grad, value.is_conj(), value.is_neg())
    return (*kind, shape, strides, repr(value.storage_offset()) if strides else "", shared)


COMPILERS: Mapping[str, Compile] = {"eager": _eager, "inductor": _inductor}
"""By the name that the plan has for it."""
