"""Output buffers: one per output for all buckets, of the largest size; and the axes of an output to trim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from phonograph.errors import CaptureError, OutputError
from phonograph.graphs.inputs.tree import (
    Keep,
    Noted,
    TreePath,
    is_number,
    is_object,
    leaves,
    map_leaves,
    map_values,
    reachable,
)


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that the body returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Constant:
    """A plain value that the body returned, which replays repeat."""

    value: Any


Specs = Mapping[TreePath, OutputSpec | Constant]


@dataclass(frozen=True)
class Run:
    """One warm-up: the sizes of the dims that vary, and what came out."""

    sizes: Mapping[str, int]
    outputs: Specs


def trimmed_axes(runs: Sequence[Run]) -> dict[TreePath, dict[int, str]]:
    """For each output, the axes that follow a dim through runs of different size."""
    _check_structure(runs)
    axes: dict[TreePath, dict[int, str]] = {}
    changing = [dim for dim in runs[0].sizes if len({run.sizes[dim] for run in runs}) > 1]
    for path in runs[0].outputs:
        found = [(run.sizes, spec.shape) for run in runs if isinstance(spec := run.outputs[path], OutputSpec)]
        for axis in range(max((len(shape) for _, shape in found), default=0)):
            followed = _followed(path, axis, found, changing)
            if followed is not None:
                axes.setdefault(path, {})[axis] = followed
    return axes


def _followed(
    path: TreePath, axis: int, found: Sequence[tuple[Mapping[str, int], tuple[int, ...]]], changing: Sequence[str]
) -> str | None:
    """The dim that an axis follows, or None where the axis never changes."""
    sizes = [shape[axis] if axis < len(shape) else None for _, shape in found]
    for dim in changing:
        if all(size == of[dim] for size, (of, _) in zip(sizes, found, strict=True)):
            return dim
    if len(set(sizes)) > 1:
        raise CaptureError(
            f"axis {axis} of the output {path or '(the only one)'} changes with the batch and is not a dim: "
            f"{sizes} for {[dict(of) for of, _ in found]}",
            "Return it with the dim as an axis of its own, or use exact buckets",
        )
    return None


def _check_structure(runs: Sequence[Run]) -> None:
    """Refuse outputs whose structure or constants differ between sizes: a size in between may have either."""
    first = runs[0]
    for run in runs[1:]:
        for path in dict.fromkeys((*first.outputs, *run.outputs)):
            one, other = (_shown(outputs.get(path)) for outputs in (first.outputs, run.outputs))
            if one != other:
                raise CaptureError(
                    f"the output {path or '(the only one)'} is {one} for {dict(first.sizes)} and {other} for "
                    f"{dict(run.sizes)}, and a replay would give that of its bucket",
                    "Return the same for every size, or use exact buckets",
                )


def _shown(spec: OutputSpec | Constant | None) -> str:
    if spec is None:
        return "not there"
    return f"a tensor of {spec.dtype}" if isinstance(spec, OutputSpec) else repr(spec.value)


class Standing:
    """Objects that bodies return but did not make, such as a cache: the same on every run, over the same memory.

    They are returned as they are. Two runs find them.
    """

    def __init__(self) -> None:
        self._objects = Noted(holds=False)
        self._storages: dict[int, list[StorageWeakRef]] = {}

    def note(self, tree: Any) -> None:
        """Remember every object in what a run returned."""
        for _, found in reachable(tree):
            if is_object(found) and found not in self._objects:
                self._objects.add(found)
                storages = [tensor.untyped_storage() for tensor in _tensors(found)]
                self._storages[id(found)] = [StorageWeakRef(one) for one in storages]  # type: ignore[no-untyped-call]

    def keep(self, path: TreePath, found: Any) -> Any:
        """The object itself if it existed before this run, else None."""
        if found not in self._objects:
            return None
        storages = self._storages[id(found)]
        now = [tensor.untyped_storage()._cdata for tensor in _tensors(found)]
        if now != [one.cdata for one in storages] or any(one.expired() for one in storages):  # type: ignore[no-untyped-call]
            raise OutputError(
                f"the output {path or '(the only one)'} is the same {type(found).__name__} on every run, and the body "
                "puts new tensors into it, which a replay can't",
                "Return a new object, or the tensors themselves",
            )
        return found

    def kept(self, path: TreePath, found: Any) -> Any:
        """As `keep`, for outputs that were checked when they were recorded."""
        return found if found in self._objects else None


def _check_plain(path: TreePath, leaf: torch.Tensor, device: torch.device) -> None:
    if leaf.device.type != device.type:
        raise OutputError(
            f"the output {path or '(the only one)'} is on {leaf.device}, and a replay's outputs are on {device.type}",
            "Return it on the device, or leave it to a tail that is not recorded",
        )
    # A parameter's copy is a plain tensor, with and without graphs.
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or leaf.layout != torch.strided:
        raise OutputError(
            f"the output {path or '(the only one)'} is a {leaf.layout} {type(leaf).__name__}, and a replay gives plain "
            "strided tensors",
            "Return a plain tensor, and convert it outside of the body",
        )


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (found for _, found in reachable(tree) if isinstance(found, torch.Tensor))


class OutputBuffers:
    """Buffers that the recordings of a phase write their outputs to; valid until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self.standing = Standing()
        self._device = device
        self._largest: dict[tuple[TreePath, torch.dtype], int] = {}
        self._flats: dict[tuple[TreePath, torch.dtype], torch.Tensor] = {}

    def specs_of(self, tree: Any) -> Specs:
        """The outputs in a body's result; a number is refused, since a replay can't compute it anew."""
        specs: dict[TreePath, OutputSpec | Constant] = {}
        seen: set[int] = set()
        try:
            for path, leaf in leaves(tree, self.standing.keep):
                if isinstance(leaf, torch.Tensor):
                    _check_plain(path, leaf, self._device)
                    if id(leaf) not in seen:
                        specs[path] = OutputSpec(tuple(leaf.shape), leaf.dtype)
                    seen.add(id(leaf))
                elif is_number(leaf):
                    raise CaptureError(
                        f"the body returns the number {leaf!r}{f' at {path}' if path else ''}, which every replay "
                        "would repeat",
                        "Return a tensor, or compute the number outside",
                    )
                elif self.standing.keep(path, leaf) is None:
                    specs[path] = Constant(leaf)
        except OutputError as error:
            raise CaptureError(error.problem, error.remedy) from None
        return specs

    def expect(self, outputs: Specs) -> None:
        """Plan buffers for these outputs."""
        for path, spec in outputs.items():
            if isinstance(spec, OutputSpec):
                count = 1
                for size in spec.shape:
                    count *= size
                key = (path, spec.dtype)
                self._largest[key] = max(self._largest.get(key, 0), count)

    def allocate(self) -> None:
        """Allocate the planned buffers that don't exist yet."""
        with torch.inference_mode(False):
            for (path, dtype), count in self._largest.items():
                held = self._flats.get((path, dtype))
                if held is None or held.numel() < count:
                    self._flats[path, dtype] = torch.zeros(count, dtype=dtype, device=self._device)

    def store(self, tree: Any) -> Any:
        """Copy a body's outputs into the buffers, as part of what is recorded; returns their views."""

        def put(path: TreePath, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            view = self._flats[path, leaf.dtype][: leaf.numel()].view(leaf.shape)
            view.copy_(leaf)
            return view

        return map_leaves(tree, put, self.standing.keep)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the buffers at the end: a caller may still hold views of them."""
        held = [(flat, flat.clone()) for flat in self._flats.values()]
        try:
            yield
        finally:
            with torch.no_grad():
                for flat, before in held:
                    flat.copy_(before)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the buffers."""
        storage = tensor.untyped_storage()._cdata
        return any(flat.untyped_storage()._cdata == storage for flat in self._flats.values())


def trim(
    tree: Any, axes: Mapping[TreePath, Mapping[int, str]], used: Mapping[str, int], keep: Keep | None = None
) -> Any:
    """The used rows of every output."""

    def cut(path: TreePath, leaf: Any) -> Any:
        for axis, dim in axes.get(path, {}).items():
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.narrow(axis, 0, used[dim])
        return leaf

    return map_leaves(tree, cut, keep)


def own(tree: Any, keep: Keep | None = None) -> Any:
    """Copies of the tensors, which no later call overwrites, in containers and objects made anew."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    return map_values(tree, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, keep)


# Padding changes the kernel that is picked, and so the order of additions.
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def is_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float | None = None) -> bool:
    """Whether two tensors of one shape and dtype are the same but for rounding; at a tolerance of 0, the same.

    The tolerance is relative to the largest finite value; without one, it is the dtype's.
    """
    near = tolerance if tolerance is not None else _NEAR.get(wanted.dtype, 1e-1)
    one, other = _computed_with(found), _computed_with(wanted)
    if near == 0.0 or not other.is_floating_point():
        zeros = (tensor.nan_to_num(0.0, torch.inf, -torch.inf) for tensor in (one, other))  # NaN equals nothing
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(*zeros)
    finite = other[other.isfinite()]  # an infinite scale would let everything pass
    scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=near, atol=near * scale, equal_nan=True)


def _computed_with(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch computes with: it only stores those of one byte."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
