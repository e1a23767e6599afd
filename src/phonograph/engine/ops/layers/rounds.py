"""ReferenceRounds: what stays of rounds of drafts, and how rows went on before; torch ops, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from phonograph.engine.ops.kernels import AcceptedTokens, LeftTokens, NewTokens, ReadMarks, RoundTokens, Unread
from phonograph.engine.ops.queries import Queries
from phonograph.engine.requests.step import NO_DRAFT, NO_TOKEN

SUFFIXES = (3, 2)
"""Lengths of what is looked for: a longer match is believed before a shorter one."""


class ReferenceRounds:
    """The protocol `RoundKernels`."""

    def spread(
        self, rows: torch.Tensor, drafts: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor, vocab: int
    ) -> RoundTokens:
        width = drafts.shape[1] + 1
        offsets = torch.arange(width, device=rows.device).repeat(rows.shape[0])
        flat = rows.repeat_interleave(width)
        return RoundTokens(flat, length[flat] + offsets, tokens_at(flat, offsets, drafts, last_token, vocab))

    def keep_drafts(
        self, drafts: torch.Tensor, rows: torch.Tensor, found: torch.Tensor, marks: ReadMarks | None = None
    ) -> None:
        all_places = functional.pad(found.to(drafts.dtype), (0, drafts.shape[1] - found.shape[1]), value=-1)
        drafts.index_put_((rows,), all_places * (rows > 0)[:, None])
        if marks is not None:
            mark_read(marks, rows)

    def leave(
        self,
        unread: Unread,
        queries: Queries,
        tokens: torch.Tensor,
        taps: Sequence[torch.Tensor],
        following: torch.Tensor | None = None,
    ) -> None:
        is_left, positions = queries.rows > 0, queries.token_positions
        is_left = is_left if following is None else is_left & (following < 0)
        tokens = tokens[queries.rows] if queries.by_row else tokens
        # All others write zeros to one place of the null row, which nobody reads.
        rows, places = queries.rows * is_left, positions % unread.tokens.shape[1] * is_left
        unread.tokens.index_put_((rows, places), tokens * is_left)
        for tap, states in enumerate(taps):
            kept = torch.where(is_left[:, None], states, 0.0).to(unread.states.dtype)
            unread.states.index_put_((rows, places, torch.full_like(rows, tap)), kept)
        # In a round a row leaves several, so that the first is the least.
        marks = torch.where(is_left, positions, torch.iinfo(positions.dtype).max)
        unread.read_to.scatter_reduce_(0, rows, marks, "amin")

    def left(self, unread: Unread, rows: torch.Tensor, length: torch.Tensor, last_token: torch.Tensor) -> LeftTokens:
        most, ends = unread.tokens.shape[1], length[rows]
        counts = (ends - unread.read_to[rows]).clamp(0, most) * (rows > 0)
        starts, offsets = ends - counts, torch.arange(most, device=rows.device)
        places = (starts[:, None] + offsets) % most
        states = unread.states[rows[:, None], places].flatten(0, 1)
        is_last, after = offsets == counts[:, None] - 1, unread.tokens[rows[:, None], (places + 1) % most]
        return LeftTokens(starts, torch.where(is_last, last_token[rows][:, None], after), counts, states.unbind(1))

    def accept(
        self,
        queries: Queries,
        tokens: torch.Tensor,
        picked: torch.Tensor,
        bounds: tuple[torch.Tensor, torch.Tensor],
        last_token: torch.Tensor,
        length: torch.Tensor,
        drafts: torch.Tensor | None = None,
    ) -> AcceptedTokens:
        width = picked.shape[1]
        depth, limit = bounds
        rows, starts = (part.view(-1, width)[:, 0].contiguous() for part in (queries.rows, queries.token_positions))
        real, right = rows > 0, torch.ones_like(rows)
        if width > 1:
            is_right = picked[:, :-1] == tokens.view(-1, width)[:, 1:]
            # Where nothing was drafted a token is computed all the same, and being what was picked is no merit of it.
            is_right = is_right if drafts is None else is_right & (drafts[rows] >= 0)
            right = right + is_right.long().cumprod(1).sum(1)
        most = torch.minimum(depth[rows] + 1, limit[rows] - starts)
        counts = torch.minimum(right, most).clamp_min(0) * real
        said = picked.clamp_min(0)
        found = said.gather(1, (counts - 1).clamp_min(0)[:, None])[:, 0]
        last_token.index_put_((rows,), torch.where(counts > 0, found, last_token[rows]) * real)
        length.index_put_((rows,), (starts + counts) * real)
        block = as_block(picked, counts)
        if drafts is not None and width > 1:
            nothing = (drafts[rows] < 0) & (block[:, 1:] == NO_TOKEN) & real[:, None]
            block[:, 1:].masked_fill_(nothing, NO_DRAFT)
        return AcceptedTokens(rows, starts, counts, block, said)

    def keep(self, history: torch.Tensor, new: NewTokens) -> None:
        offsets = torch.arange(new.tokens.shape[1], device=history.device)
        places = new.starts[:, None] + 1 + offsets
        stays = (offsets < new.counts[:, None]) & (places < history.shape[1]) & (new.rows > 0)[:, None]
        # What does not stay goes to the null row, which nobody reads.
        rows, tokens = new.rows[:, None] * stays, (new.tokens * stays).to(history.dtype)
        history.index_put_((rows, places * stays), tokens)

    def keep_and_continue(self, history: torch.Tensor, new: NewTokens, depth: int) -> torch.Tensor:
        self.keep(history, new)
        lasts = (new.starts + new.counts).clamp_max(history.shape[1] - 1)
        return torch.where((new.rows > 0)[:, None], continued(history[new.rows], lasts, depth), -1)


def mark_read(marks: ReadMarks, rows: torch.Tensor) -> None:
    """All that these rows have is read."""
    marks.read_to.index_put_((rows,), marks.length[rows])


def tokens_at(
    rows: torch.Tensor, offsets: torch.Tensor, drafts: torch.Tensor, last_token: torch.Tensor, vocab: int
) -> torch.Tensor:
    """The token that each of these rows computes so many places after its length; at 0 it is the last token."""
    # Whatever a drafter returns, only valid tokens are embedded.
    drafted = drafts[rows, (offsets - 1).clamp_min(0)].clamp(0, vocab - 1)
    return torch.where(offsets == 0, last_token[rows], drafted)


def as_block(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[num_rows, tokens_per_row]: of each row's tokens the first `counts`, then none."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(places < counts[:, None], tokens, NO_TOKEN)


def continued(history: torch.Tensor, lasts: torch.Tensor, depth: int) -> torch.Tensor:
    """[num_rows, depth]: what followed the latest place of the longest suffix, -1 for all where there is none.

    The last token of a row of `history` ([num_rows, num_positions]) is at `lasts` ([num_rows]). Where the end of the
    row is reached, the tokens since that place repeat themselves.
    """
    places = torch.arange(history.shape[1], device=history.device)
    before = places < lasts[:, None]
    matches = torch.ones_like(before)
    found = torch.full_like(lasts, -1)
    for offset in range(max(SUFFIXES)):
        tokens = history.gather(1, (lasts - offset).clamp_min(0)[:, None])
        equal = history == tokens
        if offset:  # places whose predecessor so far back is that of the last token
            equal = torch.nn.functional.pad(equal[:, :-offset], (offset, 0))
        # A suffix that reaches beyond the row's first token is none.
        matches = matches & equal & (lasts[:, None] >= offset)
        if offset + 1 in SUFFIXES:
            latest = torch.where(matches & before, places, -1).amax(1)
            found = torch.where(latest >= 0, latest, found)
    period = (lasts - found).clamp_min(1)[:, None]
    ahead = torch.arange(depth, device=history.device) % period
    drafted = history.gather(1, (found[:, None] + 1 + ahead).clamp_max(history.shape[1] - 1))
    return torch.where(found[:, None] >= 0, drafted, -1).long()
