"""Bound: a body on the buffers' views, what is current while it runs, and the sample that was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from phonograph.graphs.inputs.fields import fields_of
from phonograph.graphs.phases.context import Current


@dataclass(frozen=True)
class Bound:
    """A body that can be run."""

    body: Callable[[], Any]
    now: Current
    batch: Any
    """The sample's."""
    inputs: dict[str, torch.Tensor]
    """What was loaded for each slot that the batch fills."""
    kwargs: Mapping[str, Any]
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """In a trial, the state that live rows may read, where the phase says which that is."""

    @property
    def others(self) -> list[Any]:
        """The body's arguments, without the batch itself, which is new for every call."""
        return [*fields_of(self.now.batch), *self.kwargs.values()]


def named_state(preserved: Any) -> dict[str, torch.Tensor]:
    """What a phase's `preserve` yields: tensors by name, several, or nothing."""
    if preserved is None:
        return {}
    if isinstance(preserved, Mapping):
        return dict(preserved)
    return {f"state[{index}]": tensor for index, tensor in enumerate(preserved)}
