"""Pieces: a traced graph split at its breaks, each part compiled, and joined again as a list of calls."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from phonograph.errors import CaptureError
from phonograph.graphs.phases.breaks import GraphBreak
from phonograph.graphs.phases.marks import Mark, marked, traced_call
from phonograph.graphs.recording.backends.compilers import Compile, CompileOnce
from phonograph.graphs.recording.backends.traced import TracedGraph, described

Owners = Mapping[int, Any]
"""The objects whose methods are marked, by id."""


@dataclass(frozen=True)
class Piece:
    """Ops between two breaks, compiled."""

    run: Callable[..., Sequence[Any]]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    module: fx.GraphModule
    """The ops, as they were traced."""


@dataclass(frozen=True)
class MarkedCall:
    """A call that is not compiled: a break, an opaque call, or a getitem on another's result."""

    node: fx.Node
    function: Callable[..., Any]
    args: Sequence[Any]
    mark: Mark | None = None


@dataclass(frozen=True)
class Program:
    """Runs in place of a body, at all sizes that its graph covers."""

    graph: TracedGraph
    parts: Sequence[Piece | MarkedCall]
    last_uses: Mapping[int, Sequence[fx.Node]]
    """By part, the values that are dead after it."""
    num_compiled: int = 0
    """Distinct pieces: layers that compute the same share one compiled piece."""

    @property
    def pieces(self) -> list[Piece]:
        return [part for part in self.parts if isinstance(part, Piece)]

    @property
    def calls(self) -> list[MarkedCall]:
        return [part for part in self.parts if isinstance(part, MarkedCall)]

    @property
    def num_breaks(self) -> int:
        return sum(isinstance(call.function, GraphBreak) for call in self.calls)

    def run(self, flat: Sequence[Any], sizes: Mapping[Any, int], *, checks: bool) -> list[Any]:
        """The graph's outputs for these arguments; with `checks`, shapes are compared with the traced ones."""
        values: dict[fx.Node, Any] = dict(zip(self.graph.placeholders, flat, strict=True)) | self.graph.constants
        for index, part in enumerate(self.parts):
            if isinstance(part, Piece):
                found = part.run(*(values[node] for node in part.inputs))
                values.update(zip(part.outputs, found, strict=True))
            else:
                values[part.node] = self._called(part, values)
            if checks:
                self._check(part, values, sizes)
            for node in self.last_uses[index]:
                del values[node]
        return [values[one] if isinstance(one, fx.Node) else one for one in self.graph.outputs]

    def _called(self, part: MarkedCall, values: Mapping[fx.Node, Any]) -> Any:
        args = map_arg(tuple(part.args), values.__getitem__)
        kwargs: dict[str, Any] = map_arg(dict(part.node.kwargs), values.__getitem__)
        return part.function(*args, **kwargs)

    def _check(self, part: Piece | MarkedCall, values: Mapping[fx.Node, Any], sizes: Mapping[Any, int]) -> None:
        for node in part.outputs if isinstance(part, Piece) else (part.node,):
            said, found = self.graph.said_of(node, sizes), _described(values[node])
            if said == found:
                continue
            if isinstance(part, MarkedCall):
                name = part.mark.name if part.mark is not None else str(part.node.target)
                is_gap = part.mark is None or part.mark.breaks
                raise CaptureError(
                    f"{'gap' if is_gap else 'opaque call'} {name} returned {found}, its fake= says {said}",
                    "Correct fake=",
                )
            raise CaptureError(
                f"a compiled piece gave {found} for {node.name}, the trace says {said}",
                "Use backend='breakable' for this body",
            )


def _described(value: Any) -> str:
    """A result, as `TracedGraph.said_of` tells what it should be."""
    return described(value, lambda tensor: tuple(tensor.shape))


def program_of(
    graph: TracedGraph,
    break_ops: Collection[str],
    owners: Owners,
    compile_piece: Compile,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Program:
    """Split a graph at marked calls and named ops, and compile the parts; `progress` gets how many are done."""
    runs: list[list[fx.Node] | MarkedCall] = []
    broken: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        call = _broken_call(node, break_ops, owners, broken)
        if call is not None:
            broken.add(node)
            runs.append(call)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(node)
        else:
            runs.append([node])
    _check_named(graph, break_ops)
    compile_once, parts = CompileOnce(compile_piece), list[Piece | MarkedCall]()
    for index, run in enumerate(runs):
        parts.append(run if isinstance(run, MarkedCall) else _piece(graph.module, run, compile_once))
        progress(index + 1, len(runs))
    return Program(graph, parts, _last_uses(graph, parts), compile_once.num_compiled)


def name_of_op(target: Any) -> str:
    """What a call in a traced graph is named by: `scaled_dot_product_attention`, `softmax`."""
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _broken_call(
    node: fx.Node, break_ops: Collection[str], owners: Owners, broken: Collection[fx.Node]
) -> MarkedCall | None:
    if node.op == "call_function" and node.target is traced_call:
        number, owner, *args = node.args
        mark = marked(int(number))  # type: ignore[arg-type]
        function = _method(mark, int(owner), owners)  # type: ignore[arg-type]
        return MarkedCall(node, GraphBreak(function, mark) if mark.breaks else function, args, mark)
    if node.op == "call_function" and node.target is operator.getitem and node.args[0] in broken:
        return MarkedCall(node, operator.getitem, node.args)
    if node.op in ("call_function", "call_method") and name_of_op(node.target) in break_ops:
        function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        return MarkedCall(node, GraphBreak(_named(function, name_of_op(node.target))), node.args)
    return None


def _check_named(graph: TracedGraph, break_ops: Collection[str]) -> None:
    known = {name_of_op(node.target) for node in graph.nodes if node.op in ("call_function", "call_method")}
    for name in sorted(set(break_ops) - known):
        raise CaptureError(
            f"break_ops names {name!r}, and the traced body has no op {name!r}; it has {', '.join(sorted(known))}",
            "Correct the name, or leave it out",
        )


def _named(function: Any, name: str) -> Callable[..., Any]:
    """A function of Python's own that has a name: those of torch's have no `__qualname__` to tell them by."""

    @functools.wraps(function, assigned=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _method(mark: Mark, owner: int, owners: Owners) -> Callable[..., Any]:
    if not owner:
        return mark.function
    if owner not in owners:
        raise CaptureError(
            f"the object whose method {mark.name} is called was not there in the warm-ups",
            "Make it outside of the body, or mark a function that is no method",
        )
    method: Callable[..., Any] = mark.function.__get__(owners[owner])
    return method


def _piece(module: fx.GraphModule, nodes: Sequence[fx.Node], compile_piece: Compile) -> Piece:
    inside, graph = set(nodes), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    for node in nodes:
        for used in node.all_input_nodes:
            if used in inside or used in copies:
                continue
            if used.op == "get_attr":
                continue
            inputs.append(used)
            copies[used] = graph.placeholder(used.name)
            copies[used].meta = dict(used.meta)
    attributes = {used for node in nodes for used in node.all_input_nodes if used.op == "get_attr"}
    for node in (*sorted(attributes, key=lambda one: one.name), *nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in outputs))
    piece = fx.GraphModule(module, graph)
    return Piece(compile_piece(piece), inputs, outputs, piece)


def _last_uses(graph: TracedGraph, parts: Sequence[Piece | MarkedCall]) -> dict[int, list[fx.Node]]:
    """By part, the values to drop after it, so that their memory is reused."""
    kept = {one for one in graph.outputs if isinstance(one, fx.Node)} | set(graph.placeholders)
    last: dict[fx.Node, int] = {}
    for index, part in enumerate(parts):
        made = part.outputs if isinstance(part, Piece) else (part.node,)
        used = part.inputs if isinstance(part, Piece) else part.node.all_input_nodes
        last.update(dict.fromkeys((*made, *used), index))
    found: dict[int, list[fx.Node]] = {index: [] for index in range(len(parts))}
    for node, index in last.items():
        if node not in kept and node.op != "get_attr":
            found[index].append(node)
    return found
