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
from itertools import chain
from typing import Any

import torch

from phonograph.engine.ops.row_norm import NormsRows, RowNorm, norm_rows
from phonograph.hf.adapter.module_state import OpaqueStateError, bits_of, copied, state_of
from phonograph.hf.adapter.sentences import first_line, passes_on
from phonograph.hf.adapter.trial_rows import (
    DTYPES,
    NOTHING,
    UNLIKE,
    Apart,
    added,
    apart,
    beside_outliers,
    every_column,
    ladder,
    largest_columns,
    layouts,
    many_tokens,
    trial_rows,
)
from phonograph.hf.adapter.twins import Fused, form, reached, twin_of

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""What families call it."""
_KINDS = ((False, True), (False, False), (True, False), (True, True))
"""(adds_one, rounds_first): Llama's, OLMo 2's, Gemma's, and one that nobody has yet."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_UNLIKE, _STATE = "our kernel differs by more than rounding", "state of its own"

_Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Of rows and a weight; None for what it does not know."""


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
            fused[id(module)] = _fused(module, partial(kernels.norm_rows, norm=verdict.norm))
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
    """Tries each kind of norm with random weights, and each norm with its own. All trials are of copies."""

    def __init__(self, kernels: NormsRows) -> None:
        self._kernels = kernels
        self._verdicts: dict[Any, _Verdict] = {}
        self._rows: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def verdict(self, module: Any, eps: float) -> _Verdict:
        return _said_of(partial(self._verdict, module, eps))

    def _verdict(self, module: Any, eps: float) -> _Verdict:
        key = _key(module)
        if key not in self._verdicts:
            self._verdicts[key] = _said_of(partial(self._of_kind, module, eps))
        found = self._verdicts[key]
        if found.norm is None:
            return found
        if key not in self._rows:
            self._rows[key] = trial_rows(module.weight, eps, per_kind=1), beside_outliers(module.weight)
        self._verdicts[key] = replace(found, worst=NOTHING)  # it is told with the first of a kind
        return self._of_one(module, found.norm, found.worst, *self._rows[key])

    def _of_kind(self, module: Any, eps: float) -> _Verdict:
        """By random weights, on rows of all sizes, in the layouts that models have."""
        weight, why = module.weight, _why_no_trial(module)
        if why is not None:
            return _Verdict(None, why)
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)
        own, rows = copied(module, drawn), trial_rows(weight, eps)

        def held() -> Any:
            return state_of(own), bits_of(own.weight)

        before = held()
        # In torch's ops first, so that no kernel is compiled for what a module is not.
        plain = [partial(norm_rows, norm=RowNorm(eps, *kind)) for kind in _KINDS]
        kind = next((one for one in plain if _compared(own, one, rows).is_rounding), None)
        found = NOTHING if kind is None else _tried(own, kind, rows)
        if held() != before:
            return _Verdict(None, _STATE)
        if kind is None or not found.is_rounding:
            return _Verdict(None, "on trial rows no plain root-mean-square norm")
        norm: RowNorm = kind.keywords["norm"]
        found = _tried(own, self._launching(norm), rows)
        return _Verdict(norm, "", found) if found.is_rounding else _Verdict(None, _UNLIKE)

    def _of_one(self, module: Any, norm: RowNorm, worst: Apart, rows: torch.Tensor, beside: torch.Tensor) -> _Verdict:
        own, before = copied(module), state_of(module)
        outliers = largest_columns(beside, module.weight.float() + norm.adds_one)
        found = _compared(own, self._launching(norm), torch.cat([rows, outliers]))
        if state_of(own) != before:
            return _Verdict(None, _STATE)
        return _Verdict(norm, "", added([worst, found])) if found.is_rounding else _Verdict(None, _UNLIKE)

    def _launching(self, norm: RowNorm) -> _Launch:
        """In trials a launch that is declined is none."""

        def launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            found = self._kernels.norm_rows(x, weight, norm)
            if found is None:
                raise ValueError(f"our kernel takes no rows of {x.shape[-1]} laid out so")
            return found

        return launch


def _said_of(trial: Callable[[], _Verdict]) -> _Verdict:
    try:
        return trial()
    except OpaqueStateError as error:
        return _Verdict(None, str(error))
    except Exception as error:
        if passes_on(error):
            raise
        return _Verdict(None, f"a trial raised {type(error).__name__} ({first_line(error)})")


def _why_no_trial(module: Any) -> str | None:
    """What shows without one."""
    usual, class_ = torch.nn.Module, type(module)
    if "forward" in vars(module):
        return "forward is not that of the class"
    if class_.__call__ is not usual.__call__ or class_._call_impl is not usual._call_impl:
        return "__call__ is not that of torch.nn.Module"  # it may do something around forward, which alone is replaced
    if any(getattr(module, name, None) for name in _HOOKS):
        return "hooks"
    if module.weight.dtype not in DTYPES:
        return f"weights in {module.weight.dtype}"
    return None


def _key(module: Any) -> Any:
    """All that a norm may compute by, but the values of its weight."""
    weight = module.weight
    hooks = tuple(bool(getattr(module, name, None)) for name in _HOOKS)
    has_forward = "forward" in vars(module)
    state = None if has_forward else state_of(module)
    return type(module), weight.shape, weight.stride(), weight.dtype, weight.device, hooks, has_forward, state


def _tried(own: Any, launch: _Launch, rows: torch.Tensor) -> Apart:
    """In all layouts, in rows of all sizes, and with outliers everywhere; up to the first that is not rounding."""
    found, weight = list[Apart](), own.weight
    for one in chain(layouts(rows), (ladder(weight), many_tokens(rows)), every_column(weight)):
        found.append(_compared(own, launch, one))
        if not found[-1].is_rounding:
            break
    return added(found)


def _compared(own: Any, launch: _Launch, rows: torch.Tensor) -> Apart:
    """What a module gives, and what its twin gives, each called as a model calls it."""
    kept = rows.clone()
    wanted = own(rows)
    is_written = not torch.equal(rows.nan_to_num(0.5), kept.nan_to_num(0.5))
    found = _fused(own, launch)(rows)
    if is_written or not isinstance(wanted, torch.Tensor):
        return UNLIKE
    return apart(found, wanted) if form(found) == form(wanted) else UNLIKE


def _fused(module: Any, launch: _Launch) -> Any:
    """A copy that computes in one launch what was tried, and anything else as the module does."""
    twin, own = copy.copy(module), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x, weight = args[0], twin.weight
            is_plain = type(x) is torch.Tensor and x.dtype == weight.dtype and x.device == weight.device
            found = launch(x, weight) if is_plain and not x.requires_grad else None
            if found is not None:
                return found
        return own(*args, **kwargs)

    twin.forward = forward
    return twin
