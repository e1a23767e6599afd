"""Outputs: one largest buffer for all buckets, and which axes of an output are to be trimmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phonograph.errors import CaptureError
from phonograph.graphs.tree import leaves, map_leaves


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that the body returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def specs_of(tree: Any) -> dict[str, OutputSpec]:
    """The tensors in a body's result; a number is refused, since a replay can't compute it anew."""
    specs = {}
    for path, leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            specs[path] = OutputSpec(tuple(leaf.shape), leaf.dtype)
        elif isinstance(leaf, bool | int | float):
            raise CaptureError(
                f"the body returns the number {leaf!r}{f' at {path}' if path else ''}, which every replay would repeat",
                "Return a tensor, or compute the number outside",
            )
    return specs


@dataclass(frozen=True)
class Run:
    """One warm-up: the sizes of the dims that vary, and what came out."""

    sizes: Mapping[str, int]
    outputs: Mapping[str, OutputSpec]


def trimmed_axes(runs: Sequence[Run]) -> dict[str, dict[int, str]]:
    """For each output, the axes that follow a dim through runs of different size."""
    axes: dict[str, dict[int, str]] = {}
    changing = [dim for dim in runs[0].sizes if len({run.sizes[dim] for run in runs}) > 1]
    for path, spec in runs[0].outputs.items():
        for axis in range(len(spec.shape)):
            followed = next((dim for dim in changing if all(_follows(run, path, axis, dim) for run in runs)), None)
            if followed is not None:
                axes.setdefault(path, {})[axis] = followed
            elif len({_size(run, path, axis) for run in runs} - {None}) > 1:
                raise CaptureError(
                    f"axis {axis} of the output {path or '(the only one)'} changes with the batch and is no dim: "
                    f"{[_size(run, path, axis) for run in runs]} for {[dict(run.sizes) for run in runs]}",
                    "Return it with the dim as an axis of its own, or use exact buckets",
                )
    return axes


def _size(run: Run, path: str, axis: int) -> int | None:
    spec = run.outputs.get(path)
    return spec.shape[axis] if spec is not None and axis < len(spec.shape) else None


def _follows(run: Run, path: str, axis: int, dim: str) -> bool:
    spec = run.outputs.get(path)
    return spec is None or (axis < len(spec.shape) and spec.shape[axis] == run.sizes[dim])


class OutputBuffers:
    """Buffers that the recordings of a phase write their outputs to; valid until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest: dict[tuple[str, torch.dtype], int] = {}
        self._flats: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def expect(self, outputs: Mapping[str, OutputSpec]) -> None:
        """Make room for these outputs."""
        for path, spec in outputs.items():
            key = (path, spec.dtype)
            count = 1
            for size in spec.shape:
                count *= size
            self._largest[key] = max(self._largest.get(key, 0), count)

    def allocate(self) -> None:
        """Allocate what was expected and is not there yet."""
        with torch.inference_mode(False):
            for (path, dtype), count in self._largest.items():
                held = self._flats.get((path, dtype))
                if held is None or held.numel() < count:
                    self._flats[path, dtype] = torch.zeros(count, dtype=dtype, device=self._device)

    def store(self, tree: Any) -> Any:
        """Copy a body's outputs into the buffers, as part of what is recorded; returns their views."""

        def put(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            view = self._flats[path, leaf.dtype][: leaf.numel()].view(leaf.shape)
            view.copy_(leaf)
            return view

        return map_leaves(tree, put)


def trim(tree: Any, axes: Mapping[str, Mapping[int, str]], used: Mapping[str, int]) -> Any:
    """The used rows of every output."""

    def cut(path: str, leaf: Any) -> Any:
        for axis, dim in axes.get(path, {}).items():
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.narrow(axis, 0, used[dim])
        return leaf

    return map_leaves(tree, cut)


def own(tree: Any) -> Any:
    """Copies of the tensors, which no later call overwrites."""
    return map_leaves(tree, lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
