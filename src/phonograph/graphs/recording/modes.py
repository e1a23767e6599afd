"""Modes: global settings of torch that change what ops compute, as they are for this thread now."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext

from phonograph.graphs.recording.fact import Computed, Fact

_C: Any = torch._C
_MATMUL = "torch.backends.cuda.matmul"
_FLAGS = {
    "torch.get_default_dtype()": "get_default_dtype",
    "torch.are_deterministic_algorithms_enabled()": "_get_deterministic_algorithms",
    "torch.get_float32_matmul_precision()": "_get_float32_matmul_precision",
    f"{_MATMUL}.allow_tf32": "_get_cublas_allow_tf32",
    f"{_MATMUL}.allow_fp16_reduced_precision_reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
    f"{_MATMUL}.allow_bf16_reduced_precision_reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
    "torch.backends.cudnn.allow_tf32": "_get_cudnn_allow_tf32",
    "torch.backends.cudnn.enabled": "_get_cudnn_enabled",
    "torch.backends.cudnn.deterministic": "_get_cudnn_deterministic",
    "torch.backends.cuda.flash_sdp_enabled()": "_get_flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled()": "_get_mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled()": "_get_math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled()": "_get_cudnn_sdp_enabled",
    "torch.nn.attention.sdpa_kernel(set_priority=)": "_get_sdp_priority_order",
}
"""By what users call it, the function of `torch._C` that tells it; one that a version of torch lacks is left out."""
QUESTIONS = (
    *(torch.is_inference_mode_enabled, torch.backends.mha.get_fastpath_enabled, torch.get_num_threads),
    *(torch.is_anomaly_enabled, torch.is_warn_always_enabled, torch.get_deterministic_debug_mode),
)
"""What bodies may ask torch: a fact where one does, since ops don't mind."""
_STACKS = {
    "modes of torch.overrides": (_C._len_torch_function_stack, _C._get_function_stack_at),
    "modes of torch.utils._python_dispatch": (_C._len_torch_dispatch_stack, _C._get_dispatch_stack_at),
}
"""By name, how many modes are entered, and the one in a place."""
_BY_STATE_GUARD = ("get_default_dtype", "_get_deterministic_algorithms", "_get_cublas")
"""What torch's own guard of global state sees too, with autocast: these need no further look at every call."""


def mode_facts(device: str) -> Iterator[Fact]:
    """The modes of now, for ops on a device of this type and on the CPU."""
    for kind in dict.fromkeys((device, "cpu")):
        yield _fact(f"autocast on {kind}", lambda kind=kind: _autocast(kind))  # type: ignore[misc]
    yield _fact("default device", _default_device)
    for stack in _STACKS:
        yield _fact(stack, functools.partial(_entered, stack))
    for name, function in _FLAGS.items():
        ask = _asked(function)
        if ask is not None:
            yield _fact(name, ask)


def fast_questions(facts: list[Fact], *, guarded: bool) -> list[tuple[Callable[[], Any], Any]]:
    """Functions and their answers, which together tell at every call whether a mode may have changed."""
    questions: list[tuple[Callable[[], Any], Any]] = [(length, length()) for length, _ in _STACKS.values()]
    for fact in facts:
        assert isinstance(fact.source, Computed)
        is_guarded = fact.name.startswith("autocast") or _FLAGS.get(fact.name, "").startswith(_BY_STATE_GUARD)
        is_told = fact.name in _STACKS and not fact.value  # by how many there are
        if fact.name != "default device" and not is_told and not (guarded and is_guarded):
            questions.append((fact.source.ask, fact.source.ask()))
    return questions


def _fact(name: str, ask: Callable[[], Any]) -> Fact:
    source = Computed(name, ask)
    return Fact("mode", name, source, source.get())


def _autocast(kind: str) -> tuple[bool, torch.dtype | None]:
    is_enabled = bool(_C.is_autocast_enabled(kind))
    return is_enabled, _C.get_autocast_dtype(kind) if is_enabled else None


def _entered(stack: str) -> tuple[Any, ...]:
    """The modes that are entered, but for that of the default device."""
    length, at = _STACKS[stack]
    found = (at(place) for place in range(length()))
    return tuple(one for one in found if not isinstance(one, DeviceContext))


def _default_device() -> torch.device:
    return torch.get_default_device()


def _asked(function: str) -> Callable[[], Any] | None:
    ask = getattr(_C, function, None)
    if ask is None and function == "get_default_dtype":
        ask = torch.get_default_dtype
    try:
        if ask is not None:
            ask()
    except RuntimeError:  # old and new settings of precision were mixed: torch won't tell
        return None
    found: Callable[[], Any] | None = ask
    return found
