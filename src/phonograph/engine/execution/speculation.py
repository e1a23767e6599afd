"""Speculation: the drafter that the options name, with its weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from phonograph.devices import Device
from phonograph.engine.checkpoints import Checkpoint, shipped_head
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.checkpoints.mtp import MtpCheckpoint, has_modules
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.speculation_rules import has_own_layers, refuse_excluded
from phonograph.engine.execution.step_timing import PassTime
from phonograph.engine.models.interface import Model
from phonograph.engine.options import EngineOptions, SpeculateWhen
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.eagle import eagle
from phonograph.engine.passes.mtp import mtp
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.ngram_eagle import ngram_eagle
from phonograph.engine.passes.registry import DRAFT_EXTEND, TARGET_VERIFY, PassDeclaration, passes_for
from phonograph.engine.passes.target_verify import HALF_ROUNDS, PLAIN_STEPS, speculating_passes
from phonograph.engine.passes.unread import READ_TO
from phonograph.engine.requests.limits import UNREAD_PLACES, half_width
from phonograph.engine.requests.step import StepKind
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.coverage import steady_seconds

log = logging.getLogger("phonograph")


@dataclass(frozen=True)
class Chosen:
    """The drafter that was chosen, and why; its weights are not read yet."""

    name: Literal["ngram", "eagle", "ngram+eagle", "mtp"]
    why: str = ""
    """Where it was not asked for by name."""
    draft: DraftCheckpoint | MtpCheckpoint | None = None

    def __str__(self) -> str:
        return self.name + (f" (auto: {self.why})" if self.why else "")

    @property
    def unread_places(self) -> int:
        """Tokens of a row that plain steps leave for it: none where it reads no hidden states."""
        return 0 if self.draft is None else UNREAD_PLACES

    def drafting(self, depth: int, model: Model, num_positions: int) -> Drafting:
        """The drafter, with weights if it has some."""
        match self.draft:
            case None:
                made = ngram(depth)
            case DraftCheckpoint() as head:
                make = ngram_eagle if self.name == "ngram+eagle" else eagle
                made = make(head.load(drafted_for(model, self.name), num_positions), depth, self.unread_places)
            case MtpCheckpoint() as modules:
                loaded = modules.load(drafted_for(model, self.name), num_positions, depth)
                made = mtp(loaded, depth, self.unread_places)
        return replace(made, why=f"auto: {self.why}" if self.why else "")


def choose_drafter(options: EngineOptions, checkpoint: Checkpoint) -> Chosen | None:
    """The drafter for a model, if there is one; what speculation excludes, and a head or modules that do not fit, are
    refused before weights are read."""
    refuse_excluded(options, checkpoint)
    name, folder, target = options.speculate, options.draft, checkpoint.config
    if name == "off":
        return None
    if name == "mtp":
        assert folder is not None
        return Chosen("mtp", draft=MtpCheckpoint.open(folder, target))
    can_read = name != "ngram" and folder is None and has_own_layers(checkpoint)
    shipped = shipped_head(checkpoint) if can_read else None
    head = folder or shipped
    if name == "auto" and folder is not None and has_modules(folder):
        return Chosen("mtp", "--draft names MTP modules", MtpCheckpoint.open(folder, target))
    if head is None:
        why = "no head comes with this model, and --draft names none"
        if not has_own_layers(checkpoint):
            why = "this model has layers that no head can read"
        return Chosen("ngram", why if name == "auto" else "")
    why = "--draft names a head" if shipped is None else "a head comes with this model"
    draft = DraftCheckpoint.open(head, target)
    return Chosen(name, draft=draft) if name in ("eagle", "ngram+eagle") else Chosen("eagle", why, draft)


def when_for(options: EngineOptions, device: torch.device) -> SpeculateWhen:
    """When rounds are launched: as the options say, or as is best for the device."""
    return options.speculate_when or ("always" if device.type == "cpu" else "pays")


def passes_with(drafting: Drafting | None, options: EngineOptions, device: Device) -> Sequence[PassDeclaration]:
    """The passes of an engine with this drafter, or without one."""
    passes = passes_for(embeddings=options.embeddings)
    if drafting is not None:
        narrows = when_for(options, device.torch_device) == "pays"
        passes = speculating_passes(drafting, embeddings=options.embeddings, narrows=narrows)
    return [replace(one, gives_states=one.serves) for one in passes] if options.return_hidden_states else passes


def costs_for(options: EngineOptions, executor: Executor) -> StepCosts | None:
    """The measured cost of rounds; None where they are launched whatever they cost."""
    if not options.speculates or when_for(options, executor.device.torch_device) == "always":
        return None
    try:
        costs = measured_costs(executor)
    except Exception as error:  # no request depends on the measurement
        log.warning("what rounds cost could not be measured (%s: %s)", type(error).__name__, error)
        costs = None
    if costs is None:
        log.warning("the cost of rounds is unknown, so they are launched wherever something is drafted")
    return costs


@torch.inference_mode()
def measured_costs(executor: Executor) -> StepCosts | None:
    """How much longer rounds take than plain steps, for every size that has all widths; None where none has."""
    runner, tokens_per_row = executor.runners[TARGET_VERIFY.name], executor.limits.tokens_per_row
    keys, passes = {(key.size, key.axes): key for key in runner.captured}, ("", HALF_ROUNDS, PLAIN_STEPS)
    recorded = [axes for axes in passes if any(axes == found for _, found in keys)]
    sizes = sorted(size for size, axes in keys if not axes and all((size, one) in keys for one in recorded))
    if not sizes or PLAIN_STEPS not in recorded:
        return None
    seconds = {axes: [_seconds(executor, runner, keys[size, axes]) for size in sizes] for axes in recorded}
    plain = seconds.pop(PLAIN_STEPS)
    ratios = {
        axes: tuple(taken / least for taken, least in zip(times, plain, strict=True)) for axes, times in seconds.items()
    }
    widths = {"": tokens_per_row, HALF_ROUNDS: half_width(tokens_per_row)}
    catching_up = _catching_up(executor, dict(zip(sizes, plain, strict=True)))
    by_width = {widths[axes]: found for axes, found in ratios.items()}
    return StepCosts(tuple(sizes), by_width, catching_up, tuple(plain))


def _seconds(executor: Executor, runner: Runner, key: ShapeKey) -> float:
    """Of a replay in steps as they are in service, where the overlap of launches is resumed."""
    return steady_seconds(runner, key, executor.model.kernels.resume_overlap)


def _catching_up(executor: Executor, plain: Mapping[int, float]) -> tuple[float, ...]:
    """What it takes to read and draft, over a plain step, at each size, by the recording that serves it; without limit
    where none does."""
    runner, tables, places = executor.runners[DRAFT_EXTEND.name], executor.tables, executor.limits.unread_places
    keys = {key.size: key for key in runner.captured if not key.axes}
    serving = {size: min((one for one in keys if one >= size), default=0) for size in plain}

    def unread() -> None:
        """A replay marks all as read, so that the next would find rows that are nobody's."""
        if places:
            tables[READ_TO].copy_((tables.length - places).clamp_min_(0))
        executor.model.kernels.resume_overlap()

    taken = {size: steady_seconds(runner, keys[size], unread, repeats=1) for size in set(serving.values()) if size}
    return tuple(taken.get(serving[size], math.inf) / least for size, least in plain.items())


def round_times(executor: Executor) -> dict[StepKind, PassTime]:
    """Device time of rounds and of plain steps without prompts among them, of those that there were."""
    kinds: tuple[StepKind, ...] = ("round", "plain")
    found = {kind: executor.timing.passes.get((TARGET_VERIFY.name, kind), PassTime()) for kind in kinds}
    return {kind: time for kind, time in found.items() if time.passes}


def described_times(times: Mapping[StepKind, PassTime]) -> str:
    """In words, each per pass; empty before the first."""
    names = {"round": "a round", "plain": "a plain step"}
    each = [f"{time.seconds / time.passes * 1e3:.3g} ms {names[kind]}" for kind, time in times.items()]
    return f"device time: {', '.join(each)}" if each else ""
