"""Compilers of pieces: `eager` runs the traced ops as they are, `inductor` fuses them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from phonograph.settings import use_compile_cache

Compile = Callable[[fx.GraphModule], Callable[..., Sequence[Any]]]
"""Takes the ops of a piece; what runs them, for all sizes that they were traced for."""


def _eager(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    forward: Callable[..., Sequence[Any]] = module.forward
    return forward


def _inductor(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    use_compile_cache(torch.__version__)
    inductor = importlib.import_module("torch._inductor")
    examples = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    # Random ops draw what they would without a compiler.
    with importlib.import_module("torch._inductor.config").patch(fallback_random=True):
        compiled: Callable[..., Sequence[Any]] = inductor.standalone_compile(
            module, examples, dynamic_shapes="from_graph"
        )
    return compiled


COMPILERS: Mapping[str, Compile] = {"eager": _eager, "inductor": _inductor}
"""By the name that the plan has for it."""
