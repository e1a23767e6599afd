"""Made check: what a backend makes of a body gives what the body gives, before it is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.errors import CaptureError
from phonograph.graphs.inputs.tree import leaves
from phonograph.graphs.recording.outputs import is_near
from phonograph.graphs.recording.places import PLAIN

_APART = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.2}
"""How far a compiler that rounds in its own way may be off: root mean square over that of the values."""
_REMEDY = (
    "It takes another branch, as code does that asks torch.compiler.is_compiling() or current().stage, or a fake= is "
    "wrong: compute the same in both, or use backend='breakable', which traces nothing"
)


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its outputs, and the memory that bodies write, each a copy."""

    outputs: Any
    state: Sequence[torch.Tensor]


def refuse_another_result(made: Outcome, body: Outcome, again: Callable[[], Outcome] | None, *, is_exact: bool) -> None:
    """Refuse what gives otherwise than the body; not where the body itself does `again`, as when gaps read a clock."""
    error = _other_result(made, body, is_exact=is_exact)
    if error is not None and (again is None or _other_result(again(), body, is_exact=True) is None):
        raise error


def _other_result(made: Outcome, body: Outcome, *, is_exact: bool) -> CaptureError | None:
    """What is made of a body gives otherwise than the body, on one sample; None where it gives the same."""
    found, wanted = dict(leaves(made.outputs)), dict(leaves(body.outputs))
    if found.keys() != wanted.keys():
        return _error(f"outputs {sorted(map(str, found))} in place of {sorted(map(str, wanted))}")
    pairs = [(f"output {path}" if path else "the output", found[path], wanted[path]) for path in wanted]
    pairs += [
        (f"tensor {at} that it writes", *both) for at, both in enumerate(zip(made.state, body.state, strict=False))
    ]
    for name, one, other in pairs:
        wrong = _wrong(one, other, is_exact=is_exact)
        if wrong:
            return _error(f"{name} {wrong}")
    return None


def _error(what: str) -> CaptureError:
    return CaptureError(f"the traced body gives another result than the body itself: {what}", _REMEDY)


def _wrong(found: Any, wanted: Any, *, is_exact: bool) -> str:
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        is_same = type(found) is type(wanted) and (not isinstance(wanted, PLAIN) or repr(found) == repr(wanted))
        return "" if is_same else f"is {_described(found)}, not {_described(wanted)}"
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"is {_described(found)}, not {_described(wanted)}"
    if is_exact:
        return "" if is_near(found, wanted) else _apart(found, wanted)
    # A rounded sum may pick another token.
    return (
        _apart(found, wanted)
        if wanted.is_floating_point() and _distance(found, wanted) > _APART.get(wanted.dtype, 0.5)
        else ""
    )


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference over that of the values, where both are finite; infinite where NaN is in
    the place of a number, or numbers in the place of nothing but zeros."""
    if bool((found.isnan() & ~wanted.isnan()).any()):
        return math.inf
    both = found.isfinite() & wanted.isfinite()
    one, other = (tensor[both].double() for tensor in (found, wanted))
    if not one.numel():
        return 0.0
    apart, size = (float(values.square().mean().sqrt()) for values in (one - other, other))
    if size:
        return apart / size
    return math.inf if apart > torch.finfo(wanted.dtype).eps else 0.0  # a product that is fused may leave its rounding


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> str:
    differing = (found != wanted) & ~(found.isnan() & wanted.isnan())
    at = differing.nonzero()[0].tolist() if bool(differing.any()) else []
    return f"has {found[tuple(at)].item()} at {at}, where the body has {wanted[tuple(at)].item()}" if at else "differs"


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
