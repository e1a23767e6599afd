"""Sizing: limits of the engine from its options, from the model, and from memory that was measured."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from phonograph.devices import Device
from phonograph.engine.cache.groups import page_bytes
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.interface import Model
from phonograph.engine.models.registry import UNCOMPILED
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.prompt_scores import scoring_bytes
from phonograph.engine.passes.registry import PASSES, PassDeclaration, absent_phases, kept_by, passes_for, phases_of
from phonograph.engine.requests.limits import Limits
from phonograph.engine.sampling.sampler import Sampler
from phonograph.errors import CoverageError, DeviceError, PlanError
from phonograph.graphs.planning.kinds import shown
from phonograph.graphs.planning.resolve import Plan, resolve
from phonograph.graphs.planning.settings import Ask, Asked, Measured, refuse_absent
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.running.runner_options import facts_of

log = logging.getLogger("phonograph")

_GIB = 1 << 30


class _StepSize(NamedTuple):
    max_seqs: int
    max_tokens: int


_SIZES = (
    (60 * _GIB, _StepSize(256, 8192)),
    (30 * _GIB, _StepSize(128, 4096)),
    (14 * _GIB, _StepSize(64, 2048)),
    (0, _StepSize(16, 1024)),
)
"""From this much device memory on."""
_ON_CPU = _StepSize(16, 512)
_EMULATED = _StepSize(4, 64)
"""An emulated recording keeps its intermediates and runs op by op: few and small ones are enough to test with."""
_BYTES_PER_GRAPH = 6 << 20
"""Driver memory of a graph besides its intermediates; measured: 2 to 6 MB."""


def plan_for(
    device: Device,
    asked: Asked | Sequence[Ask],
    options: EngineOptions = EngineOptions(),
    *,
    on_cpu_by_default: bool,
    architecture: str = "",
    breaks: Sequence[str] = (),
) -> Plan:
    """The plan for a model; on the CPU nothing is recorded unless the emulated device was asked for.

    `breaks` are modules of the model that run between two graphs.
    """
    passes = passes_for(embeddings=options.embeddings, speculates=options.speculates)
    absent = absent_phases(embeddings=options.embeddings, speculates=options.speculates)
    refuse_absent(asked.asks if isinstance(asked, Asked) else asked, absent)
    phases, measured = phases_of(passes), []
    if device.torch_device.type == "cuda":
        backend = "full"
        reason = "attention reads lengths and pages from device memory, so one graph serves any number of requests"
        if options.attention == "flashinfer":
            backend, reason = "breakable", "FlashInfer plans every prompt on the host, between graphs"
        measured = [Measured(f"{one.name}.backend", backend, reason) for one in passes if one.is_ragged]
        memory, size = f"the device has {device.memory().total / _GIB:.0f} GiB of memory", _step_size(device)
        measured += [Measured(f"{one.name}.limit", one.limit(size), memory) for one in passes if one.serves]
    if breaks:
        reason = f"{breaks[0]} reads the device from the host, so it runs between graphs"
        measured = [one for one in measured if not one.setting.endswith(".backend")]
        measured += [Measured(f"{phase.name}.backend", "breakable", reason) for phase in phases]
    if device.torch_device.type == "cpu" and on_cpu_by_default:
        reason = "the CPU has no graphs to launch; device='emulated' runs the graph path"
        measured = [Measured(f"{phase.name}.backend", "disabled", reason) for phase in phases]
    packed = "the C++ kernels" if options.kernels == "cpu" else ""
    facts = replace(facts_of(device), known_failure=UNCOMPILED.get(architecture, ""), packed_weights=packed)
    return resolve(asked, facts, phases, measured=measured)


def _step_size(device: Device) -> _StepSize:
    """Default sequences and tokens of a step."""
    if device.torch_device.type == "cpu":
        return _ON_CPU
    total = device.memory().total
    return next(size for least, size in _SIZES if total >= least)


def limits_for(
    options: EngineOptions,
    device: Device,
    plan: Plan,
    context: int,
    eos_ids: Sequence[int],
    unread_places: int = 0,
) -> Limits:
    """The scheduler's limits for a model of this context; the KV cache is as large as asked, or a default."""
    if options.max_len is not None and options.max_len > context:
        raise PlanError(f"max_len {options.max_len:,} is more than the model's context of {context:,}. Lower it.")
    is_emulated = device.torch_device.type == "cpu" and plan.is_recorded
    seqs, tokens = _EMULATED if is_emulated else _step_size(device)
    max_seqs = seqs if options.max_seqs is None else options.max_seqs
    tokens_per_row = options.draft_depth + 1
    max_tokens = max(tokens if options.max_tokens is None else options.max_tokens, max_seqs * tokens_per_row)
    max_len = options.max_len or min(8192, context)
    cache_tokens = options.cache_tokens or max(max_len, max_seqs * min(max_len, 1024))
    num_pages = -(-cache_tokens // options.page_size) + 1
    limits = Limits(
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        max_len=max_len,
        page_size=options.page_size,
        num_pages=num_pages,
        max_ahead=options.max_ahead,
        eos_ids=tuple(eos_ids),
        tokens_per_row=tokens_per_row,
        unread_places=unread_places,
    )
    if plan.graphs == "strict":
        _refuse_gaps(plan, options, limits)
    return with_pages(limits, num_pages)


def _refuse_gaps(plan: Plan, options: EngineOptions, limits: Limits) -> None:
    """Refuse a strict plan by which some batches can have no graph, before weights are read; what else leaves them
    without one is known after capture."""
    for one in passes_for(embeddings=options.embeddings, speculates=options.speculates):
        wanted, largest = plan.phase(one.name), one.limit(limits)
        if not one.serves:
            continue
        setting, top = f"{one.name}.backend", 0
        if wanted.backend != "disabled":
            setting = f"{one.name}.{'limit' if wanted.buckets is None else 'buckets'}"
            top = wanted.buckets[-1] if wanted.buckets else wanted.limit or largest
        if top < largest:
            found = plan[setting]
            raise CoverageError(
                f"strict: {one.name} has no graph for some batches that may come, those of {top + 1:,} to {largest:,}: "
                f"{setting}={shown(found.value)} ({found.reason}). Change it, or take back strict "
                f"({plan['graphs'].reason})."
            )


def with_pages(limits: Limits, num_pages: int) -> Limits:
    """The limits over a KV cache of so many pages: no sequence can be longer than what it holds."""
    limits = replace(limits, num_pages=num_pages)
    max_len = max(2, min(limits.max_len, limits.capacity))
    is_cut_off = max_len < limits.max_len
    if is_cut_off:
        log.warning(
            "the context is %s tokens, not %s: all that the KV cache holds. Give it more memory, or raise cache_tokens",
            f"{max_len:,}",
            f"{limits.max_len:,}",
        )
    return replace(limits, max_len=max_len, is_cut_off=limits.is_cut_off or is_cut_off)


@dataclass(frozen=True)
class CacheSize:
    """How many pages the KV cache has, and why."""

    num_pages: int
    reason: str


def cache_size(
    model: Model,
    sampler: Sampler,
    device: Device,
    plan: Plan,
    limits: Limits,
    options: EngineOptions,
    progress: Progress = silent,
    passes: Sequence[PassDeclaration] = PASSES,
) -> CacheSize:
    """As asked; else, on a device with memory of its own, what weights and graphs leave of it."""
    if options.cache_tokens is not None:
        return CacheSize(limits.num_pages, f"{options.cache_tokens:,} tokens were asked for")
    if device.torch_device.type == "cpu":
        return CacheSize(limits.num_pages, f"a default on the CPU, for {limits.max_seqs} sequences")
    needed, num_recordings = _rehearsed(model, sampler, device, plan, limits, passes, progress)
    memory = device.memory()
    allowed = int(memory.total * options.memory) - memory.used
    page = page_bytes(kept_by(model, passes), limits.page_size, model.dtype)
    num_pages = (allowed - needed - num_recordings * _BYTES_PER_GRAPH) // page
    if num_pages < 2:
        raise DeviceError(
            f"sizing the KV cache: {options.memory:.0%} of {memory.total / _GIB:.1f} GiB is allowed, "
            f"{memory.used / _GIB:.1f} are in use with the weights and graphs need {needed / _GIB:.1f} more. "
            "Allow more memory, or lower max_seqs or max_tokens."
        )
    most = limits.max_seqs * -(-limits.max_len // limits.page_size) + 1
    reason = (
        f"{options.memory:.0%} of {memory.total / _GIB:.1f} GiB, less {memory.used / _GIB:.1f} in use with the weights "
        f"and {needed / _GIB:.2f} for graphs and activations, measured"
    )
    if num_pages > most:
        return CacheSize(most, f"all that {limits.max_seqs} sequences of {limits.max_len:,} tokens can use; {reason}")
    return CacheSize(num_pages, reason)


def _rehearsed(
    model: Model,
    sampler: Sampler,
    device: Device,
    plan: Plan,
    limits: Limits,
    passes: Sequence[PassDeclaration],
    progress: Progress,
) -> tuple[int, int]:
    """Bytes that graphs and activations take, found by recording the largest of every phase over a tiny cache.

    Captured addresses are never repointed, so the cache must be there before the recordings that serve; smaller
    recordings share the memory of the largest. Returns the bytes, and how many recordings there will be.
    """
    _settle(device)
    before = device.memory().used
    trial = Executor(model, sampler, device, plan, replace(limits, num_pages=2), passes=passes, largest_only=True)
    trial.capture(progress)
    needed = device.memory().used - before
    needed += scoring_bytes(model.config.vocab, model.dtype.itemsize)  # an eager tail's, which no recording holds
    num_recordings = trial.num_recordings
    for runner in trial.runners.values():
        runner.release()
    del trial
    _settle(device)
    return needed, num_recordings


def _settle(device: Device) -> None:
    gc.collect()
    device.synchronize()
    device.free_unused()
