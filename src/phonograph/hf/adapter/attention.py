"""Paged attention for transformers: what models call once `attn_implementation` is "phonograph".

A step travels with the call, as a keyword argument of the forward pass: nothing ambient is needed, and a trace sees it.
Some models hand none down: their attention modules have a place where the step is for as long as the pass runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.ops.attention.prepared import PreparedAttention
from phonograph.engine.ops.layers.reference import store_at
from phonograph.engine.ops.queries import Scores
from phonograph.errors import DeclarationError

NAME = "phonograph"
"""Of the attention implementation."""
STEP = "phonograph_step"
"""The keyword argument of a forward pass that has the step."""


PLACE = "phonograph_place"
"""The attribute of attention modules whose model hands no keyword arguments down."""


class Bending(NamedTuple):
    """What a layer says about its scores."""

    window: int | None
    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None


class Step(Protocol):
    """What an attention layer is answered by."""

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bending: Bending, others: dict[str, Any]
    ) -> torch.Tensor:
        """From q ([1, num_heads, num_tokens, head_dim]), k and v: [1, num_tokens, num_heads, value_dim]."""
        ...


@dataclass
class StepPlace:
    """Where the attention modules of one model find the step."""

    step: Step | None = None

    def give_to(self, model: Any) -> None:
        """Let the model's attention modules look here."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, PLACE, self)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' own attention functions."""
    step: Step | None = kwargs.pop(STEP, None)
    if step is None and hasattr(module, PLACE):
        step = getattr(module, PLACE).step
    if step is None:
        raise DeclarationError(
            f"{type(module).__name__} attends with attn_implementation={NAME!r}, and no step of an engine runs. "
            "Choose another implementation: model.set_attn_implementation('sdpa')."
        )
    bending = Bending(
        kwargs.pop("sliding_window", None), scaling, kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    )
    return step.attend(module, query, key, value, bending, {**kwargs, "attention_mask": attention_mask}), None


def run(decoder: Any, step: Step, place: StepPlace | None, **inputs: torch.Tensor) -> torch.Tensor:
    """Hidden states of a pass whose layers attend by this step."""
    if place is None:
        states: torch.Tensor = decoder(**inputs, use_cache=False, **{STEP: step})[0]
        return states
    place.step = step
    try:
        states = decoder(**inputs, use_cache=False)[0]
    finally:
        place.step = None
    return states


def register() -> None:
    """Make the attention known to transformers. It has no mask function, so that no mask is made."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class PagedStep:
    """Writes keys and values into the pages of their tokens, and attends to what is there."""

    attention: PreparedAttention
    cache: CacheGroup
    slots: torch.Tensor  # [num_tokens]

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bending: Bending, others: dict[str, Any]
    ) -> torch.Tensor:
        layer: int = module.layer_idx
        pages, index = self.cache.places[layer]
        width, value_dim = pages.keys.shape[-1], v.shape[-1]
        scores = scores_of(bending, q.shape[-1], width)
        q, k, v = (_by_token(one, width, pages.keys.dtype) for one in (q, k, v))
        store_at(pages, index, self.slots, k, v)
        mixed = self.attention.attend(layer, q, bending.window, None, scores)
        return (mixed if value_dim == width else mixed[..., :value_dim])[None]


def scores_of(bending: Bending, head_dim: int, width: int) -> Scores:
    """As our attention takes them: what is the default of heads as wide as pages is left out."""
    scale = head_dim**-0.5 if bending.scaling is None else bending.scaling
    return Scores(None if scale == width**-0.5 else scale, bending.softcap, bending.sinks)


def _by_token(heads: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_tokens, num_heads, width] of [1, num_heads, num_tokens, head_dim]; what is missing at the end is zero."""
    found = heads[0].transpose(0, 1)
    found = found if found.dtype == dtype else found.to(dtype)
    if found.shape[-1] < width:
        return functional.pad(found, (0, width - found.shape[-1]))
    return found if found.stride(-1) == 1 else found.contiguous()
