"""Builds registries and batches for tests, in a few lines each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phonograph.devices import Device
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import Registry
from phonograph.graphs.inputs.slot import Pad, Slot, collect_dims

GARBAGE = 0xAB
WIDE = 128  # floats in a row that is too wide to be packed


def registry(
    device: Any,
    *slots: Slot,
    largest: int = 8,
    bucketed: str = "tokens",
    dims: Sequence[Dim] = (),
    adopt: Mapping[str, torch.Tensor] | None = None,
    pool: BufferPool | None = None,
) -> Registry:
    """A registry that is ready to load; a pool that is passed in is left to the caller to seal."""
    made = Registry(device, slots, collect_dims(slots, dims), owner="decode", adopt=adopt or {})
    into = pool if pool is not None else BufferPool(device)
    made.declare(into, bucketed, largest)
    if pool is None:
        into.seal()
    return made


def ints(name: str, *shape: int | str, pad: int = -1, **more: Any) -> Slot:
    return Slot(name, shape or ("tokens",), torch.int64, pad=Pad.fill(pad), **more)


def floats(name: str, *shape: int | str, **more: Any) -> Slot:
    return Slot(name, shape or ("tokens",), torch.float32, **more)


def tokens(used: int, padded: int | None = None) -> Extent:
    return Extent({"tokens": used}, {"tokens": padded if padded is not None else used})


def by_hand(value: Any, shape: tuple[int, ...], fill: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Copy, then pad: what a load must equal."""
    value = torch.as_tensor(value).cpu()
    whole = torch.full(shape, fill, dtype=dtype)
    whole[tuple(slice(0, size) for size in value.shape)] = value.to(dtype)
    return whole


def as_kind(values: Mapping[str, torch.Tensor], kind: str, device: Device) -> dict[str, Any]:
    """The values as tensors where their slot is, as arrays, or as lists."""
    if kind == "tensor":
        return {name: v if name == "on_host" else v.to(device.torch_device) for name, v in values.items()}
    if kind == "list":
        return {name: v.tolist() for name, v in values.items()}
    return {name: v.numpy() if v.dtype != torch.bfloat16 else v.float().numpy() for name, v in values.items()}


def spoil(tensor: torch.Tensor) -> None:
    """Fill the whole storage that a tensor lies in with garbage."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(GARBAGE)
