"""Unread tokens: what plain steps leave for a drafter that reads hidden states, so that it runs in few of them.

A ring of some places a row holds tapped states and tokens. When it is full, and before rows go on in rounds, the pass
`draft_extend` reads all of it at once. Nothing of this is known to the host but how many steps there were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.engine.ops.kernels import Unread
from phonograph.engine.state.column import Column, Form, TrialRows, Writer
from phonograph.engine.state.tables import RequestTables

STATES, TOKENS, READ_TO = "unread_states", "unread_tokens", "read_to"
NAMES = (STATES, TOKENS, READ_TO)
_ALL = 1 << 60
"""In `read_to`: nothing is unread, however long the row is, until it leaves something."""


@dataclass(frozen=True)
class UnreadSize:
    """What is left of a token, and of how many tokens of a row at most: no fewer than a round has."""

    places: int
    num_taps: int
    hidden: int
    dtype: torch.dtype

    @classmethod
    def of(cls, places: int, num_taps: int, embedding: torch.Tensor) -> UnreadSize | None:
        """For a model with these embeddings; None where every token is read in its own step."""
        # The residual stream of a float16 model is in float32, since its values may be beyond float16's.
        dtype = torch.float32 if embedding.dtype == torch.float16 else embedding.dtype
        return cls(places, num_taps, embedding.shape[1], dtype) if places else None

    def columns(self) -> tuple[Column, ...]:
        """What every row has. A step that is undone goes on as if all were read, which costs drafts and no token."""
        width = self.places * self.num_taps * self.hidden

        def states(trial: TrialRows) -> torch.Tensor:
            return torch.randn(trial.count, width, generator=trial.numbers)

        def tokens(trial: TrialRows) -> torch.Tensor:
            return torch.randint(0, trial.vocab, (trial.count, self.places), generator=trial.numbers)

        written = Writer.ENTRY | Writer.GRAPH
        return (
            Column(STATES, self.dtype, width=width, writer=written, form=Form.RESET, trial=states),
            Column(TOKENS, torch.int64, width=self.places, writer=written, form=Form.RESET, trial=tokens),
            Column(
                READ_TO,
                torch.int64,
                default=_ALL,
                writer=written,
                value=lambda entry: _ALL,
                # Rows of trials share what is before their own page.
                trial=lambda trial: trial.whole(trial.page_size, trial.num_positions),
                is_public=True,
            ),
        )

    def in_tables(self, tables: RequestTables) -> Unread:
        """The tensors."""
        states = tables[STATES].view(-1, self.places, self.num_taps, self.hidden)
        return Unread(states, tables[TOKENS].view(-1, self.places), tables[READ_TO])
