"""Kernels compile for an H200, which needs no GPU: what the interpreter takes, a compiler may refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from phonograph.settings import environment

# Not imported here: other tests say first that its kernels are to be interpreted.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")]

SCRIPT = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, fixed, others, warps = json.loads(sys.argv[1])
function = getattr(importlib.import_module(f"phonograph.engine.{module}"), name)._function
names = function.arg_names
types = {"table_ptr": "*i32", "rows_ptr": "*i64", "positions_ptr": "*i64", "slots_ptr": "*i64", "tiles_ptr": "*i32",
         "arrived_ptr": "*i32", "parts_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
floats = {"eps", "q_eps", "k_eps", "scale", "bend", "softcap"}
def type_of(name):
    if name in fixed: return "constexpr"
    if name.endswith("_ptr"): return others if isinstance(others, str) else (types | others).get(name, "*bf16")
    return "fp32" if name in floats else "i32"
source = ASTSource(
    function, signature={name: type_of(name) for name in names},
    constexprs={(names.index(name),): value for name, value in fixed.items()},
    attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name.endswith("_ptr")},
)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 2})
print(json.dumps({"cubin": len(made.asm["cubin"]), "shared": made.metadata.shared}))
"""

DECODE: dict[str, Any] = {
    "page_size": 16, "group": 4, "group_rows": 4, "head_dim": 128, "dim_columns": 128, "block_m": 16, "block_n": 64,
    "splits": 8, "tiled": False, "windowed": False, "wide": False, "apart": False, "rotating": True, "has_norm": True,
    "softcapped": False, "has_sinks": False, "by_row": True, "overlap": 0,
}  # fmt: skip
TILES = {
    "tiled": True,
    "block_m": 64,
    "splits": 1,
    "apart": True,
    "rotating": False,
    "has_norm": False,
    "by_row": False,
}
BENT = {"softcapped": True, "has_sinks": True, "rotating": False, "has_norm": False}


def compiled(
    module: str, name: str, fixed: dict[str, Any], others: str | dict[str, str] | None = None, warps: int = 4
) -> dict[str, int]:
    """Sizes of what comes out; pointers are of the attention's types but for others, or all of one."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([module, name, fixed, others or {}, warps])]
    done = subprocess.run(
        command, env=environment({"TRITON_INTERPRET": "0"}), capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert found["shared"] <= 227 << 10
    return found


@pytest.mark.parametrize(
    "change", [{}, TILES, BENT, {**TILES, **BENT, "windowed": True}], ids=["decode", "tiles", "bent", "bent-tiles"]
)
def test_attention_compiles(change: dict[str, Any]) -> None:
    assert compiled("ops.attention.kernel", "attend", {**DECODE, **change})["cubin"] > 10_000


@pytest.mark.parametrize("depth", [0, 3, 7])
def test_the_search_for_what_came_before_compiles(depth: int) -> None:
    fixed = {"width": depth + 1, "columns": depth + 1, "depth": depth, "depths": 8, "places": 2048 if depth else 1}
    fixed["overlap"] = 2
    found = compiled("ops.triton.rounds", "_keep_and_continue", fixed, "*i64", warps=8 if depth else 1)
    assert found["cubin"] > 1000


@pytest.mark.parametrize("width", [1, 4, 5])
def test_acceptance_compiles(width: int) -> None:
    fixed = {"none": -3, "no_draft": -4, "has_drafts": width > 1, "width": width, "columns": 8, "block": 32}
    fixed |= {"by_row": width == 1, "overlap": 2}
    assert compiled("ops.triton.rounds", "_accept", fixed, "*i64", warps=1)["cubin"] > 1000


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_products_of_a_few_vectors_compile(gated: bool) -> None:
    fixed = {"tokens": 8, "width": 576, "rows": 4, "block": 1024, "dealt": True, "has_norm": True}
    fixed |= {"has_delta": True, "has_bias": False, "gated": gated, "overlap": 2}
    assert compiled("ops.triton.vector", "_few", fixed, {}, warps=2)["cubin"] > 10_000


def test_the_ends_of_rounds_compile() -> None:
    compiled("ops.triton.rounds", "_spread", {"vocab": 49_152, "width": 4, "block": 256, "overlap": 2}, "*i64")
    compiled(
        "ops.triton.rounds",
        "_keep_drafts",
        {"depth": 3, "found_depth": 3, "has_marks": True, "block": 256, "overlap": 2},
        "*i64",
    )


@pytest.mark.parametrize("by_row", [True, False])
def test_what_is_left_and_taken_compiles(*, by_row: bool) -> None:
    whole = ("rows", "positions", "tokens", "following", "ring", "read_to", "length", "last_token", "starts", "counts")
    types = dict.fromkeys((f"{name}_ptr" for name in whole), "*i64")
    fixed = {"overlap": 2, "places": 32, "width": 576, "columns": 1024}
    compiled("ops.triton.rounds", "_leave", {**fixed, "has_following": not by_row, "by_row": by_row}, types, warps=2)
    compiled("ops.triton.rounds", "_left", fixed, types, warps=2)


def test_what_resumes_overlap_compiles() -> None:
    assert compiled("ops.triton.dependent_launch", "_nothing", {"overlap": 2}, "*fp32", warps=1)["cubin"] > 500


def test_picking_compiles() -> None:
    floats = ("temperature_ptr", "top_p_ptr", "min_p_ptr", "tops_ptr", "masses_ptr")
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("seeds_ptr", "out_ptr"), "*i64")
    types |= dict.fromkeys(("top_k_ptr", "tokens_ptr", "kept_ptr"), "*i32")
    fixed = {"chunks": 128, "kept": 1024, "is_greedy": False, "truncated": True, "precise": True}
    assert compiled("sampling.triton.picking", "settle", fixed, types, warps=16)["cubin"] > 10_000
