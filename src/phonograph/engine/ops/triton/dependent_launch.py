"""Programmatic dependent launch: a kernel that may begin before its predecessor in the stream has ended.

A kernel launched so calls `wait_for_inputs` in every program before it reads what a predecessor wrote and before it
writes anything. Since each waits for the whole of the one before it, the order of a stream holds through any number
of them. Recorded into a CUDA graph, the launches become programmatic edges.

How early the next kernel may begin is its predecessor's choice. EARLY, as soon as all programs run: its programs take
free places at once, bring their weights closer, and wait. LATE, when the bulk of the work is done: they come into
places that are about to be empty anyway, so that programs with equal shares stay evenly spread.

An H200 keeps a state besides: after a few ordinary launches, all launches of a graph follow each other 0.3 µs later,
overlapping or not, until some kernels are launched as dependents, outside of a graph (decision 0136).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.tuning import Overlap

LINE = tl.constexpr(128)
"""Bytes of a cache line."""
PLAIN, LATE, EARLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ENOUGH = 8
"""Launches that bring the state back, as measured; fewer may."""


def code(overlap: Overlap) -> int:
    """What a kernel takes as `overlap`."""
    return {"none": 0, "late": 1, "early": 2}[overlap]


def dependent(overlap: Overlap) -> dict[str, bool]:
    """The option of a launch; only NVIDIA's compiler knows it."""
    return {} if overlap == "none" else {"launch_pdl": True}


@triton.jit
def begin(overlap: tl.constexpr):
    """At the start of a program: let the next kernel begin, if it may so early."""
    if overlap == EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def nearly_done(overlap: tl.constexpr):
    """After the bulk of a program's work: let the next kernel begin."""
    if overlap == LATE:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(overlap: tl.constexpr):
    """Wait until all that earlier kernels wrote can be seen."""
    if overlap != PLAIN:
        cuda.gdc_wait()


@triton.jit
def prefetch(pointers, mask):
    """Prefetch these cache lines into L2; for weights, which no kernel writes, before the wait."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@kernel()
def _nothing(any_ptr, overlap: tl.constexpr):
    """Begins early and ends."""
    begin(overlap)
    wait_for_inputs(overlap)


def resume(anything: torch.Tensor, overlap: Overlap) -> None:
    """Launch some kernels as dependents, on the device of a tensor."""
    if overlap != "none":
        for _ in range(_ENOUGH):
            _nothing[(1,)](anything, overlap=code(overlap), num_warps=1, **dependent(overlap))
