"""Programmatic dependent launch: a kernel that may begin before its predecessor in the stream has ended.

A kernel launched so calls `wait_for_inputs` in every program before it reads what a predecessor wrote and before it
writes anything. Since each waits for the whole of the one before it, the order of a stream holds through any number
of them. Recorded into a CUDA graph, the launches become programmatic edges.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

LINE = tl.constexpr(128)
"""Bytes of a cache line."""


@triton.jit
def begin_dependents(pdl: tl.constexpr):
    """Let the next kernel of the stream take the places that this one leaves."""
    if pdl:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(pdl: tl.constexpr):
    """Wait until all that earlier kernels wrote can be seen."""
    if pdl:
        cuda.gdc_wait()


@triton.jit
def prefetch(pointers, mask):
    """Ask for these cache lines to be brought into L2; for weights, which no kernel writes, before the wait."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
