"""Eager pass: the body on a batch that no recording serves, through the same registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.registry import LoadMode, Registry
from phonograph.graphs.inputs.tree import Keep, TreePath, is_object, leaves
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.recording.outputs import OutputBuffers
from phonograph.graphs.recording.written_inputs import EagerWrites


@dataclass(frozen=True)
class EagerOptions:
    """How a runner's eager passes run."""

    backend: str
    copies: bool
    """Whether inputs are copied into buffers."""


def eager_pass(
    phase: Phase, registry: Registry, batch: Any, kwargs: Mapping[str, Any], used: dict[str, int], options: EagerOptions
) -> Any:
    """Run body and tail on an unpadded batch; inputs that the body wrote are copied back to the caller."""
    extent = Extent(used, used)
    mode = LoadMode.EAGER if options.copies else LoadMode.NO_COPY
    view = registry.load(batch, extent, mode=mode, kwargs=kwargs, without=phase.eager_without)
    if phase.host_plan is not None:
        phase.host_plan(view.batch, extent)
    given = phase.inputs(batch, kwargs, phase.eager_without)
    views = phase.inputs(view.batch, view.kwargs, phase.eager_without)
    copied = {name: (value, views[name]) for name, value in given.items() if views[name] is not value}
    writes = EagerWrites(copied, phase.name)
    with entering(Current(phase.name, options.backend, Stage.EAGER, view.batch)):
        result = phase.forward(view.batch, view.kwargs)
        writes.write_back()
        if phase.tail is not None and not phase.tail_captured:
            result = phase.tail(result, view.batch)
    return result


def kept_eagerly(outputs: OutputBuffers, registry: Registry) -> Keep:
    """Tells of an object that eager code returned, unless it holds memory that the next call overwrites."""

    def keep(path: TreePath, found: Any) -> Any:
        if not is_object(found):
            return None
        tensors = (leaf for _, leaf in leaves(found, path=path) if isinstance(leaf, torch.Tensor))
        return None if any(outputs.holds(tensor) or registry.holds(tensor) for tensor in tensors) else found

    return keep
