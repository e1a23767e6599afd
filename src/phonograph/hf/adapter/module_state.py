"""Module state: what a module holds besides its weights, by value; and copies, on which trials leave their marks."""

from __future__ import annotations

import copy
from operator import itemgetter
from typing import Any

import torch

_USUAL = vars(torch.nn.Module()).keys() - {"training"}
"""What every module has. Those that a trial may change are looked at by themselves."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MOST = 1 << 16
"""Elements of a tensor, or of a container."""


class OpaqueStateError(Exception):
    """An attribute that can be neither copied nor compared, so that nobody knows what a call changes."""


def state_of(module: Any) -> tuple[Any, ...]:
    """All that it holds but parameters: equal for two that hold the same, and other once a value within has changed."""
    held = [(name, value) for name, value in vars(module).items() if name not in _USUAL]
    held += [("_buffers", module._buffers), ("_modules", dict.fromkeys(module._modules))]
    held += [("_parameters", dict.fromkeys(module._parameters))]
    return tuple((name, _frozen(name, value)) for name, value in sorted(held, key=itemgetter(0)))


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def copied(module: Any, weight: torch.Tensor | None = None) -> Any:
    """A copy that shares parameters and nothing else, or has another weight."""
    kept: dict[int, Any] = {id(one): one for one in module._parameters.values() if one is not None}
    if weight is not None:
        kept[id(module.weight)] = torch.nn.Parameter(weight, requires_grad=False)
    return copy.deepcopy(module, kept)


def _frozen(name: str, value: Any) -> Any:
    """As something that compares by value, and can be a key."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value)  # NaN is itself, and 0.0 is not -0.0
    if kind in (list, tuple, torch.Size) and len(value) <= _MOST:
        return kind, tuple(_frozen(name, one) for one in value)
    if kind in (set, frozenset) and len(value) <= _MOST:
        return kind, frozenset(_frozen(name, one) for one in value)
    if isinstance(value, dict) and len(value) <= _MOST:
        return kind, tuple((_frozen(name, key), _frozen(name, one)) for key, one in value.items())
    if kind is torch.Tensor and value.layout == torch.strided and value.numel() <= _MOST and not value.is_meta:
        return kind, value.shape, value.stride(), value.dtype, value.device, bits_of(value)
    raise OpaqueStateError(f"no trial knows whether its attribute {name}, a {kind.__name__}, is changed")
