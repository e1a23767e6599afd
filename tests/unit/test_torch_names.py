"""Names of torch that are not public, and that we use: they exist, and do what we take them for, in each version."""

from __future__ import annotations

import ast
import importlib
import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import phonograph
from phonograph.devices import capturing
from phonograph.devices.capturing import said_to_capture
from phonograph.graphs.recording.backends import traced

SOURCES = sorted(Path(phonograph.__file__).parent.rglob("*.py"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def place(request: pytest.FixtureRequest) -> str:
    """So that they are looked at here, and by `-m gpu` with the torch of the GPU."""
    return str(request.param)


def names_in(source: str) -> set[str]:
    """What a module calls by a name of torch in which a part begins with `_`."""
    tree, known, found = ast.parse(source), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            ours = [one for one in node.names if one.name.split(".")[0] == "torch"]
            known |= {one.asname or "torch": one.name if one.asname else "torch" for one in ours}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(_written(node, known))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            found.add(node.value.removesuffix("."))
    found |= set(known.values())
    return {one for one in found if " " not in one and any(part[:1] == "_" for part in one.split("."))}


def _written(node: ast.Attribute, known: dict[str, str]) -> str:
    parts = list[str]()
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    if not isinstance(at, ast.Name) or at.id not in known:
        return ""
    return ".".join((known[at.id], *reversed(parts)))


def resolved(name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def test_every_name_in_our_sources_is_there() -> None:
    names = set[str]().union(*(names_in(path.read_text()) for path in SOURCES))
    assert {
        "torch._C._storage_Use_Count",
        "torch._dynamo.maybe_mark_dynamic",
        "torch._inductor.config",
        "torch.fx.experimental._config",
        "torch.utils._python_dispatch.TorchDispatchMode",
    } <= names
    missing = []
    for name in sorted(names):
        try:
            resolved(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []


def test_a_name_that_is_not_there_is_found() -> None:
    source = "import torch\nfrom torch._dynamo import nothing as ours\ntorch._C._no_such(ours)"
    assert names_in(source) == {"torch._dynamo.nothing", "torch._C", "torch._C._no_such"}
    with pytest.raises(AttributeError):
        resolved("torch._C._no_such")


def test_settings_of_tracing() -> None:
    dynamo = importlib.import_module("torch._dynamo")
    shapes = importlib.import_module("torch.fx.experimental._config")
    with dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):
        assert not dynamo.config.automatic_dynamic_shapes
    with shapes.patch(use_duck_shape=False, backed_size_oblivious=True):
        assert shapes.backed_size_oblivious
        assert not shapes.use_duck_shape
    with importlib.import_module("torch.compiler.config").patch(dynamic_sources="L['batch'].num"):
        pass
    assert torch.compiler.is_dynamo_compiling() is False
    assert callable(torch.compiler.allow_in_graph)
    assert isinstance(importlib.import_module("torch._dynamo.variables.torch").constant_fold_functions, dict)


def test_what_a_trace_knows_of_sizes() -> None:
    symbolic = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    assert {"expr", "sloc"} <= set(symbolic.ShapeGuard.__annotations__)
    assert callable(symbolic.ShapeEnv.replace)
    assert {"guards", "var_to_range"} <= vars(symbolic.ShapeEnv()).keys()


def test_guards_can_be_left_out(place: str) -> None:
    """Of `guard_filter_fn`: it gets guards with their types, and those on sizes are evaluated no more."""
    seen, compiled = set[str](), []

    def without(guards: Any) -> list[bool]:
        seen.update(guard.guard_type for guard in guards)
        return traced._without_shapes(guards)

    def backend(module: Any, examples: Any) -> Any:
        compiled.append(module)
        return module.forward

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 3 else x - 1

    function: Any = torch.compile(body, backend=backend, fullgraph=True, options={"guard_filter_fn": without})
    x = torch.ones(8, 2, device=place)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    with torch.no_grad():
        function(x)
        found = function(torch.ones(2, 2, device=place))
    assert "SHAPE_ENV" in seen
    assert len(compiled) == 1  # by the guard on its size the second call would be compiled again
    assert float(found[0, 0]) == 2.0


def test_inductor_draws_the_numbers_of_torch() -> None:
    config = importlib.import_module("torch._inductor.config")
    assert config.fallback_random is False
    with config.patch(fallback_random=True):
        assert config.fallback_random is True
    wanted = inspect.signature(importlib.import_module("torch._inductor").standalone_compile).parameters
    assert "dynamic_shapes" in wanted
    assert callable(importlib.import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir)


def test_holders_of_memory_are_counted(place: str) -> None:
    """Of `_storage_Use_Count`: another tensor over the memory is one more."""
    tensor = torch.zeros(4, device=place)
    count = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    other = tensor[1:]
    assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == count + 1
    del other
    assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == count


def test_what_torch_says_of_a_capture(place: str) -> None:
    """Of `_cuda_isCurrentStreamCapturing`: all of torch's questions go through it."""
    assert callable(getattr(importlib.import_module("torch.cuda.graphs"), capturing._ASKED))
    with said_to_capture():
        assert torch.cuda.is_current_stream_capturing() is True
    if place == "cuda":  # where there is no CUDA, torch has no other answer
        assert torch.cuda.is_current_stream_capturing() is False
        x, graph = torch.zeros(1, device=place), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            said = torch.cuda.is_current_stream_capturing()
            x.add_(1)
        assert said is True


def test_torch_seeds_one_generator() -> None:
    assert getattr(torch.random, capturing._SEEDED) is capturing._generator
    seed = random.Random(3).getrandbits(31)
    torch.manual_seed(seed)
    assert getattr(torch.random, capturing._SEEDED).initial_seed() == seed


def test_compilations_are_told() -> None:
    """Of `callback_handler`: called when a compilation begins, and when it ends."""
    handler, told = importlib.import_module("torch._dynamo").callback_handler, list[str]()

    def begun(args: Any) -> None:
        told.append("begun")

    def ended(args: Any) -> None:
        told.append("ended")

    handler.register_start_callback(begun)
    handler.register_end_callback(ended)
    assert begun in handler.start_callbacks
    assert ended in handler.end_callbacks
    try:
        torch.compile(lambda x: x * 7, backend="eager")(torch.ones(2))
    finally:
        handler.remove_start_callback(begun)
        handler.remove_end_callback(ended)
    assert told == ["begun", "ended"]
    assert begun not in handler.start_callbacks
    assert ended not in handler.end_callbacks


def test_modes_of_torch_are_asked(place: str) -> None:
    before = torch._C._len_torch_function_stack()
    with torch.device(place):
        assert torch._C._len_torch_function_stack() == before + 1
    guard = importlib.import_module("torch._C._dynamo.guards").GlobalStateGuard()
    assert guard.check()
    torch.set_default_dtype(torch.float64)
    try:
        assert not guard.check()
    finally:
        torch.set_default_dtype(torch.float32)
