"""Precision: the dtypes that a model computes in, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import torch

from phonograph.engine.checkpoints.base import Checkpoint, MakesModel, TensorInfo
from phonograph.engine.models.value_range import NUM_TOKENS, ValueRange
from phonograph.engine.options import EngineOptions
from phonograph.errors import PlanError

MOST_IN_FLOAT16 = torch.finfo(torch.float16).max / 8
"""The largest value that a start-up pass may find: other texts may lead to larger ones."""


@dataclass(frozen=True)
class Precision:
    """Weights, keys, values and what is projected from them have one dtype, the residual stream may be wider."""

    dtype: torch.dtype
    residual: torch.dtype
    reason: str
    fallback: torch.dtype | None = None
    """The dtype to take instead where a start-up pass finds values too large for `dtype`."""

    def after(self, found: ValueRange) -> Precision:
        """What holds once a start-up pass has shown which values occur."""
        assert self.fallback is not None
        said = f"over {found.num_tokens} tokens the largest value is {found.largest:,.0f} (layer {found.layer})"
        bound = f"an eighth of float16's range, {MOST_IN_FLOAT16:,.0f}"
        if found.largest < MOST_IN_FLOAT16:
            return replace(self, reason=f"{self.reason}; {said}, below {bound}", fallback=None)
        return Precision(self.fallback, self.residual, f"{self.reason}, but {said}, not below {bound}")

    def applied_to(self, options: EngineOptions) -> EngineOptions:
        """The options with both dtypes in words."""
        return replace(options, dtype=self.dtype, residual_dtype=self.residual)

    def __str__(self) -> str:
        residual = "" if self.residual == self.dtype else f" with a {_name(self.residual)} residual stream"
        condition = (
            f"; {_name(self.fallback)} if a start-up pass over {NUM_TOKENS} tokens finds a value of "
            f"{MOST_IN_FLOAT16:,.0f} or more"
            if self.fallback is not None
            else ""
        )
        return f"{_name(self.dtype)}{residual}: {self.reason}{condition}"


def precision_for(checkpoint: Checkpoint, options: EngineOptions, device: torch.device) -> Precision:
    """As the options say; else float32 on a CPU, and elsewhere what the stored weights call for."""
    if options.dtype is not None:
        found = _in(options.dtype, "requested")
    elif device.type == "cpu":
        found = _in(torch.float32, "the default on a CPU")
    else:
        found = _as_stored(checkpoint)
    if isinstance(checkpoint, MakesModel):  # layers of transformers, which define their own residual stream
        found = replace(found, residual=found.dtype, fallback=None)
        if options.residual_dtype not in (None, found.dtype):
            raise PlanError(
                f"residual_dtype {_name(options.residual_dtype)}: layers of transformers keep the residual stream as "
                f"the weights are, in {_name(found.dtype)}. Leave it out, or choose --model-impl native."
            )
    residual = options.residual_dtype or found.residual
    if residual not in (torch.float32, found.dtype):
        raise PlanError(
            f"residual_dtype {_name(residual)} with weights in {_name(found.dtype)}: the residual stream is in float32 "
            "or as the weights are. Leave it out."
        )
    return replace(found, residual=residual)


def _in(dtype: torch.dtype, reason: str, fallback: torch.dtype | None = None) -> Precision:
    # The residual stream grows from layer to layer, beyond float16's range in many models.
    return Precision(dtype, torch.float32 if dtype == torch.float16 else dtype, reason, fallback)


def _as_stored(checkpoint: Checkpoint) -> Precision:
    """By the form that most of the weights have."""
    elements: Counter[tuple[str, torch.dtype, bool]] = Counter()
    for info in checkpoint.names.values():
        elements[info.stored, info.dtype, _is_quantised(info)] += prod(info.shape)
    ((stored, dtype, is_quantised), _), *_ = elements.most_common(1)
    if is_quantised:
        reason = f"most weights are quantised ({stored}), and float16 keeps more of them than bfloat16"
        return Precision(torch.float16, torch.float32, reason, torch.bfloat16)
    if dtype == torch.float16:
        return _in(dtype, f"most weights are stored so ({stored})", torch.bfloat16)
    if dtype == torch.bfloat16:
        return _in(dtype, f"most weights are stored so ({stored})")
    return _in(torch.float32, f"most weights are stored as {stored}")


def _is_quantised(info: TensorInfo) -> bool:
    """Whether the file has fewer bits of a number than torch will."""
    return info.num_bytes < prod(info.shape) * info.dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
