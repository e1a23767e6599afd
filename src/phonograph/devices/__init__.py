"""Devices: adapters that record and replay graphs: protocols, the emulated CPU device, CUDA, and the registry."""

from phonograph.devices.base import (
    Capabilities,
    Device,
    DeviceGraph,
    Fence,
    Hardware,
    MemoryFigures,
    MemoryPool,
    Recorder,
)
from phonograph.devices.emulated import EmulatedDevice
from phonograph.devices.registry import device_names, open_device

__all__ = [
    "Capabilities",
    "Device",
    "DeviceGraph",
    "EmulatedDevice",
    "Fence",
    "Hardware",
    "MemoryFigures",
    "MemoryPool",
    "Recorder",
    "device_names",
    "open_device",
]
