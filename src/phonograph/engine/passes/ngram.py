"""ngram: a drafter by prompt lookup on the device: what followed the same tokens earlier in the sequence."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafting
from phonograph.engine.state.column import Array, Column, Form, RowSource, TrialRows, Width, Writer


def _known(entry: RowSource) -> tuple[Array, Array]:
    """All tokens that the host knows of: the prompt, and after a preemption the outputs so far."""
    tokens = entry.sequence.known()
    return np.arange(len(tokens)), np.fromiter(tokens, dtype=np.int32, count=len(tokens))


def _trial_history(trial: TrialRows) -> torch.Tensor:
    """Few different tokens, so that some of them come again."""
    return torch.randint(0, min(4, trial.vocab), (trial.count, trial.num_positions), generator=trial.numbers)


HISTORY = Column(
    "history",
    torch.int32,
    width=Width.POSITIONS,
    writer=Writer.ENTRY | Writer.GRAPH,
    form=Form.PAIRS | Form.RESET,
    value=_known,
    trial=_trial_history,
)
"""The tokens of a row by their positions, up to its last one."""


class NgramDrafter:
    """Finds the latest place where the last tokens of a row stood before, and drafts what came after."""

    reads = (HISTORY.name,)
    writes = (HISTORY.name,)

    def __init__(self, parts: PassParts) -> None:
        self._kernels = parts.model.kernels.rounds
        self._tables = parts.tables

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        """Notes the new tokens, and looks at all that the row holds."""
        return self._kernels.keep_and_continue(self._tables[HISTORY.name], accepted.new, depth)

    def keep_up(self, accepted: Accepted) -> None:
        self._kernels.keep(self._tables[HISTORY.name], accepted.new)


def ngram(depth: int) -> Drafting:
    """The declaration."""
    return Drafting("ngram", depth, NgramDrafter, lambda: (HISTORY,))
