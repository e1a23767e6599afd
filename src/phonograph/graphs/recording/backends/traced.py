"""Traced bodies: a body as Dynamo's FX graph, for many sizes, with the guards on them.

Dynamo is run for its graph and for the graph's arguments: the compiled function is called once for each view, and
then never again. Tests pin the private names of torch that this uses.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, Literal

import torch
from torch import fx

from phonograph.devices.capturing import QUERY
from phonograph.devices.trace import tensors_in
from phonograph.errors import CaptureError
from phonograph.graphs.inputs.fields import Path, fetch
from phonograph.graphs.phases.marks import traced_call
from phonograph.graphs.recording.backends.base import BodyView, ViewBody
from phonograph.graphs.recording.backends.trace_errors import as_capture_error

_COMPUTED_IN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""From the finest on."""
_MODES = {"_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"}
"""Functions that a traced graph has for `with torch.no_grad():` and the like; grad is off throughout."""


@dataclass(frozen=True)
class _Term:
    """A number that the trace has for an argument: its value, or the size or stride of an axis."""

    kind: Literal["value", "size", "stride"]
    axis: int
    said: Any
    """The number, or an expression of symbols."""

    def of(self, argument: Any) -> int | None:
        """Its value for an argument; None where it does not matter, like the stride of a single row."""
        if self.kind == "value":
            return int(argument)
        if not isinstance(argument, torch.Tensor):
            return None
        size = argument.shape[self.axis]
        if self.kind == "size":
            return size
        return argument.stride(self.axis) if size > 1 and argument.numel() > 1 else None

    def wanted(self, sizes: Mapping[Any, int]) -> int:
        """Its value by the trace, for these sizes."""
        return self.said if isinstance(self.said, int) else int(self.said.xreplace(sizes))


@dataclass(frozen=True)
class TracedGraph:
    """One graph of a body."""

    module: fx.GraphModule
    dims: dict[str, str] = field(default_factory=dict)
    """By symbol, or by number where the trace is for one size, the dim whose size it is."""

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "placeholder"]

    @cached_property
    def constants(self) -> dict[fx.Node, Any]:
        """Tensors that the trace holds itself."""
        nodes = [node for node in self.nodes if node.op == "get_attr"]
        return {node: operator.attrgetter(str(node.target))(self.module) for node in nodes}

    @cached_property
    def outputs(self) -> list[Any]:
        """What it returns: nodes, and plain values."""
        (found,) = (node.args[0] for node in self.nodes if node.op == "output")
        assert isinstance(found, tuple | list)
        return list(found)

    @cached_property
    def coarsest(self) -> torch.dtype | None:
        """The coarsest dtype that values are computed in, complex ones by their parts; None for whole numbers alone.
        Smaller ones than of two bytes are stored, and computed with in another."""
        values = [value for node in self.nodes for value in tensors_in(node.meta.get("example_value"))]
        found = {value.dtype.to_real() for value in values if value.is_floating_point() or value.is_complex()}
        return max((one for one in found if one in _COMPUTED_IN), key=_COMPUTED_IN.index, default=None)

    def sizes(self, flat: Sequence[Any]) -> dict[Any, int]:
        """By symbol, its value in these arguments."""
        found: dict[Any, int] = {}
        for index in self._symbolic:
            for term in self._terms[index]:
                is_now = None if isinstance(term.said, int) or not term.said.is_Symbol else term.of(flat[index])
                if is_now is not None:
                    found.setdefault(term.said, is_now)
        return found

    def misfit(self, flat: Sequence[Any]) -> str:
        """The guard that these arguments fail, in words, or nothing."""
        sizes = self.sizes(flat)
        for terms, value in zip(self._terms, flat, strict=True):
            for term in terms:
                is_now = term.of(value)
                if is_now is not None and term.wanted(sizes) != is_now:
                    return f"{self._named(term.said)} is {is_now}"
        for condition, guard in self._conditions:
            if condition.xreplace(sizes) == False:  # noqa: E712 - a value of sympy
                return f"{self._named(condition)} is not so{_line_of(guard)}"
        env = self._shape_env
        for symbol, size in sizes.items():
            bounds = env.var_to_range.get(symbol) if env is not None else None
            if bounds is not None and not (bounds.lower <= size and size <= bounds.upper):  # noqa: PLR1716 - of sympy
                return f"{self._named(symbol)} is {size}, not in {bounds.lower} … {bounds.upper}"
        return ""

    def fixed(self, view: BodyView) -> str:
        """A size that the code compares with a number, and that is another in this view; or nothing."""
        env = self._shape_env
        for guard in env.guards if env is not None else ():
            number = getattr(guard.expr, "rhs", None)
            dim = self.dims.get(str(number)) if getattr(guard.expr, "rel_op", "") == "==" else None
            if any(sized.dim == dim and sized.tensor.shape[sized.axis] != number for sized in view.sizes):
                return f"the number of {dim} == {number} is not so{_line_of(guard)}"
        return ""

    def value_of(self, node: fx.Node, sizes: Mapping[Any, int]) -> Any:
        """The number that a node is, for these sizes."""
        value = node.meta["example_value"]
        return int(value.node.expr.xreplace(dict(sizes))) if isinstance(value, torch.SymInt) else value

    def said_of(self, node: fx.Node, sizes: Mapping[Any, int]) -> str:
        """What a node is, for these sizes, in words: tensors by dtype and shape, in tuples and lists."""

        def shape(tensor: torch.Tensor) -> tuple[int, ...]:
            return tuple(one if isinstance(one, int) else int(one.xreplace(sizes)) for one in map(_expr, tensor.shape))

        def number(value: Any) -> Any:
            kind = bool if isinstance(value, torch.SymBool) else float if isinstance(value, torch.SymFloat) else int
            return kind(value.node.expr.xreplace(dict(sizes)))

        return described(node.meta.get("example_value"), shape, number)

    def name_dims(self, flat: Sequence[Any], view: BodyView) -> None:
        """Note which symbol is the size of which dim."""
        for node, value in zip(self.placeholders, flat, strict=True):
            for sized in view.sizes:
                if value is sized.tensor:
                    self.dims.setdefault(str(_expr(node.meta["example_value"].shape[sized.axis])), sized.dim)

    @cached_property
    def _terms(self) -> list[list[_Term]]:
        """For each argument, what is compared."""
        return [_terms_of(node.meta.get("example_value")) for node in self.placeholders]

    @cached_property
    def _symbolic(self) -> list[int]:
        """The arguments that are, or have, a size that differs between views."""
        return [index for index, terms in enumerate(self._terms) if any(not isinstance(one.said, int) for one in terms)]

    @cached_property
    def _conditions(self) -> list[tuple[Any, Any]]:
        """Guards on sizes of the trace and of the compilers of its pieces; each once, with its line."""
        env = self._shape_env
        found: dict[Any, Any] = {}
        for guard in env.guards if env is not None else ():
            found.setdefault(env.replace(guard.expr), guard)
        return list(found.items())

    @cached_property
    def _shape_env(self) -> Any:
        for node in self.placeholders:
            mode = getattr(node.meta.get("example_value"), "fake_mode", None)
            if mode is not None:
                return mode.shape_env
        return None

    def _named(self, expression: Any) -> str:
        is_relation = getattr(expression, "is_Relational", False)
        text = f"{expression.lhs} {expression.rel_op} {expression.rhs}" if is_relation else str(expression)
        for symbol, dim in sorted(self.dims.items(), key=lambda pair: -len(pair[0])):
            text = text if symbol.isdigit() else text.replace(symbol, f"the number of {dim}")
        return text


class OtherValueError(CaptureError):
    """A view that fails a guard of the traced graph which is not about sizes."""


@dataclass(frozen=True)
class Call:
    """A call of a traced body: the program that was made of its graph, the graph's arguments, and the result.

    Where the graph puts something out, the result has the stand-in of that place.
    """

    program: Any
    flat: Sequence[Any]
    stand_ins: Sequence[Any]
    result: Any


@dataclass(eq=False)
class Tracer:
    """A body under Dynamo; each is traced once, at the sizes of its first view."""

    body: ViewBody
    make: Callable[[TracedGraph], Any]
    """Makes a program of a graph."""
    is_general: bool = True
    """Whether the sizes that buckets change are symbols; else the graph is for the first view's alone."""
    program: Any = None
    """What was made of the graph; None before the first call."""
    _function: Callable[..., Any] = field(init=False)
    _view: BodyView | None = None
    _noted: tuple[Any, Sequence[Any], Sequence[Any]] | None = None
    _is_made: bool = False

    def __post_init__(self) -> None:
        importlib.import_module("torch._dynamo")
        torch.compiler.allow_in_graph(traced_call)  # type: ignore[no-untyped-call]
        # Dynamo caches compiled code by code object: this one is private.
        function = FunctionType(_call.__code__.replace(co_name="traced_body"), _call.__globals__, "traced_body")
        # guard_filter_fn is taken out of the dict that is passed.
        options: dict[str, Any] = {"guard_filter_fn": _without_shapes}
        compiled: Any = torch.compile(function, fullgraph=True, backend=self._compile, options=options)
        self._function = compiled

    def call(self, view: BodyView) -> Call:
        """Find the graph's arguments for a view; the first one is traced."""
        if not self._is_made and self.is_general:
            for sized in view.sizes:
                torch._dynamo.maybe_mark_dynamic(sized.tensor, sized.axis)
        self._view, self._noted = view, None
        try:
            with _tracing_options(_size_sources(view) if self.is_general else ""):
                result = self._function(self.body, view.batch, view.kwargs)
        except Exception as error:
            raise as_capture_error(error) from None
        finally:
            self._view = None
        if self._noted is None:
            raise CaptureError(
                "torch.compile gave no graph: it is disabled (TORCH_COMPILE_DISABLE), or the body computes nothing",
                "Enable it, or use backend='breakable'",
            )
        (program, flat, stand_ins), self._noted = self._noted, None
        return Call(program, flat, stand_ins, result)

    def _compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._is_made:
            raise OtherValueError(
                "the body was compiled for another value of something that is no slot",
                "Make it a slot, or an axis of the phase",
            )
        self._is_made = True
        without_modes(module)
        graph = TracedGraph(module)
        program = self.program = self.make(graph)
        outputs = graph.outputs

        def note(*flat: Any) -> Any:
            sizes = graph.sizes(flat)
            if self._view is not None:
                graph.name_dims(flat, self._view)
            stand_ins = [_stand_in(graph, one, sizes) for one in outputs]
            self._noted = program, flat, stand_ins
            return stand_ins

        return note


def described(
    value: Any, shape: Callable[[torch.Tensor], tuple[int, ...]], number: Callable[[Any], Any] = lambda value: value
) -> str:
    """A value in words: tensors by dtype and shape, one after the other in tuples and lists."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(shape(value))}"
    if isinstance(value, tuple | list):
        inside = ", ".join(described(one, shape, number) for one in value)
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    return repr(number(value) if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value)


def _call(body: ViewBody, batch: Any, kwargs: Mapping[str, Any]) -> Any:
    return body(batch, kwargs)


def without_modes(module: fx.GraphModule) -> None:
    """Take nodes out that turn grad or inference mode on or off."""
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _MODES:
            module.graph.erase_node(node)
    module.recompile()


@contextmanager
def _tracing_options(dynamic: str) -> Iterator[None]:
    dynamo = importlib.import_module("torch._dynamo")
    shapes = importlib.import_module("torch.fx.experimental._config")
    compiler = importlib.import_module("torch.compiler.config")
    with ExitStack() as stack:
        # No duck shaping, and no specialization on 0 and 1.
        stack.enter_context(shapes.patch(use_duck_shape=False, backed_size_oblivious=True))
        stack.enter_context(dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True))
        stack.enter_context(compiler.patch(dynamic_sources=dynamic))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("default"))
        stack.enter_context(_answered_by_the_trace())
        yield


@contextmanager
def _answered_by_the_trace() -> Iterator[None]:
    """Inside, traced code may query whether a capture is going on: none is."""
    folded = importlib.import_module("torch._dynamo.variables.torch").constant_fold_functions
    if QUERY in folded:
        yield
        return
    folded[QUERY] = None
    try:
        yield
    finally:
        del folded[QUERY]


def _size_sources(view: BodyView) -> str:
    """The numbers of a view that are sizes, as Dynamo names where it found them."""
    return ",".join(_source(view, path) for path in view.size_fields)


def _source(view: BodyView, path: Path) -> str:
    in_kwargs = path[0] in view.kwargs
    holder: Any = view.kwargs if in_kwargs else view.batch
    name = "L['kwargs']" if in_kwargs else "L['batch']"
    for part in path:
        name += f"['{part}']" if isinstance(holder, Mapping) else f".{part}"
        holder = fetch(holder, {}, (part,))
    return name


def _without_shapes(guards: Sequence[Any]) -> list[bool]:
    """Shapes are checked when a view is bound, for every size and with their lines."""
    return [guard.guard_type != "SHAPE_ENV" for guard in guards]


def _stand_in(graph: TracedGraph, output: Any, sizes: Mapping[Any, int]) -> Any:
    if not isinstance(output, fx.Node):
        return output
    is_tensor = isinstance(output.meta.get("example_value"), torch.Tensor)
    return torch.empty(0) if is_tensor else graph.value_of(output, sizes)


def _terms_of(said: Any) -> list[_Term]:
    if isinstance(said, torch.SymInt):
        return [_Term("value", 0, _expr(said))]
    if not isinstance(said, torch.Tensor):
        return []
    found = [_Term("size", axis, _expr(size)) for axis, size in enumerate(said.shape)]
    if said.layout is torch.strided:
        found += [_Term("stride", axis, _expr(stride)) for axis, stride in enumerate(said.stride())]
    return found


def _expr(size: Any) -> Any:
    """A number, or where buckets change it an expression."""
    found = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(found) if isinstance(found, int) or found.is_Integer else found


def _line_of(guard: Any) -> str:
    """Where the code asks for it, as far as the trace knows."""
    where = getattr(guard.sloc, "user_loc", None) or getattr(guard.sloc, "maybe_user_loc", None)
    return f" ({where})" if where else ""
