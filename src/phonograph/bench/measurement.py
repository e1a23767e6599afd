"""Bench: one measurement under way: its settings, the device, the time that is left, and engines to measure."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from phonograph.bench.report import Report, Row
from phonograph.bench.timing import Deadline
from phonograph.devices import Device
from phonograph.engine.checkpoints import RandomCheckpoint, random_checkpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import PlanError
from phonograph.graphs.planning.settings import ask

T = TypeVar("T")
EAGER = "eager"
"""The series of the backend `disabled`."""


@dataclass(frozen=True)
class MeasurementSettings:
    """The settings of a measurement, from the command line."""

    shape: str
    quick: bool = False
    backends: tuple[str, ...] = ()
    """Empty for those that the measurement is about."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine options by name, for every engine that is opened."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The measurement's own flags; None where one was not given."""
    out: Path | None = None


class Bench:
    """What a measurement works with."""

    def __init__(self, settings: MeasurementSettings, device: Device, report: Report, deadline: Deadline) -> None:
        self.settings = settings
        self.device = device
        self.report = report
        self.deadline = deadline

    @cached_property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @cached_property
    def checkpoint(self) -> RandomCheckpoint:
        """Random weights of the shape."""
        return random_checkpoint(self.settings.shape, self.settings.options.get("model_impl", "auto"))

    def choose(self, flag: str, usual: T, quick: T) -> T:
        """The flag's value, or what stands for it."""
        given: T | None = self.settings.flags.get(flag)
        if given is not None:
            return given
        return quick if self.settings.quick else usual

    def backends(self, *usual: str) -> tuple[str, ...]:
        """The backends to measure, the one that matters most first."""
        return self.settings.backends or usual

    def has_time(self, what: str) -> bool:
        """Whether there is time left; what is left out is noted."""
        if self.deadline.is_past:
            self.report.note(f"not measured, out of time: {what}")
            return False
        return True

    def open(
        self,
        options: EngineOptions,
        backends: Mapping[str, str],
        buckets: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> LLM:
        """An engine with random weights; `backends` and `buckets` by phase. Options on the command line go first."""
        free_device_memory(self.device)
        asked = [ask(f"{phase}.backend", backend, origin="bench") for phase, backend in backends.items()]
        for phase, sizes in buckets.items():
            if backends.get(phase) != "disabled":
                asked.append(ask(f"{phase}.buckets", tuple(sorted(set(sizes))), origin="bench"))
        chosen = replace(options, **self.settings.options)
        return LLM(self.checkpoint, device=self.device, options=chosen, asked=asked)


def free_device_memory(device: Device) -> None:
    """Give what the last engine left back to a device that has memory of its own."""
    if device.torch_device.type != "cpu":
        gc.collect()
        device.synchronize()
        device.free_unused()


def row_of(
    backend: str, case: Mapping[str, int | str], value: float, figures: Mapping[str, Any] = MappingProxyType({})
) -> Row:
    """What was found for a backend; `disabled` is eager, which the others are compared with."""
    if backend == "disabled":
        return Row(case, EAGER, "eager", value, dict(figures))
    return Row(case, backend, "ours", value, dict(figures))


def greedy(new_tokens: int) -> SamplingParams:
    """Greedy parameters for this number of tokens, whatever they are."""
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def checked_shape(name: str) -> str:
    """The name, if there is a shape of it."""
    if name in SHAPES:
        return name
    from phonograph.hf.adapter.shapes import HF_SHAPES  # which needs transformers

    known = (*SHAPES, *HF_SHAPES)
    if name not in known:
        raise PlanError(f"--shape {name!r} is unknown (known: {', '.join(known)}).")
    return name
