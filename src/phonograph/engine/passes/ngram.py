"""ngram: a drafter that continues as the sequence itself went on after the same words; prompt lookup, on the device."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafting
from phonograph.engine.state.column import Array, Column, Form, RowSource, TrialRows, Width, Writer

_LENGTHS = (3, 2)
"""Of the suffix that is looked for: a longer match is believed before a shorter one."""


def _known(entry: RowSource) -> tuple[Array, Array]:
    """All tokens that the host knows of: the prompt, and after a preemption the outputs so far."""
    tokens = entry.sequence.known()
    return np.arange(len(tokens)), np.fromiter(tokens, dtype=np.int32, count=len(tokens))


def _trial_history(trial: TrialRows) -> torch.Tensor:
    """Few different tokens, so that some of them come again."""
    return torch.randint(0, min(4, trial.vocab), (trial.count, 2 * trial.page_size), generator=trial.numbers)


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

    def __init__(self, parts: PassParts, depth: int) -> None:
        self._tables = parts.tables
        self._depth = depth

    def draft(self, accepted: Accepted) -> torch.Tensor:
        """Notes the new tokens, and looks at all that the row holds."""
        self.keep_up(accepted)
        history, rows = self._tables[HISTORY.name], accepted.rows
        return continued(history[rows], self._tables.length[rows], self._depth)

    def keep_up(self, accepted: Accepted) -> None:
        history, rows = self._tables[HISTORY.name], accepted.rows
        offsets = torch.arange(accepted.tokens.shape[1], device=rows.device)
        stays = offsets < accepted.counts[:, None]
        # What does not stay goes to the null row, which nobody reads.
        places = (accepted.starts[:, None] + 1 + offsets).clamp_max(history.shape[1] - 1)
        history.index_put_((rows[:, None] * stays, places * stays), (accepted.tokens * stays).to(history.dtype))


def continued(history: torch.Tensor, lasts: torch.Tensor, depth: int) -> torch.Tensor:
    """[num_rows, depth]: what followed the latest place of the longest suffix, -1 for all where there is none.

    The last token of a row of `history` ([num_rows, num_positions]) is at `lasts` ([num_rows]). Where the end of the
    row is reached, the tokens since that place repeat themselves.
    """
    places = torch.arange(history.shape[1], device=history.device)
    before = places < lasts[:, None]
    matches = torch.ones_like(before)
    found = torch.full_like(lasts, -1)
    for offset in range(max(_LENGTHS)):
        tokens = history.gather(1, (lasts - offset).clamp_min(0)[:, None])
        equal = history == tokens
        if offset:  # places whose predecessor so far back is that of the last token
            equal = torch.nn.functional.pad(equal[:, :-offset], (offset, 0))
        # A suffix that reaches beyond the row's first token is none.
        matches = matches & equal & (lasts[:, None] >= offset)
        if offset + 1 in _LENGTHS:
            latest = torch.where(matches & before, places, -1).amax(1)
            found = torch.where(latest >= 0, latest, found)
    period = (lasts - found).clamp_min(1)[:, None]
    ahead = torch.arange(depth, device=history.device) % period
    drafted = history.gather(1, (found[:, None] + 1 + ahead).clamp_max(history.shape[1] - 1))
    return torch.where(found[:, None] >= 0, drafted, -1).long()


def ngram(depth: int) -> Drafting:
    """The declaration."""
    return Drafting("ngram", depth, lambda parts: NgramDrafter(parts, depth), lambda: (HISTORY,))
