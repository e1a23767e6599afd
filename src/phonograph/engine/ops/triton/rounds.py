"""TritonRounds: what stays of rounds of drafts, and how rows went on before; one launch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from phonograph.engine.ops.kernels import AcceptedTokens, LeftTokens, NewTokens, ReadMarks, RoundTokens, Unread
from phonograph.engine.ops.layers.rounds import ReferenceRounds
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.triton.dependent_launch import begin, code, dependent, wait_for_inputs
from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.ops.tuning import Overlap
from phonograph.engine.requests.step import NO_DRAFT, NO_TOKEN
from phonograph.sizes import ceil_div, next_power_of_two

_ROWS = 32
"""Rows of a program that accepts."""
_TOKENS = 256
"""Tokens of a program that spreads rounds, or keeps drafts."""
_PLACES = 2048
"""Places that a program compares at a time."""
_MOST_TAPS = 3
"""Tapped states that one launch takes."""
_REFERENCE = ReferenceRounds()


@kernel(unspecialised=["num_tokens"])
def _spread(
    rows_ptr, drafts_ptr, last_token_ptr, length_ptr, out_rows_ptr, positions_ptr, tokens_ptr, num_tokens, drafts_row,
    vocab: tl.constexpr, width: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Some tokens of rounds, each by its row and its place in the round."""
    begin(overlap)
    wait_for_inputs(overlap)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside, offset = at < num_tokens, at % width
    row = tl.load(rows_ptr + at // width, mask=inside, other=0)
    start = tl.load(length_ptr + row, mask=inside, other=0)
    last = tl.load(last_token_ptr + row, mask=inside & (offset == 0), other=0)
    draft = tl.load(drafts_ptr + row * drafts_row + offset - 1, mask=inside & (offset > 0), other=0)
    token = tl.where(offset == 0, last, tl.minimum(tl.maximum(draft, 0), vocab - 1))
    tl.store(out_rows_ptr + at, row, mask=inside)
    tl.store(positions_ptr + at, start + offset, mask=inside)
    tl.store(tokens_ptr + at, token, mask=inside)


@kernel(unspecialised=["num_drafts"])
def _keep_drafts(
    drafts_ptr, rows_ptr, found_ptr, read_to_ptr, length_ptr, num_drafts, rows_step,
    depth: tl.constexpr, found_depth: tl.constexpr, has_marks: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Some drafts, and none in the places after those that were found; those of padding go nowhere. The first place
    of a row marks it as read."""
    begin(overlap)
    wait_for_inputs(overlap)
    at = tl.program_id(0) * block + tl.arange(0, block)
    number, place = at // depth, at % depth
    row = tl.load(rows_ptr + number * rows_step, mask=at < num_drafts, other=0)
    is_found = (at < num_drafts) & (place < found_depth)
    found = tl.load(found_ptr + number * found_depth + place, mask=is_found, other=-1)
    tl.store(drafts_ptr + row * depth + place, found, mask=row > 0)
    if has_marks:
        is_first = (row > 0) & (place == 0)
        tl.store(read_to_ptr + row, tl.load(length_ptr + row, mask=is_first, other=0), mask=is_first)


@kernel()
def _leave(
    rows_ptr, positions_ptr, tokens_ptr, following_ptr, first_ptr, second_ptr, third_ptr, states_ptr, ring_ptr,
    read_to_ptr, first_row, second_row, third_row,
    has_following: tl.constexpr, by_row: tl.constexpr, places: tl.constexpr, width: tl.constexpr, columns: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One tapped state of a token to its place; the first of them takes the token along, and marks the row."""
    begin(overlap)
    wait_for_inputs(overlap)
    number, tap, taps = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows_ptr + number).to(tl.int64)
    is_left = row > 0
    if has_following:
        is_left = is_left & (tl.load(following_ptr + number) < 0)
    if is_left:
        at = row if by_row else number
        position = tl.load(positions_ptr + at).to(tl.int64)
        place = row * places + position % places
        column = tl.arange(0, columns)
        line = first_ptr + number * first_row
        if tap == 1:
            line = second_ptr + number * second_row
        elif tap == 2:
            line = third_ptr + number * third_row
        state = tl.load(line + column, mask=column < width, other=0.0)
        tl.store(
            states_ptr + (place * taps + tap) * width + column,
            state.to(states_ptr.dtype.element_ty),
            mask=column < width,
        )
        if tap == 0:
            tl.store(ring_ptr + place, tl.load(tokens_ptr + at))
            tl.atomic_min(read_to_ptr + row, position, sem="relaxed")


@kernel(unspecialised=["num_tokens"])
def _left(
    rows_ptr, length_ptr, last_token_ptr, read_to_ptr, states_ptr, ring_ptr, starts_ptr, counts_ptr, tokens_ptr,
    taken_ptr, num_tokens, rows_step, places: tl.constexpr, width: tl.constexpr, columns: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One tapped state of a place of a row; the first tap has the token after it, the first place where the row's
    begin."""
    begin(overlap)
    wait_for_inputs(overlap)
    at, tap, taps = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    number, offset = at // places, at % places
    row = tl.load(rows_ptr + number * rows_step).to(tl.int64)
    end = tl.load(length_ptr + row)
    unread = tl.minimum(tl.maximum(end - tl.load(read_to_ptr + row), 0), places)
    count = tl.where(row > 0, unread, 0)
    start = end - count
    place = row * places + (start + offset) % places
    column = tl.arange(0, columns)
    state = tl.load(states_ptr + (place * taps + tap) * width + column, mask=column < width, other=0.0)
    tl.store(taken_ptr + (tap.to(tl.int64) * num_tokens + at) * width + column, state, mask=column < width)
    if tap == 0:
        after = tl.load(ring_ptr + row * places + (start + offset + 1) % places)
        tl.store(tokens_ptr + at, tl.where(offset == count - 1, tl.load(last_token_ptr + row), after))
        if offset == 0:
            tl.store(starts_ptr + number, start)
            tl.store(counts_ptr + number, count)


@kernel(unspecialised=["num_rows"])
def _accept(
    rows_ptr, positions_ptr, tokens_ptr, picked_ptr, depth_ptr, limit_ptr, drafts_ptr, last_token_ptr, length_ptr,
    out_rows_ptr, starts_ptr, counts_ptr, block_ptr, said_ptr, num_rows, drafts_row,
    none: tl.constexpr, no_draft: tl.constexpr, has_drafts: tl.constexpr, by_row: tl.constexpr,
    width: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Some rows, each with all places of its round."""
    begin(overlap)
    wait_for_inputs(overlap)
    number = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.arange(0, columns)[None, :]
    row = tl.load(rows_ptr + number * width, mask=number < num_rows, other=0)
    real = row > 0
    start = tl.load(positions_ptr + (row if by_row else number * width), mask=real, other=0)
    at = number[:, None] * width + place
    inside = (number < num_rows)[:, None] & (place < width)
    picked = tl.load(picked_ptr + at, mask=inside, other=0)
    has_draft = inside & (place < width - 1)
    drafted = tl.load(tokens_ptr + at + 1, mask=has_draft, other=0)
    line = drafts_ptr + row[:, None].to(tl.int64) * drafts_row
    if has_drafts:
        # Where nothing was drafted a token is computed all the same, and being what was picked is no merit of it.
        has_draft = has_draft & (tl.load(line + place, mask=has_draft & real[:, None], other=0) >= 0)
    # The first place after which a draft is not what was picked; after the last there is none.
    right = tl.min(tl.where(has_draft & (picked == drafted), columns, place), 1) + 1
    depth, limit = tl.load(depth_ptr + row, mask=real, other=0), tl.load(limit_ptr + row, mask=real, other=0)
    most = tl.minimum(depth + 1, limit - start)
    count = tl.where(real, tl.maximum(tl.minimum(right, most), 0), 0)
    said = tl.maximum(picked, 0)
    last = tl.sum(tl.where(place == count[:, None] - 1, said, 0), 1)
    tl.store(last_token_ptr + row, last, mask=real & (count > 0))
    tl.store(length_ptr + row, start + count, mask=real)
    tl.store(out_rows_ptr + number, row, mask=number < num_rows)
    tl.store(starts_ptr + number, start, mask=number < num_rows)
    tl.store(counts_ptr + number, count, mask=number < num_rows)
    rest = tl.full((block, columns), none, picked_ptr.dtype.element_ty)
    if has_drafts:
        told = inside & (place > 0) & real[:, None]
        kept = tl.load(line + place - 1, mask=told, other=0)
        rest = tl.where(kept < 0, no_draft, rest)
    tl.store(block_ptr + at, tl.where(place < count[:, None], picked, rest), mask=inside)
    tl.store(said_ptr + at, said, mask=inside)


@kernel(unspecialised=["num_positions"])
def _keep_and_continue(
    history_ptr, rows_ptr, starts_ptr, tokens_ptr, counts_ptr, drafts_ptr,
    history_row, num_positions, rows_step, starts_step, tokens_row,
    width: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, depths: tl.constexpr, places: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One row: its new tokens into its history, then a search from the end, for three tokens or else two."""
    begin(overlap)
    wait_for_inputs(overlap)
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + number * rows_step).to(tl.int64)
    start = tl.load(starts_ptr + number * starts_step).to(tl.int64)
    count = tl.load(counts_ptr + number).to(tl.int64)
    line = history_ptr + row * history_row
    offset = tl.arange(0, columns)
    place = start + 1 + offset
    stays = (offset < tl.where(row > 0, tl.minimum(count, width), 0)) & (place < num_positions)
    new = tl.load(tokens_ptr + number * tokens_row + offset, mask=stays, other=0)
    tl.store(line + place, new.to(history_ptr.dtype.element_ty), mask=stays)
    if depth > 0:
        tl.debug_barrier()  # what one thread wrote, others read
        last = tl.minimum(start + count, num_positions - 1)
        one = tl.load(line + last)
        two = tl.load(line + tl.maximum(last - 1, 0))
        three = tl.load(line + tl.maximum(last - 2, 0))
        longest, shorter = last * 0 - 1, last * 0 - 1
        end = tl.where(row > 0, last, 0)
        while (end > 0) & (longest < 0):
            at = end - 1 - tl.arange(0, places)
            matches = tl.load(line + at, mask=at >= 1, other=0) == one
            matches = matches & (at >= 1) & (tl.load(line + at - 1, mask=at >= 1, other=0) == two)
            shorter = tl.maximum(shorter, tl.max(tl.where(matches, at, -1), 0))
            matches = matches & (at >= 2) & (tl.load(line + at - 2, mask=at >= 2, other=0) == three)
            longest = tl.max(tl.where(matches, at, -1), 0)
            end -= places
        found = tl.where(longest >= 0, longest, shorter)
        ahead = tl.arange(0, depths)
        next_place = found + 1 + ahead % tl.maximum(last - found, 1)
        drafted = tl.load(line + next_place, mask=ahead < tl.where(found >= 0, depth, 0), other=-1)
        tl.store(drafts_ptr + number * depth + ahead, drafted.to(tl.int64), mask=ahead < depth)


class TritonRounds:
    """The protocol `RoundKernels`; the same integers as the reference. All kernels are small, so whatever follows may
    come at once where launches overlap."""

    def __init__(self, overlap: Overlap = "none") -> None:
        self._launch = {"overlap": code(overlap), **dependent(overlap)}

    def spread(
        self, rows: torch.Tensor, drafts: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor, vocab: int
    ) -> RoundTokens:
        width = drafts.shape[1] + 1
        num_tokens = rows.shape[0] * width
        found = RoundTokens(*(torch.empty(num_tokens, dtype=torch.int64, device=rows.device) for _ in range(3)))
        if num_tokens:
            _spread[(ceil_div(num_tokens, _TOKENS),)](
                rows.contiguous(), drafts, last_token, length, found.rows, found.positions, found.tokens, num_tokens,
                drafts.stride(0), vocab=vocab, width=width, block=_TOKENS, num_warps=4, **self._launch,
            )  # fmt: skip
        return found

    def keep_drafts(
        self, drafts: torch.Tensor, rows: torch.Tensor, found: torch.Tensor, marks: ReadMarks | None = None
    ) -> None:
        found, depth = found.to(drafts.dtype).contiguous(), drafts.shape[1]
        if num_drafts := found.shape[0] * depth:
            tables = (drafts, drafts) if marks is None else (marks.read_to, marks.length)
            _keep_drafts[(ceil_div(num_drafts, _TOKENS),)](
                drafts, rows, found, *tables, num_drafts, rows.stride(0), depth=depth, found_depth=found.shape[1],
                has_marks=marks is not None, block=_TOKENS, num_warps=4, **self._launch,
            )  # fmt: skip

    def leave(
        self,
        unread: Unread,
        queries: Queries,
        tokens: torch.Tensor,
        taps: Sequence[torch.Tensor],
        following: torch.Tensor | None = None,
    ) -> None:
        if not 1 <= len(taps) <= _MOST_TAPS:
            _REFERENCE.leave(unread, queries, tokens, taps, following)
            return
        (num_tokens, width), three = taps[0].shape, (*taps, taps[-1], taps[-1])[:3]
        if num_tokens:
            columns = next_power_of_two(width)
            _leave[(num_tokens, len(taps))](
                queries.rows, queries.positions, tokens, tokens if following is None else following, *three,
                unread.states, unread.tokens, unread.read_to, *(tap.stride(0) for tap in three),
                has_following=following is not None, by_row=queries.by_row, places=unread.tokens.shape[1],
                width=width, columns=columns, num_warps=min(8, max(1, columns // 512)),
                **self._launch,
            )  # fmt: skip

    def left(self, unread: Unread, rows: torch.Tensor, length: torch.Tensor, last_token: torch.Tensor) -> LeftTokens:
        (_, places, taps, width), num_rows = unread.states.shape, rows.shape[0]
        taken = unread.states.new_empty((taps, num_rows * places, width))
        starts, counts, tokens = (rows.new_empty(shape) for shape in (num_rows, num_rows, (num_rows, places)))
        if num_rows:
            columns = next_power_of_two(width)
            _left[(num_rows * places, taps)](
                rows, length, last_token, unread.read_to, unread.states, unread.tokens, starts, counts, tokens, taken,
                num_rows * places, rows.stride(0), places=places, width=width, columns=columns,
                num_warps=min(8, max(1, columns // 512)), **self._launch,
            )  # fmt: skip
        return LeftTokens(starts, tokens, counts, taken.unbind(0))

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
        picked = picked.contiguous()
        (num_rows, width), (depth, limit) = picked.shape, bounds
        whole, each = (num_rows, width), (num_rows,)
        found = AcceptedTokens(*(picked.new_empty(shape) for shape in (each, each, each, whole, whole)))
        if num_rows:
            _accept[(ceil_div(num_rows, _ROWS),)](
                queries.rows, queries.positions, tokens.contiguous(), picked,
                depth, limit, depth if drafts is None else drafts, last_token, length,
                found.rows, found.starts, found.counts, found.block, found.tokens,
                num_rows, 0 if drafts is None else drafts.stride(0),
                none=NO_TOKEN, no_draft=NO_DRAFT, has_drafts=drafts is not None and width > 1, by_row=queries.by_row,
                width=width, columns=next_power_of_two(width), block=_ROWS, num_warps=1, **self._launch,
            )  # fmt: skip
        return found

    def keep(self, history: torch.Tensor, new: NewTokens) -> None:
        self._run(history, new, 0, new.counts)

    def keep_and_continue(self, history: torch.Tensor, new: NewTokens, depth: int) -> torch.Tensor:
        drafts = torch.empty((new.rows.shape[0], depth), dtype=torch.int64, device=history.device)
        self._run(history, new, depth, drafts)
        return drafts

    def _run(self, history: torch.Tensor, new: NewTokens, depth: int, drafts: torch.Tensor) -> None:
        """`drafts` is written where there is a depth."""
        num_rows, width = new.tokens.shape
        if num_rows:
            _keep_and_continue[(num_rows,)](
                history, new.rows, new.starts, new.tokens, new.counts.contiguous(), drafts,
                history.stride(0), history.shape[1], new.rows.stride(0), new.starts.stride(0), new.tokens.stride(0),
                width=width, columns=next_power_of_two(width), depth=depth, depths=next_power_of_two(max(1, depth)),
                places=_PLACES if depth else 1, num_warps=8 if depth else 1, **self._launch,
            )  # fmt: skip
