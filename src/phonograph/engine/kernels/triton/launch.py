"""Programmatic dependent launch: a kernel that may begin before its predecessor in the stream has ended.

A kernel launched so calls `wait_for_inputs` in every program before it reads what a predecessor wrote and before it
writes anything. Since each waits for the whole of the one before it, the order of a stream holds through any number
of them. Recorded into a CUDA graph, the launches become programmatic edges.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


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
