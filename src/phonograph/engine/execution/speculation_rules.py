"""Rules of speculation: what drafts exclude, by name; whoever asks for both is refused before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phonograph.engine.checkpoints import Checkpoint, shipped_head
from phonograph.engine.checkpoints.base import MakesModel
from phonograph.engine.models.registry import ARCHITECTURES
from phonograph.engine.options import EngineOptions
from phonograph.errors import PlanError


@dataclass(frozen=True)
class SpeculationRule:
    """A named rule; none can be ignored, since an engine without it could only fail later, or say something else."""

    name: str
    says: str
    """What holds where something is drafted."""
    problem: Callable[[EngineOptions, Checkpoint], str]
    """What is in the way, and what to do; empty where it holds. Reads no weights."""


def _state_by_row(options: EngineOptions, checkpoint: Checkpoint) -> str:
    known = ARCHITECTURES.get(checkpoint.config.architecture)
    if known is None or isinstance(checkpoint, MakesModel) or not known.keeps_state:
        return ""
    return (
        f"{checkpoint.config.architecture} keeps state by row, from which no token can be taken back, as a draft that "
        "is rejected has to be. Leave --speculate out"
    )


def has_own_layers(checkpoint: Checkpoint) -> bool:
    """Whether a head or modules can read its model's embeddings and hidden states."""
    return not isinstance(checkpoint, MakesModel)


def _own_layers(options: EngineOptions, checkpoint: Checkpoint) -> str:
    if options.speculate == "ngram" or has_own_layers(checkpoint):
        return ""
    if options.speculate == "auto" and options.draft is None:
        return ""  # which takes n-grams then
    return (
        "heads and modules read hidden states and embeddings of layers of our own, and this model has others. "
        "Use --speculate ngram, or --model-impl native"
    )


def _needs_a_head(options: EngineOptions, checkpoint: Checkpoint) -> str:
    is_needed = options.speculate in ("eagle", "ngram+eagle") and options.draft is None
    if not is_needed or shipped_head(checkpoint) is not None:
        return ""
    return "it drafts by a head, and none comes with this model. Give --draft PATH, or use --speculate ngram"


SPECULATION_RULES = (
    SpeculationRule(
        "speculation-state-by-row", "the model keeps no state by row, as recurrent layers have it", _state_by_row
    ),
    SpeculationRule("speculation-own-layers", "a head, or modules, are for a model in layers of our own", _own_layers),
    SpeculationRule("speculation-needs-a-head", "a drafter that needs a head has one", _needs_a_head),
)


def refuse_excluded(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raise where a rule does not hold for what is asked for."""
    for rule in SPECULATION_RULES if options.speculates else ():
        if problem := rule.problem(options, checkpoint):
            raise PlanError(f"rule '{rule.name}' conflicts with --speculate {options.speculate}: {problem}.")
