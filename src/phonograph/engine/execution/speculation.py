"""Speculation: the drafter that the options name, with its weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.interface import Model
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.eagle import eagle
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.registry import TARGET_VERIFY, PassDeclaration, passes_for
from phonograph.engine.passes.target_verify import PLAIN_STEPS, speculating_passes
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.coverage import replay_seconds

log = logging.getLogger("phonograph")


def open_draft(options: EngineOptions, target: ModelConfig) -> DraftCheckpoint | None:
    """The EAGLE head, if there is one; refused where it does not fit, before weights are read."""
    return None if options.draft is None else DraftCheckpoint.open(options.draft, target)


def drafting_for(
    options: EngineOptions, draft: DraftCheckpoint | None, model: Model, num_positions: int
) -> Drafting | None:
    """The drafter for the model, with its weights if it has some."""
    if draft is not None:
        return eagle(draft.load(drafted_for(model), num_positions), options.draft_depth)
    return ngram(options.draft_depth) if options.speculates else None


def passes_with(drafting: Drafting | None, options: EngineOptions) -> Sequence[PassDeclaration]:
    """The passes of an engine with this drafter, or without one."""
    if drafting is None:
        return passes_for(embeddings=options.embeddings)
    return speculating_passes(drafting)


def costs_for(options: EngineOptions, executor: Executor) -> StepCosts | None:
    """The measured cost of rounds; None where they are launched whatever they cost."""
    where = options.speculate_when or ("always" if executor.device.torch_device.type == "cpu" else "pays")
    if not options.speculates or where == "always":
        return None
    try:
        costs = measured_costs(executor.runners[TARGET_VERIFY.name])
    except Exception as error:  # no request depends on the measurement
        log.warning("what rounds cost could not be measured (%s: %s)", type(error).__name__, error)
        costs = None
    if costs is None:
        log.warning("the cost of rounds is unknown, so they are launched wherever something is drafted")
    return costs


@torch.inference_mode()
def measured_costs(runner: Runner) -> StepCosts | None:
    """How much longer rounds take than plain steps, for every size that has both; None where none has."""
    keys = {(key.size, key.axes): key for key in runner.captured}
    sizes = sorted(size for size, axes in keys if not axes and (size, PLAIN_STEPS) in keys)
    if not sizes:
        return None
    pairs = [
        (replay_seconds(runner, keys[size, ""]), replay_seconds(runner, keys[size, PLAIN_STEPS])) for size in sizes
    ]
    return StepCosts(tuple(sizes), tuple(rounds / plain for rounds, plain in pairs))
