"""Rotations of adapted models: rotary positions of queries and keys as one launch, where a trial gives the same bits.

Attention modules of transformers call a function of their file, `apply_rotary_pos_emb`: ten small kernels. What is
global there is every model's in the process, so it stays. A twin of the module runs the same code, as a function of its
own whose globals are a copy with ours in that place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from phonograph.engine.ops.rotation import RotatesHalves, rotate_halves
from phonograph.hf.adapter.sentences import first_line, passes_on
from phonograph.hf.adapter.trial_heads import Heads, TrialHeads, head_counts
from phonograph.hf.adapter.trial_rows import DTYPES
from phonograph.hf.adapter.twins import Fused, form, reached, twin_of

_NAME = "apply_rotary_pos_emb"


@torch.inference_mode()
def fused_rotations(layers: Any, kernels: RotatesHalves) -> Fused:
    """Try the rotation of every attention module that has one of this name; none of them is changed."""
    first = next(layers.parameters())
    draws = TrialHeads(first.dtype, first.device, _factors(layers))
    trials, fused = _Trials(kernels, draws), dict[int, Any]()
    told = dict[tuple[str, int, str], int]()
    for _, module in reached(layers):
        head_dim, function = getattr(module, "head_dim", None), _rotation_of(module)
        if function is None or not isinstance(head_dim, int):
            continue
        kind = _Kind(function, head_dim, head_counts(module))
        why = trials.why_not(kind)
        if why is None:
            fused[id(module)] = _with_rotation(module, trials.rotating(kind))
        name = type(module).__name__, head_dim, why or ""
        told[name] = told.get(name, 0) + 1
    dtype = str(first.dtype).removeprefix("torch.")
    return Fused(twin_of(layers, fused), tuple(_said(count, dtype, *name) for name, count in told.items()))


def _factors(layers: Any) -> tuple[float, ...]:
    """Of the angles' size, as modules that make them have it."""
    found = (getattr(one, "attention_scaling", None) for one in layers.modules())
    return tuple(sorted({one for one in found if isinstance(one, float)}))


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


@dataclass(frozen=True)
class _Kind:
    """All that a rotation is tried for."""

    function: FunctionType
    head_dim: int
    counts: frozenset[tuple[int, int]]
    """Heads of queries and keys that a module may have."""


class _Trials:
    """Tries each kind once."""

    def __init__(self, kernels: RotatesHalves, draws: TrialHeads) -> None:
        self._kernels, self._draws = kernels, draws
        self._why: dict[_Kind, str | None] = {}
        self._made: dict[_Kind, Callable[..., Any]] = {}

    def why_not(self, kind: _Kind) -> str | None:
        """None where every trial gave the same bits."""
        if kind not in self._why:
            try:
                self._why[kind] = self._tried(kind)
            except Exception as error:
                if passes_on(error):
                    raise
                self._why[kind] = f"a trial raised {type(error).__name__} ({first_line(error)})"
        return self._why[kind]

    def _tried(self, kind: _Kind) -> str | None:
        if self._draws.dtype not in DTYPES:
            return f"weights in {self._draws.dtype}"
        if not kind.counts:
            return "nothing says how many heads it has"
        # In torch's ops first: no kernel is compiled for what a function is not, and long trials are cheap.
        for counts in sorted(kind.counts):
            if any(
                not _has_its_bits(kind.function, rotate_halves, one) for one in self._draws.all(counts, kind.head_dim)
            ):
                return "in trials no plain rotation of halves"
        for counts in sorted(kind.counts):
            rotate = self._kernels.rotate_halves
            if any(not _has_its_bits(kind.function, rotate, one) for one in self._draws.few(counts, kind.head_dim)):
                return "our kernel has other bits in trials"
        return None

    def rotating(self, kind: _Kind) -> Callable[..., Any]:
        """The function, in one launch for what was tried."""
        if kind not in self._made:
            self._made[kind] = _rotating(kind, self._draws.dtype, self._kernels)
        return self._made[kind]


def _has_its_bits(function: FunctionType, other: Callable[..., Any], given: Heads) -> bool:
    kept = [one.clone() for one in given]
    wanted, found = function(*given), other(*given)
    is_written = any(not _has_bits(a, b) for a, b in zip(given, kept, strict=True))
    if is_written or found is None or not isinstance(wanted, tuple) or len(wanted) != 2:
        return False
    pairs = list(zip(found, wanted, strict=True))
    if any(not isinstance(own, torch.Tensor) or form(ours) != form(own) for ours, own in pairs):
        return False
    return all(_has_bits(ours, own) for ours, own in pairs)


def _has_bits(ours: torch.Tensor, own: torch.Tensor) -> bool:
    """Signs of zeros too; what is not a number has no bits that count."""
    same = (ours == own) & (ours.signbit() == own.signbit())
    return bool((same | (ours.isnan() & own.isnan())).all())


def _rotating(kind: _Kind, dtype: torch.dtype, kernels: RotatesHalves) -> Callable[..., Any]:
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and all(type(one) is torch.Tensor for one in args):
            q, k = args[:2]
            is_tried = q.dtype == dtype and q.ndim == k.ndim == 4 and q.shape[-1] == kind.head_dim
            is_tried = is_tried and (q.shape[1], k.shape[1]) in kind.counts
            is_tried = is_tried and not any(one.requires_grad for one in args)
            found = kernels.rotate_halves(*args) if is_tried else None
            if found is not None:
                return found
        return kind.function(*args, **kwargs)

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
