"""mtp: a drafter of modules, each of which predicts one token further on; their keys lie beside the target's.

What a module keeps at slot i is made of token i + 1, as in every module, and of the state of the module before it at
i - 1: so whatever is said, modules fall behind each other by a place, and none waits for tokens that are not known yet.
(A module's positions are all off by the same number, which attention does not see.) The one state that each further
module takes from the step before is in a column; where that is not known, as after a prefix hit, it is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from phonograph.engine.models.mtp import MtpModules
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafting, extended
from phonograph.engine.passes.registry import TARGET_VERIFY
from phonograph.engine.passes.unread import UnreadSize
from phonograph.engine.state.column import Column, Form, TrialRows, Writer

STATES = "mtp_states"


class MtpDrafter:
    """The protocol `ReadsTarget`: module k makes draft k of a round; the last one those that are left, as a chain."""

    def __init__(self, parts: PassParts, modules: MtpModules) -> None:
        self._modules = modules
        self._count = len(modules.modules)
        self._cache = parts.beside[TARGET_VERIFY.name]
        self.reads = self.writes = (STATES,) if self._count > 1 else ()
        self._states = parts.tables[STATES] if self._count > 1 else None
        self.taps = (modules.tap,)
        self.kept = (*self._cache.tensors, *(() if self._states is None else (self._states,)))

    @property
    def _before(self) -> torch.Tensor:
        """[all rows, modules - 1, hidden]: the last state of each module that another one takes."""
        assert self._states is not None
        return self._states.view(self._states.shape[0], self._count - 1, -1)

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._modules.features(taps)

    def read(self, following: torch.Tensor, features: torch.Tensor, queries: Queries) -> None:
        rows, tokens, is_said = queries.rows, following.clamp_min(0), following >= 0
        step, hidden, is_known = self._modules.layers.at(queries, self._cache), features, None
        # In a step, the tokens of a row stand together.
        begins = torch.ones_like(is_said)
        begins[1:] = rows[1:] != rows[:-1]
        left = list[tuple[torch.Tensor, torch.Tensor | None]]()
        for index in range(self._count):
            if index:
                before = self._before[rows, index - 1]
                hidden = torch.where(begins[:, None], before, hidden.roll(1, 0))
                was_known = torch.ones_like(begins) if is_known is None else is_known.roll(1, 0)
                is_known = torch.where(begins, before.any(-1), was_known)
            q, x = self._modules.store(index, tokens, hidden, step, is_known)
            if index + 1 < self._count:
                hidden = torch.add(*step.attend(index, q, x))
                left.append((hidden, is_known))
        if not left:
            return
        # Of each row the last place whose token is known: the place after it comes once more, with the token.
        goes_on = torch.zeros_like(is_said)
        goes_on[:-1] = ~begins[1:] & is_said[1:]
        ends = is_said & ~goes_on
        for index, (state, known) in enumerate(left):
            is_kept = ends if known is None else ends & known
            self._before[:, index].index_put_((rows * ends,), torch.where(is_kept[:, None], state, 0.0))

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        rows, lasts = accepted.rows, (accepted.counts - 1).clamp_min(0)
        drafted, q, x = self._extended(accepted, drafts=True)
        if len(drafted) >= depth:
            return torch.stack(drafted[:depth], dim=1)
        last, queries = self._count - 1, Queries(rows, accepted.starts + lasts, accepted.table, tokens_per_row=1)
        queries = replace(queries, positions=queries.positions + last)
        while True:
            step = self._modules.layers.at(queries, self._cache)
            hidden = torch.add(*step.attend(last, q, x))
            drafted.append(self._modules.likeliest(last, hidden))
            if len(drafted) == depth:
                return torch.stack(drafted, dim=1)
            queries = replace(queries, positions=queries.positions + 1)
            step = self._modules.layers.at(queries, self._cache)
            q, x = self._modules.store(last, drafted[-1], hidden, step)

    def keep_up(self, accepted: Accepted) -> None:
        self._extended(accepted, drafts=False)

    def _extended(self, accepted: Accepted, *, drafts: bool) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """All modules over what was said, each but the first over one place more, which the draft before it is for.

        Returns the drafts of all but the last; and of the last the queries and the residual stream at its last place.
        """
        assert accepted.features is not None
        modules, count = self._modules, self._count
        num_rows, width = accepted.tokens.shape
        here = torch.arange(num_rows, device=accepted.rows.device)
        lasts = (accepted.counts - 1).clamp_min(0)
        # The tokens of all modules: what was said, then what is drafted. Each takes the first part of it.
        said = accepted.tokens.new_zeros((num_rows, width + count - 1))
        said[:, :width] = accepted.tokens
        hidden = accepted.features.view(num_rows, width, -1)
        is_known = torch.ones((num_rows, width), dtype=torch.bool, device=here.device)
        before = None if count == 1 else self._before[accepted.rows]
        drafted, left = list[torch.Tensor](), list[torch.Tensor]()
        for index in range(count):
            places = width + (index if drafts else 0)
            if before is not None and index:
                first = before[:, index - 1 : index]
                hidden = torch.cat([first, hidden[:, : places - 1]], 1)
                is_known = torch.cat([first.any(-1), is_known[:, : places - 1]], 1)
            step = modules.layers.at(extended(accepted, places), self._cache)
            known = is_known.flatten() if index else None
            q, x = modules.store(index, said[:, :places].flatten(), hidden.flatten(0, 1), step, known)
            if index + 1 == count:
                break
            hidden = torch.add(*step.attend(index, q, x)).view(num_rows, places, -1)
            left.append(torch.where(is_known[here, lasts][:, None], hidden[here, lasts], 0.0))
            if drafts:
                drafted.append(modules.likeliest(index, hidden[here, lasts + index]))
                said[here, lasts + index + 1] = drafted[-1]
        if before is not None:
            # A row that got nothing stays where it was; row 0 is nobody's.
            stays, now = (accepted.counts > 0)[:, None, None], torch.stack(left, 1)
            now = torch.where((accepted.rows > 0)[:, None, None], torch.where(stays, now, before), 0.0)
            self._before.index_put_((accepted.rows,), now)
        chosen = here * places + lasts + (places - width)
        return drafted, q[chosen], x[chosen]


def mtp(modules: MtpModules, depth: int, unread_places: int = 0) -> Drafting:
    """The declaration; with places for unread tokens, plain steps leave states for the modules, and don't run them."""
    hidden, count = modules.embedding.shape[1], len(modules.modules)

    def states(trial: TrialRows) -> torch.Tensor:
        found = torch.randn(trial.count, (count - 1) * hidden, generator=trial.numbers)
        return found * (torch.arange(trial.count) % 3 > 0)[:, None]

    column = Column(
        STATES,
        modules.embedding.dtype,
        width=max(1, count - 1) * hidden,
        # A row begins, and a step that is undone goes on, with what costs a draft and no token.
        writer=Writer.ENTRY | Writer.GRAPH,
        form=Form.RESET,
        trial=states,
    )

    def columns() -> Sequence[Column]:
        return (column,) if count > 1 else ()

    return Drafting(
        "mtp",
        depth,
        lambda parts: MtpDrafter(parts, modules),
        columns,
        keeps=lambda model: modules.layers.keeps,
        weights=(modules.modules, modules.layers.weights),
        unread=UnreadSize.of(unread_places, 1, modules.embedding),
    )
