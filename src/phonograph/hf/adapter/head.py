"""Head of adapted models: the model's own way from hidden states to logits, soft caps and scalings included."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass
class Decoded(ModelOutput):  # type: ignore[misc]
    """What any model's head looks for in what its layers gave."""

    last_hidden_state: Any = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    router_logits: Any = None
    shared_kv_states: Any = None


class GivenStates(torch.nn.Module):
    """Replaces the layers, and returns the states that the forward pass was called with."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> Decoded:
        return Decoded(last_hidden_state=inputs_embeds)


def head_of(model: Any, decoder: str) -> Any:
    """The model without its layers; weights are shared, and the model itself is unchanged."""
    first, _, rest = decoder.partition(".")
    twin = copy.copy(model)
    inner = GivenStates() if not rest else head_of(model.get_submodule(first), rest)
    twin._modules = {**model._modules, first: inner}
    return twin


def logits_of(head: Any, states: torch.Tensor) -> torch.Tensor:
    """Of some rows."""
    found: torch.Tensor = head(inputs_embeds=states[None], use_cache=False)[0]
    return found[0]
