"""Device registry: a device by name, by torch device, or the accelerator that is present."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points

import torch

from phonograph.devices.base import Device
from phonograph.devices.cuda import CudaDevice
from phonograph.devices.emulated import EmulatedDevice
from phonograph.errors import DeviceError

ENTRY_POINT = "phonograph.devices"

_BUILT_IN: dict[str, Callable[[torch.device], Device]] = {
    "cuda": lambda device: CudaDevice(device.index),
    "emulated": lambda device: EmulatedDevice(),
    "cpu": lambda device: EmulatedDevice(),
}


def device_names() -> list[str]:
    """Every name that `open_device` takes."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT))})


def open_device(spec: str | torch.device | Device | None = None) -> Device:
    """A device by name ('cuda:1', 'emulated'), by torch device, or None for the accelerator present, else the CPU.

    A third-party package adds one through the entry-point group `phonograph.devices`: a name, which is the
    torch device type, and a callable that takes a torch.device and returns a `Device`.
    """
    if spec is None:
        spec = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    if not isinstance(spec, str | torch.device):
        return spec
    name, colon, index = str(spec).partition(":")
    if colon and not index.isdecimal():
        raise DeviceError(f"opening device {str(spec)!r}: {index!r} is not an index. Write {name!r}, or '{name}:0'.")
    make = _BUILT_IN.get(name)
    for point in entry_points(group=ENTRY_POINT, name=name):
        make = point.load()
    if make is None:
        near = difflib.get_close_matches(name, device_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DeviceError(
            f"opening device {str(spec)!r}: no such device{hint}. Use one of {', '.join(device_names())}."
        )
    where = "cpu" if name == "emulated" else name
    return make(torch.device(where, int(index)) if index else torch.device(where))
