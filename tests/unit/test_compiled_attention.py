"""The attention kernel compiles for an H200, which needs no GPU: what the interpreter takes, a compiler may refuse."""

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
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from phonograph.engine.ops.attention.kernel import attend

function = attend._function
names = function.arg_names
fixed = json.loads(sys.argv[1])
types = {"table_ptr": "*i32", "rows_ptr": "*i64", "positions_ptr": "*i64", "slots_ptr": "*i64", "tiles_ptr": "*i32",
         "arrived_ptr": "*i32", "parts_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
floats = {"q_eps", "k_eps", "scale", "bend", "softcap"}
def type_of(name):
    if name in fixed: return "constexpr"
    if name.endswith("_ptr"): return types.get(name, "*bf16")
    return "fp32" if name in floats else "i32"
source = ASTSource(
    function, signature={name: type_of(name) for name in names},
    constexprs={(names.index(name),): value for name, value in fixed.items()},
    attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name.endswith("_ptr")},
)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
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


@pytest.mark.parametrize(
    "change", [{}, TILES, BENT, {**TILES, **BENT, "windowed": True}], ids=["decode", "tiles", "bent", "bent-tiles"]
)
def test_the_kernel_compiles_for_an_h200(change: dict[str, Any]) -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps({**DECODE, **change})]
    done = subprocess.run(
        command, env=environment({"TRITON_INTERPRET": "0"}), capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cubin"] > 10_000
    assert found["shared"] <= 227 << 10
