"""Fingerprint: a hash of a sample of every weight, which tells one model's weights from another's of the same shape."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping

import torch

Fingerprint = Mapping[str, str]
"""By the name of a weight, its kind and a hash of the values at fixed places."""

_PLACES = 256
_STRIDE = 0x9E3779B97F4A7C15
"""Odd, and no divisor of usual widths: its multiples hit all rows and columns."""
_OWN_TO_KERNELS = "prepared"
"""Layouts that kernels derive from a matrix."""


def fingerprint(weights: object) -> Fingerprint:
    """Of all tensors in a model's weights; waits for the device. A value in a place that is not sampled is not seen."""
    return {name: f"{_kind(tensor)} {_hash(tensor)}" for name, tensor in _tensors(weights, "")}


def difference(theirs: Fingerprint, ours: Fingerprint) -> str:
    """How the weights of a file differ from the loaded ones, in words; empty where they don't."""
    kinds = {name: (_kind_in(theirs.get(name)), _kind_in(ours.get(name))) for name in {**ours, **theirs}}
    laid_out = [name for name, (one, other) in kinds.items() if one != other]
    if laid_out:
        name = laid_out[0]
        one, other = (kind or "not there" for kind in kinds[name])
        return f"{len(laid_out)} of {len(kinds)} weights are of another kind (the first, {name}: {one}, here {other})"
    changed = [name for name in ours if ours[name] != theirs[name]]
    if not changed:
        return ""
    return f"{len(changed)} of {len(ours)} weights have other values (the first: {changed[0]})"


def _tensors(found: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(found, torch.Tensor):
        yield name, found
    elif isinstance(found, tuple | list):
        for index, one in enumerate(found):
            yield from _tensors(one, f"{name}.{index}" if name else str(index))
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            if field.name != _OWN_TO_KERNELS:
                yield from _tensors(getattr(found, field.name), f"{name}.{field.name}" if name else field.name)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _kind_in(described: str | None) -> str:
    return described.rpartition(" ")[0] if described is not None else ""


def _hash(tensor: torch.Tensor) -> str:
    """Of the values at the sampled places, wherever these are in memory."""
    size = tensor.numel()
    picked = range(size) if size <= _PLACES else [number * _STRIDE % size for number in range(_PLACES)]
    places = torch.unravel_index(torch.tensor(picked, dtype=torch.int64, device=tensor.device), tensor.shape)
    values = tensor[places] if tensor.dim() else tensor.reshape(1)
    return hashlib.blake2b(values.cpu().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
