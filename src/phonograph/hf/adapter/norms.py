"""Norms of adapted models: modules that are proven to be plain root-mean-square norms, as one launch each.

In transformers such a norm is eight small kernels, and a decode step of some layers is hundreds of norms. Names prove
nothing: each module is tried on rows of all sizes against its own `forward`, and what differs by more than rounding
stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from phonograph.engine.ops.row_norm import NormsRows, RowNorm, norm_rows
from phonograph.hf.adapter.sentences import first_line, passes_on
from phonograph.hf.adapter.trial_rows import DTYPES, NOTHING, UNLIKE, Apart, added, apart, layouts, trial_rows
from phonograph.hf.adapter.twins import Fused, form, reached, twin_of

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""What families call it."""
_KINDS = ((False, True), (False, False), (True, False), (True, True))
"""(adds_one, rounds_first): Llama's, OLMo 2's, Gemma's, and one that nobody has yet."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_UNLIKE = "our kernel differs by more than rounding"


@torch.inference_mode()
def fused_norms(layers: Any, kernels: NormsRows) -> Fused:
    """Try every module of the tree that may be a norm; none of them is changed."""
    trials, fused = _Trials(kernels), dict[int, Any]()
    told = dict[tuple[str, str], list[Apart]]()  # by class, and the reason why it stays as it is
    for _, module in reached(layers):
        eps = _eps_of(module)
        if eps is None:
            continue
        verdict = trials.verdict(module, eps)
        if verdict.norm is not None:
            fused[id(module)] = _fused(module, verdict.norm, kernels)
        told.setdefault((type(module).__name__, verdict.why), []).append(verdict.worst)
    notes = tuple(_said(name, why, found) for (name, why), found in told.items())
    return Fused(twin_of(layers, fused), notes)


def _said(name: str, why: str, found: Sequence[Apart]) -> str:
    if why:
        return f"{len(found)} {name} in transformers' own ops: {why}"
    return f"{len(found)} {name} as one launch each: in trials against the modules' own, {added(found)}"


def _eps_of(module: Any) -> float | None:
    """Of a module that may be a norm: it has nothing but a vector of weights, and a small number. None for others.

    Those of torch are one launch already.
    """
    held = [name for name, one in (*module._parameters.items(), *module._buffers.items()) if one is not None]
    is_leaf = all(one is None for one in module._modules.values())
    if held != ["weight"] or not is_leaf or type(module).__module__.split(".")[0] == "torch":
        return None
    found = {one for name in _EPS if isinstance(one := getattr(module, name, None), float) and 0 <= one < 1}
    return found.pop() if module.weight.ndim == 1 and len(found) == 1 else None


@dataclass(frozen=True)
class _Verdict:
    """Of norms that only their weights tell apart, or of one of them."""

    norm: RowNorm | None
    """None where they stay as they are."""
    why: str = ""
    """They stay so."""
    worst: Apart = NOTHING


class _Trials:
    """Tries each kind of norm with random weights, and each norm with its own."""

    def __init__(self, kernels: NormsRows) -> None:
        self._kernels = kernels
        self._verdicts: dict[Any, _Verdict] = {}
        self._rows: dict[Any, torch.Tensor] = {}

    def verdict(self, module: Any, eps: float) -> _Verdict:
        key = _key(module)
        try:
            if key not in self._verdicts:
                self._verdicts[key] = self._of_kind(module, eps)
                self._rows[key] = trial_rows(module.weight, eps, per_kind=1)
            found = self._verdicts[key]
            if found.norm is None:
                return found
            self._verdicts[key] = replace(found, worst=NOTHING)  # it is told with the first of a kind
            return self._of_one(module, found.norm, found.worst, self._rows[key])
        except Exception as error:
            if passes_on(error):
                raise
            return _Verdict(None, f"a trial raised {type(error).__name__} ({first_line(error)})")

    def _of_kind(self, module: Any, eps: float) -> _Verdict:
        """By random weights, on rows of all sizes, in the layouts that models have."""
        weight = module.weight
        if "forward" in vars(module):
            return _Verdict(None, "forward is not that of the class")
        if any(getattr(module, name, None) for name in _HOOKS):
            return _Verdict(None, "hooks")
        if weight.dtype not in DTYPES:
            return _Verdict(None, f"weights in {weight.dtype}")
        twin, rows = _with_random_weight(module), trial_rows(weight, eps)
        before = _attributes(twin)
        # In torch's ops, so that no kernel is compiled for what a module is not.
        kinds = (RowNorm(eps, *kind) for kind in _KINDS)
        norm = next((one for one in kinds if _compared(twin, rows, partial(norm_rows, norm=one)).is_rounding), None)
        if norm is None:
            return _Verdict(None, "on trial rows no plain root-mean-square norm")
        found = added([_compared(twin, one, partial(self._kernels.norm_rows, norm=norm)) for one in layouts(rows)])
        if _attributes(twin) != before:
            return _Verdict(None, "state of its own")
        return _Verdict(norm, "", found) if found.is_rounding else _Verdict(None, _UNLIKE)

    def _of_one(self, module: Any, norm: RowNorm, worst: Apart, rows: torch.Tensor) -> _Verdict:
        found = _compared(module, rows, partial(self._kernels.norm_rows, norm=norm))
        return _Verdict(norm, "", added([worst, found])) if found.is_rounding else _Verdict(None, _UNLIKE)


def _key(module: Any) -> Any:
    """All that a norm may compute by, but the values of its weight."""
    weight = module.weight
    hooks = tuple(bool(getattr(module, name, None)) for name in _HOOKS)
    return type(module), weight.shape, weight.stride(), weight.dtype, weight.device, hooks, _attributes(module)


def _attributes(module: Any) -> tuple[tuple[str, Any], ...]:
    """Its own, by value where they are plain and by identity where they are not."""
    usual = vars(torch.nn.Module()).keys() - {"training"}
    return tuple(
        (name, (type(value), value if isinstance(value, bool | int | float | str | None) else id(value)))
        for name, value in sorted(vars(module).items())
        if name not in usual
    )


def _with_random_weight(module: Any) -> Any:
    """A copy, so that the model's own is not touched."""
    weight, twin = module.weight, copy.copy(module)
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    twin._parameters = {"weight": torch.nn.Parameter(drawn.to(weight), requires_grad=False)}
    return twin


def _compared(
    module: Any, rows: torch.Tensor, other: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
) -> Apart:
    """What the module gives, and what `other` gives of rows and weight."""
    kept = rows.clone()
    wanted = module(rows)
    is_written = not torch.equal(rows.nan_to_num(0.5), kept.nan_to_num(0.5))
    found = other(rows, module.weight)
    if is_written or found is None or not isinstance(wanted, torch.Tensor):
        return UNLIKE
    return apart(found, wanted) if form(found) == form(wanted) else UNLIKE


def _fused(module: Any, norm: RowNorm, kernels: NormsRows) -> Any:
    """A copy that computes in one launch what was tried, and anything else as the module does."""
    twin, own = copy.copy(module), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x, weight = args[0], twin.weight
            is_plain = type(x) is torch.Tensor and x.dtype == weight.dtype and x.device == weight.device
            found = kernels.norm_rows(x, weight, norm) if is_plain and not x.requires_grad else None
            if found is not None:
                return found
        return own(*args, **kwargs)

    twin.forward = forward
    return twin
