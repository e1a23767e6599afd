"""How kernels are launched: with little work of the host, and before their predecessor in the stream has ended.

Programmatic dependent launch is the second.

A kernel launched so calls `wait_for_inputs` in every program before it reads what a predecessor wrote and before it
writes anything. Since each waits for the whole of the one before it, the order of a stream holds through any number
of them. Recorded into a CUDA graph, the launches become programmatic edges.

How early the next kernel may begin is its predecessor's choice. EARLY, as soon as all programs run: its programs take
free places at once, bring their weights closer, and wait. LATE, when the bulk of the work is done: they come into
places that are about to be empty anyway, so that programs with equal shares stay evenly spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

from phonograph.engine.kernels.tuning import Overlap

_ALIGNED = 16
_LARGEST_INT = 2**31 - 1

LINE = tl.constexpr(128)
"""Bytes of a cache line."""
PLAIN, LATE, EARLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Kernel:
    """A kernel that remembers what was compiled for which arguments: `kernel[grid](tensors…, numbers…, name=constant)`.

    Triton finds the compiled kernel by a look at every argument of every launch, which takes several times as long as
    the launch. Here the same is known by what it depends on: types and alignment of the tensors, whether a number is
    1, a multiple of 16 or wide, and the constants. Addresses are passed on as they are, with no question to the driver.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._is_compiled = isinstance(function, JITFunction)  # Triton's interpreter takes tensors only
        self._num_tensors = sum(name.endswith("_ptr") for name in function.arg_names)
        self._found: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if not self._is_compiled:
            self._function[grid](*args, **constants)
            return
        tensors, numbers = args[: self._num_tensors], args[self._num_tensors :]
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (
            tensors[0].device,
            *[tensor.dtype for tensor in tensors],
            *[address % _ALIGNED for address in addresses],
            *[(number == 1) + 2 * (number % _ALIGNED == 0) + 4 * (number > _LARGEST_INT) for number in numbers],
            *constants,
            *constants.values(),
        )
        found = self._found.get(key)
        if found is None:
            compiled = self._function[grid](*args, **constants)
            named = tuple(constants[name] for name in self._function.arg_names[len(args) :])
            self._found[key] = compiled, named
            return
        compiled, named = found
        compiled[(*grid, 1, 1)[:3]](*addresses, *numbers, *named)


def kernel(*, unspecialised: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """`triton.jit` for what the host launches; its tensors come first and are named `…_ptr`.

    It is not compiled anew for what is special about the numbers that are named here.
    """
    return lambda function: Kernel(triton.jit(do_not_specialize=list(unspecialised))(function))


def code(overlap: Overlap) -> int:
    """What a kernel takes as `overlap`."""
    return {"none": 0, "late": 1, "early": 2}[overlap]


def dependent(overlap: Overlap) -> dict[str, bool]:
    """The option of a launch; only NVIDIA's compiler knows it."""
    return {} if overlap == "none" else {"launch_pdl": True}


def ceil_div(number: int, divisor: int) -> int:
    """On the host: Triton's own passes through its compiler's wrapper, which costs as much as an op."""
    return -(-number // divisor)


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
    """Ask for these cache lines to be brought into L2; for weights, which no kernel writes, before the wait."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
