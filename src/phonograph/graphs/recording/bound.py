"""Bound: a body on the buffers' views, what is current while it runs, and the sample that was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    @property
    def others(self) -> list[Any]:
        """The body's arguments, without the batch itself, which is new for every call."""
        return [*fields_of(self.now.batch), *self.kwargs.values()]
