"""Architecture rules: what keeps the package small and its layers apart."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import phonograph

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "phonograph"
MODULES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(source, filename=name) for name, source in MODULES.items()}

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50
BASE = ("errors", "numbers", "settings", "sizes")
"""Modules that need nothing of ours, for all to import."""
GRAPH_LAYER = ("devices/", "graphs/", *(f"{name}.py" for name in BASE), "__init__.py")

PUBLIC = [
    "LLM",
    "Axis",
    "BreakError",
    "Buckets",
    "BufferPool",
    "CaptureError",
    "CaptureReport",
    "CheckpointError",
    "CoreError",
    "CoverageError",
    "DataDependentShapeError",
    "DeclarationError",
    "Device",
    "DeviceError",
    "Dim",
    "EmulatedDevice",
    "EngineOptions",
    "Extent",
    "Graphed",
    "GraphedGrid",
    "HostConstantError",
    "HostReadError",
    "InputWriteError",
    "LoadError",
    "LoadMode",
    "OutputError",
    "Pad",
    "Phase",
    "PhasePlan",
    "PhonographError",
    "Plan",
    "PlanError",
    "Reason",
    "Registry",
    "Replay",
    "RequestError",
    "RunEagerly",
    "Runner",
    "RunnerOptions",
    "Sample",
    "SamplingParams",
    "ShapeKey",
    "Slot",
    "Stage",
    "StepOrderError",
    "UnavailableError",
    "VerifyError",
    "VerifyReport",
    "ask",
    "break_graph",
    "current",
    "graph_break",
    "graphed",
    "opaque",
    "open_device",
    "resolve",
    "verify",
]


def dotted(node: ast.AST) -> str:
    """`a.b.c` as written, or nothing for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = dotted(node.value)
        return f"{below}.{node.attr}" if below else ""
    return ""


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported anywhere in a file, and for `from a import b` also `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_in(module: str) -> set[str]:
    """Every dotted name in a module, and every module or name that it imports."""
    return {dotted(node) for node in ast.walk(TREES[module])} | set(imported(TREES[module]))


# -- the public names -----------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert phonograph.__all__ == PUBLIC


def test_the_public_names_are_sorted_and_there() -> None:
    assert phonograph.__all__ == sorted(set(phonograph.__all__), key=lambda name: (not name.isupper(), name))
    for name in phonograph.__all__:
        assert hasattr(phonograph, name)


def test_every_public_name_is_an_error_or_has_a_module() -> None:
    imports = {
        alias.name: node.module
        for node in ast.walk(TREES["__init__.py"])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phonograph.")
        for alias in node.names
    }
    assert set(imports) == set(phonograph.__all__) <= set(dir(phonograph))
    assert {name: module for name, module in imports.items() if module != "phonograph.errors"} == phonograph._MODULES


def test_the_graph_layer_is_imported_without_the_engine() -> None:
    names = [name for name, module in phonograph._MODULES.items() if not module.startswith("phonograph.engine")]
    code = f"import sys; from phonograph import {', '.join(names)}; "
    code += "assert not any(name.startswith('phonograph.engine') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exception_is_public() -> None:
    errors = {node.name for node in TREES["errors.py"].body if isinstance(node, ast.ClassDef)}
    assert errors - {"Frame"} <= set(phonograph.__all__)
    doc = phonograph.errors.__doc__ or ""
    assert all(name in doc for name in errors - {"Frame"}), "the tree in the docstring of errors.py is incomplete"


# -- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_short_and_says_what_it_is_for(name: str) -> None:
    lines = len(MODULES[name].splitlines())
    assert lines <= MAX_MODULE_LINES, f"{name} has {lines} lines: look for the second concept in it"
    assert ast.get_docstring(TREES[name]), f"{name} has no docstring"


NO_NAMES = {
    *("A", "An", "The", "One", "Every", "Each", "All"),
    *("What", "Which", "How", "Who", "Whose", "Whoever", "Where", "When", "Whether", "Why", "From", "Between"),
    *("Adds", "Brings", "Decides", "Does", "Draws", "Drives", "Finds", "Gives", "Holds", "Keeps", "Loads", "Makes"),
    *("Measures", "Opens", "Puts", "Reads", "Runs", "Says", "Sends", "Shows", "Speaks", "Starts", "Streams", "Takes"),
    *("Tells", "Turns", "Watches", "Writes"),
}
"""First words of sentences about a thing whose name the reader would have to guess."""
MAX_NAME_WORDS = 6


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_introduced_by_its_name(name: str) -> None:
    first = (ast.get_docstring(TREES[name]) or "").split("\n")[0]
    introduced, colon, rest = first.partition(":")
    words = introduced.split()
    assert colon, f"{name} begins {first!r}. Begin with the thing's name and a colon: 'Detokenizer: text from tokens …'"
    assert rest.startswith(" "), f"{name} begins {first!r}. Say in the same line what the thing is."
    assert len(words) <= MAX_NAME_WORDS, f"{name} begins with {introduced!r}: a sentence, not a name"
    assert words[0] not in NO_NAMES, f"{name} begins with {words[0]!r}. Begin with the thing's name."


@pytest.mark.parametrize("name", MODULES)
def test_functions_are_short(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # What counts is code: naming arguments and explaining them is never too long.
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            lines = (node.end_lineno or node.lineno) - node.body[documented].lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} in {name} has {lines} lines"


# -- layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_only_the_cuda_device_names_cuda(name: str) -> None:
    if name in ("devices/cuda.py", "devices/capturing.py"):
        return
    banned = ("torch.cuda", "torch._C._cuda", "torch.xpu", "torch.mps", "torch.get_device_module")
    assert not {found for found in names_in(name) if found.startswith(banned)}, "ask the Device"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "devices/registry.py"])
def test_only_the_registry_asks_which_accelerator_there_is(name: str) -> None:
    assert not {found for found in names_in(name) if found.startswith("torch.accelerator")}, "ask the Device"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith(GRAPH_LAYER)])
def test_the_graph_layer_needs_only_torch_and_numpy(name: str) -> None:
    roots = {module.split(".")[0] for module in imported(TREES[name])}
    assert roots <= {"phonograph", "torch", "numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("devices/")])
def test_devices_know_nothing_above_them(name: str) -> None:
    ours = {module for module in imported(TREES[name]) if module.startswith("phonograph.")}
    assert all(module.split(".")[1] in ("devices", *BASE) for module in ours)


def test_there_is_one_ambient_value() -> None:
    made = [
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "ContextVar"
    ]
    assert made == ["graphs/phases/context.py"]


ENVIRONMENT = {
    *("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"),
    *("os.path.expandvars", "posixpath.expandvars", "posix.environ"),
}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "settings.py"])
def test_only_settings_reads_the_environment(name: str) -> None:
    assert not names_in(name) & ENVIRONMENT
    assert "env" not in {first_item(node) for node in ast.walk(TREES[name])}, "say env= to a child process"


def first_item(node: ast.AST) -> object:
    """The first item of a list that is written out, as those of commands are."""
    if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
        return node.elts[0].value
    return None


@pytest.mark.parametrize("name", MODULES)
def test_no_rule_is_got_round_by_spelling(name: str) -> None:
    """A name as a string is for what a program or its user chooses; a literal one only hides what is named."""
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.Call):
            continue
        called, given = dotted(node.func).split(".")[-1], [dotted(arg) or literal(arg) for arg in node.args]
        if called in ("getattr", "setattr", "hasattr") and given[0].split(".")[0] in ("torch", "os"):
            assert not literal(node.args[1]), f"line {node.lineno}: write {given[0]}.{given[1]}"
        if called == "attrgetter":
            assert not given[0].startswith(("cuda", "environ")), f"line {node.lineno}"
        if called in ("import_module", "__import__"):
            assert not given[0].startswith(("os", "torch.cuda", "torch._C")), f"line {node.lineno}"


def literal(node: ast.AST) -> str:
    """A string that is written out, or nothing."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_import_linter_agrees() -> None:
    tool = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if tool is None:
        pytest.skip("lint-imports is not installed")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
