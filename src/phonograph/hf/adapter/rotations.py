"""Rotations of adapted models: rotary positions of queries and keys as one launch, where a trial gives the same bits.

Attention modules of transformers call a function of their file, `apply_rotary_pos_emb`: ten small kernels. What is
global there is every model's in the process, so it stays. A twin of the module runs the same code, as a function of its
own whose globals are a copy with ours in that place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from phonograph.engine.ops.rotation import RotatesHalves
from phonograph.hf.adapter.sentences import first_line, passes_on
from phonograph.hf.adapter.trial_rows import DTYPES, apart
from phonograph.hf.adapter.twins import Fused, form, reached, twin_of

_NAME = "apply_rotary_pos_emb"
_SIZES = ((1, 4, 2), (7, 3, 1), (4, 33, 8), (12, 8, 8))
"""Tokens, and heads of queries and keys, of trials."""
_SCALES = (1.0, 1e-3, 1e3, 1e-7)
"""Of the tokens in turn."""


@torch.inference_mode()
def fused_rotations(layers: Any, kernels: RotatesHalves) -> Fused:
    """Try the rotation of every attention module that has one of this name; none of them is changed."""
    first = next(layers.parameters())
    trials, fused = _Trials(kernels, first.dtype, first.device), dict[int, Any]()
    told = dict[tuple[str, int, str], int]()
    for _, module in reached(layers):
        head_dim, function = getattr(module, "head_dim", None), _rotation_of(module)
        if function is None or not isinstance(head_dim, int):
            continue
        why = trials.why_not(function, head_dim)
        if why is None:
            fused[id(module)] = _with_rotation(module, trials.rotating(function, head_dim))
        name = type(module).__name__, head_dim, why or ""
        told[name] = told.get(name, 0) + 1
    dtype = str(first.dtype).removeprefix("torch.")
    return Fused(twin_of(layers, fused), tuple(_said(count, dtype, *name) for name, count in told.items()))


def _said(count: int, dtype: str, name: str, head_dim: int, why: str) -> str:
    if why:
        return f"rotation of {count} {name} in transformers' own ops: {why}"
    return (
        f"rotation of {count} {name} as one launch each, where heads and angles are {head_dim} wide and in {dtype}: "
        "in trials it has the bits of transformers' own"
    )


def _rotation_of(module: Any) -> FunctionType | None:
    """What its `forward` calls by the name, where both are plain functions."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or "forward" in vars(module) or _NAME not in forward.__code__.co_names:
        return None
    found = forward.__globals__.get(_NAME)
    return found if isinstance(found, FunctionType) else None


class _Trials:
    """Tries each function once for a width of heads."""

    def __init__(self, kernels: RotatesHalves, dtype: torch.dtype, device: torch.device) -> None:
        self._kernels, self._dtype, self._device = kernels, dtype, device
        self._why: dict[tuple[FunctionType, int], str | None] = {}
        self._made: dict[tuple[FunctionType, int], Callable[..., Any]] = {}

    def why_not(self, function: FunctionType, head_dim: int) -> str | None:
        """None where every trial gave the same bits."""
        key = function, head_dim
        if key not in self._why:
            try:
                self._why[key] = self._tried(function, head_dim)
            except Exception as error:
                if passes_on(error):
                    raise
                self._why[key] = f"a trial raised {type(error).__name__} ({first_line(error)})"
        return self._why[key]

    def _tried(self, function: FunctionType, head_dim: int) -> str | None:
        if self._dtype not in DTYPES:
            return f"weights in {self._dtype}"
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self._device, self._dtype)

        for num_tokens, *counts in _SIZES:
            scales = torch.tensor(_SCALES)[torch.arange(num_tokens) % len(_SCALES), None, None].to(self._device)
            q, k = ((drawn(1, num_tokens, count, head_dim) * scales).to(self._dtype) for count in counts)
            cos, sin = drawn(1, num_tokens, head_dim), drawn(1, num_tokens, head_dim)
            q[0, 0, 0, 0], k[0, -1, -1, -1], q[0, -1, -1, -1] = torch.inf, torch.nan, torch.finfo(self._dtype).max
            q[0, 0, 1], k[0, 0, 0], sin[0, -1] = 0.0, -0.0, 0.0
            for heads in ((q.transpose(1, 2), k.transpose(1, 2)), (_by_head(q), _by_head(k))):
                if not self._has_its_bits(function, (*heads, cos, sin)):
                    return "our kernel has other bits in trials"
        return None

    def _has_its_bits(self, function: FunctionType, given: tuple[torch.Tensor, ...]) -> bool:
        kept = [one.clone() for one in given]
        wanted, found = function(*given), self._kernels.rotate_halves(*given)
        is_written = any(
            not torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)) for a, b in zip(given, kept, strict=True)
        )
        if is_written or found is None or not isinstance(wanted, tuple) or len(wanted) != 2:
            return False
        pairs = list(zip(found, wanted, strict=True))
        if any(not isinstance(own, torch.Tensor) or form(ours) != form(own) for ours, own in pairs):
            return False
        return all(_has_bits(ours, own) for ours, own in pairs)

    def rotating(self, function: FunctionType, head_dim: int) -> Callable[..., Any]:
        """The function, in one launch for what was tried."""
        key = function, head_dim
        if key not in self._made:
            self._made[key] = _rotating(function, head_dim, self._dtype, self._kernels)
        return self._made[key]


def _has_bits(ours: torch.Tensor, own: torch.Tensor) -> bool:
    """Signs of zeros too; what is not a number has no bits that count."""
    found, numbers = apart(ours, own), ~own.isnan()
    return found.is_rounding and found.moved == 0 and torch.equal(ours.signbit() & numbers, own.signbit() & numbers)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def _rotating(function: FunctionType, head_dim: int, dtype: torch.dtype, kernels: RotatesHalves) -> Callable[..., Any]:
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and all(type(one) is torch.Tensor for one in args):
            q = args[0]
            is_tried = q.dtype == dtype and q.shape[-1] == head_dim and not any(one.requires_grad for one in args)
            found = kernels.rotate_halves(*args) if is_tried else None
            if found is not None:
                return found
        return function(*args, **kwargs)

    return apply_rotary_pos_emb


def _with_rotation(module: Any, rotation: Callable[..., Any]) -> Any:
    """A copy whose `forward` is the same code with another global."""
    twin, own = copy.copy(module), type(module).forward
    forward = FunctionType(
        own.__code__, {**own.__globals__, _NAME: rotation}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    twin.forward = MethodType(forward, twin)
    return twin
