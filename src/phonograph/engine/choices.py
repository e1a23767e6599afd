"""Which attention and which kernels serve a device best, unless one is asked for."""

from __future__ import annotations

import torch

from phonograph.devices import Device
from phonograph.engine.attention.base import Attention
from phonograph.engine.attention.reference import ReferenceAttention
from phonograph.engine.kernels.base import Kernels
from phonograph.engine.kernels.cpu import CpuKernels
from phonograph.engine.kernels.reference import ReferenceKernels
from phonograph.engine.options import EngineOptions
from phonograph.engine.sampler import Sampler, TorchSampler
from phonograph.errors import DeviceError, PlanError
from phonograph.graphs.resolve import Plan


def _default(device: Device) -> str:
    return "triton" if device.torch_device.type == "cuda" else "reference"


def _default_kernels(device: Device, plan: Plan) -> str:
    recorded = any(plan.phase(name).backend != "disabled" for name in ("decode", "prefill", "idle"))
    return "cpu" if device.torch_device.type == "cpu" and not recorded else _default(device)


def attention_for(device: Device, options: EngineOptions) -> Attention:
    """The attention that was asked for, or the one that the device is best served by."""
    if (options.attention or _default(device)) == "reference":
        return ReferenceAttention()
    try:
        from phonograph.engine.attention.triton import TritonAttention
    except ImportError:
        raise DeviceError("attention='triton' needs Triton. Run: pip install triton") from None
    return TritonAttention()


def kernels_for(device: Device, options: EngineOptions, plan: Plan) -> Kernels:
    """The kernels that were asked for, or those that the device and the plan are best served by."""
    best = _default_kernels(device, plan)
    name = options.kernels or best
    if options.weights is not None and name != "cpu":
        raise PlanError(f"weights={options.weights!r} needs kernels='cpu', but {name!r} ones serve here. Leave it out.")
    if name == "cpu" and best != "cpu":
        raise PlanError("kernels='cpu' serves a CPU on which nothing is recorded. Leave it out, or say device='cpu'.")
    if name == "cpu":
        return CpuKernels(int4=options.weights == "int4")
    if name == "reference":
        return ReferenceKernels()
    try:
        from phonograph.engine.kernels import tuning
        from phonograph.engine.kernels.triton.layers import TritonKernels
    except ImportError:
        raise DeviceError("kernels='triton' needs Triton. Run: pip install triton") from None
    return TritonKernels(device.torch_device, tuning.load(hardware(device)))


def sampler_for(device: Device, options: EngineOptions) -> Sampler:
    """The sampler that goes with the kernels."""
    if (options.kernels or _default(device)) != "triton":
        return TorchSampler()
    try:
        from phonograph.engine.kernels.triton.sampler import TritonSampler
    except ImportError:
        raise DeviceError("kernels='triton' needs Triton. Run: pip install triton") from None
    return TritonSampler()


def hardware(device: Device) -> str:
    """The name under which measurements of a device are kept."""
    where = device.torch_device
    return torch.get_device_module(where).get_device_name(where) if where.type != "cpu" else "cpu"
