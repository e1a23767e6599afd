"""Speculation: who drafts for a model, by the options; a head's weights are loaded beside the model's."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.interface import Model
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.eagle import eagle
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.registry import PassDeclaration, passes_for
from phonograph.engine.passes.target_verify import speculating_passes


def open_draft(options: EngineOptions, target: ModelConfig) -> DraftCheckpoint | None:
    """The head that drafts, if one does; refused where it does not fit, before weights are read."""
    return None if options.draft is None else DraftCheckpoint.open(options.draft, target)


def drafting_for(
    options: EngineOptions, draft: DraftCheckpoint | None, model: Model, num_positions: int
) -> Drafting | None:
    """Whoever drafts for the model, with weights if it has some."""
    if draft is not None:
        return eagle(draft.load(drafted_for(model), num_positions), options.draft_depth)
    return ngram(options.draft_depth) if options.speculates else None


def passes_with(drafting: Drafting | None, options: EngineOptions) -> Sequence[PassDeclaration]:
    """The passes of an engine for which somebody drafts, or nobody."""
    if drafting is None:
        return passes_for(embeddings=options.embeddings)
    return speculating_passes(drafting)
