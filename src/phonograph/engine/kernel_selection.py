"""Kernel selection: attention, kernels and sampler that serve a device best, unless one is requested."""

from __future__ import annotations

import logging

import torch

from phonograph.devices import Device, Hardware
from phonograph.engine.ops.attention.cpu import CpuAttention
from phonograph.engine.ops.attention.flashinfer import FlashInferAttention
from phonograph.engine.ops.attention.launch_config import launches_for
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.kernels import Kernels
from phonograph.engine.ops.layers.cpu import CpuKernels
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.native.library import Library, library
from phonograph.engine.ops.queries import Attention
from phonograph.engine.ops.tuning import Overlap
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.registry import passes_for
from phonograph.engine.sampling.cpu import CpuSampler
from phonograph.engine.sampling.sampler import Sampler, TorchSampler
from phonograph.errors import DeviceError, PlanError
from phonograph.graphs.planning.resolve import Plan
from phonograph.graphs.progress import Progress, silent

log = logging.getLogger("phonograph")


def _default(device: Device, plan: Plan) -> str:
    if device.torch_device.type == "cuda":
        return "triton"
    return "cpu" if device.torch_device.type == "cpu" and not plan.is_recorded else "reference"


def _native(requested: str | None, best: str, what: str, progress: Progress) -> Library | DeviceError:
    """The C++ kernels, or why there are none, where they were not requested by name."""
    if best != "cpu":
        raise PlanError(f"{what}='cpu' needs device='cpu' and no graphs. Leave it out, or set both.")
    try:
        return library(progress)
    except DeviceError as error:
        if requested is not None:
            raise
        return error


def select_attention(device: Device, options: EngineOptions, plan: Plan, progress: Progress = silent) -> Attention:
    """The attention that the options name, or the one that serves the device and the plan best."""
    best = _default(device, plan)
    name = options.attention or best
    if name == "cpu":
        found = _native(options.attention, best, "attention", progress)
        return ReferenceAttention() if isinstance(found, DeviceError) else CpuAttention(found)
    if name == "reference":
        return ReferenceAttention()
    refuse_unsupported(device, options, plan)
    try:
        from phonograph.engine.ops.attention.triton import TritonAttention
    except ImportError:
        raise DeviceError(f"attention={name!r} needs Triton. Run: pip install triton") from None
    attention = TritonAttention(launches_for(device.hardware), overlap=default_overlap(device.hardware))
    return FlashInferAttention(device, attention) if name == "flashinfer" else attention


def refuse_unsupported(device: Device, options: EngineOptions, plan: Plan) -> None:
    """Refuse implementations that the device, the dtype or the plan can't have."""
    on = device.torch_device.type
    for name in ("attention", "kernels"):
        requested = getattr(options, name)
        if requested in ("triton", "flashinfer") and on == "cpu":
            raise PlanError(f"{name}={requested!r} needs a GPU, and this is a CPU. Leave it out.")
    if options.attention != "flashinfer":
        return
    if on != "cuda":
        raise PlanError(f"attention='flashinfer' needs an NVIDIA GPU, not {on}. Leave it out.")
    if options.dtype not in (None, torch.bfloat16, torch.float16):
        raise PlanError(
            f"attention='flashinfer' takes bfloat16 or float16, not {options.dtype}. Leave one of them out."
        )
    passes = passes_for(embeddings=options.embeddings, speculates=options.speculates)
    for name in (declared.name for declared in passes if declared.is_ragged):
        if plan.phase(name).backend == "full":
            raise PlanError(
                "attention='flashinfer' plans every prompt on the host, which one graph can't hold. "
                f"Set {name}.backend='breakable', or leave the backend out."
            )


def select_kernels(device: Device, options: EngineOptions, plan: Plan, progress: Progress = silent) -> Kernels:
    """The kernels that the options name, or those that serve the device and the plan best."""
    best = _default(device, plan)
    name = options.kernels or best
    if name == "cpu":
        found = _native(options.kernels, best, "kernels", progress)
        if isinstance(found, Library):
            return CpuKernels(found)
        log.warning("slow: %s", found)
        return ReferenceKernels((f"slow: {found}",))
    if name == "reference":
        return ReferenceKernels()
    refuse_unsupported(device, options, plan)
    try:
        from phonograph.engine.ops import tuning
        from phonograph.engine.ops.triton.layers import TritonKernels
    except ImportError:
        raise DeviceError("kernels='triton' needs Triton. Run: pip install triton") from None
    chip = device.hardware
    return TritonKernels(device.torch_device, tuning.load(chip.name), overlap=default_overlap(chip))


def select_sampler(device: Device, options: EngineOptions, plan: Plan) -> Sampler:
    """The sampler that goes with the kernels."""
    best = _default(device, plan)
    name = options.kernels or best
    if name == "cpu":
        found = _native(options.kernels, best, "kernels", silent)
        return TorchSampler() if isinstance(found, DeviceError) else CpuSampler(found)
    if name != "triton":
        return TorchSampler()
    try:
        from phonograph.engine.sampling.triton.sampler import TritonSampler
    except ImportError:
        raise DeviceError("kernels='triton' needs Triton. Run: pip install triton") from None
    return TritonSampler()


def default_overlap(hardware: Hardware) -> Overlap:
    """When a kernel lets the next one begin, where nothing was measured."""
    return "early" if hardware.overlaps_launches else "none"
