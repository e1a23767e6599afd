"""Kernels of rounds: Triton's (interpreted where there is no GPU) and torch's are one by one what is found by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from phonograph import SamplingParams
from phonograph.engine.ops.kernels import AcceptedTokens, NewTokens, RoundKernels
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.layers.rounds import ReferenceRounds
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.triton import rounds as module
from phonograph.engine.ops.triton.rounds import TritonRounds
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.requests.step import NO_DRAFT, NO_TOKEN, NOT_FINITE
from phonograph.sizes import ceil_div
from speculation import Driver, check, speculating

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS: tuple[RoundKernels, ...] = (ReferenceRounds(), TritonRounds())
LAST_TOKEN = 2**31 - 1
"""The largest that a history holds."""


def numbers(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def first_columns(rows: list[list[int]], further: int) -> torch.Tensor:
    """A table of these rows, which has so many columns more."""
    width = len(rows[0])
    return numbers([[*row, *[9] * further] for row in rows])[:, :width]


def every(stride: int, values: list[int]) -> torch.Tensor:
    """A column of a wider block, as that of a round's first places is."""
    return numbers([[value] + [99] * (stride - 1) for value in values]).view(-1, stride)[:, 0]


# -- what rows went on with -----------------------------------------------------------------------------------


def by_hand(tokens: list[int], depth: int) -> list[int]:
    """The longest of 3- and 2-token suffixes, its latest place; what follows, round and round."""
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                since = tokens[end:]
                return [since[place % len(since)] for place in range(depth)]
    return [-1] * depth


def check_continued(before: list[list[int]], new: list[list[int]], depth: int, num_positions: int, stride: int) -> None:
    """Rows that held some tokens get some more; those without a single token are padding."""
    count, width = len(before), max(1, *map(len, new))
    rows = [number if tokens else 0 for number, tokens in enumerate(before, 1)]
    history = torch.full((count + 2, num_positions), 3, dtype=torch.int32)
    history[0] = 0
    for row, tokens in zip(rows, before, strict=True):
        history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    kept = [more if row else [] for row, more in zip(rows, new, strict=True)]
    given_tokens = torch.full((count, width), 5)
    for place, more in enumerate(kept):
        given_tokens[place, : len(more)] = torch.tensor(more, dtype=torch.int64)
    told = NewTokens(
        every(stride, rows),
        every(stride, [max(0, len(tokens) - 1) for tokens in before]),
        given_tokens.to(DEVICE),
        numbers([len(more) for more in kept]),
    )
    wanted = [by_hand(tokens + more, depth) if row else [-1] * depth
              for row, tokens, more in zip(rows, before, kept, strict=True)]  # fmt: skip
    for kernels in KERNELS:
        drafted, noted = history.to(DEVICE), history.to(DEVICE)
        found = kernels.keep_and_continue(drafted, told, depth)
        assert found.dtype == torch.int64
        assert found.tolist() == wanted, kernels
        kernels.keep(noted, told)
        for written in (drafted, noted):
            for row, tokens, more in zip(rows, before, kept, strict=True):
                if row:
                    held = tokens + more
                    after = history[row, len(held) :].tolist()
                    assert written[row].tolist() == [*held, *after], "what stays, and nothing else"
            assert written[-1].tolist() == history[-1].tolist(), "a row that is not in the step"


few = st.lists(st.integers(0, 3), min_size=0, max_size=30)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(few, st.lists(st.integers(0, 3), max_size=5)), min_size=1, max_size=5), st.integers(1, 7),
       st.sampled_from((1, 2, 4)), st.integers(0, 3))  # fmt: skip
def test_rows_go_on_as_they_did_before(
    held: list[tuple[list[int], list[int]]], depth: int, stride: int, room: int
) -> None:
    before, new = (list(part) for part in zip(*held, strict=True))
    longest = max(len(tokens) + len(more) for tokens, more in held)
    check_continued(before, new, depth, max(1, longest + room), stride)


@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33])
def test_any_number_of_rows(num_rows: int) -> None:
    before = [[(row * place) % 3 for place in range(1 + row % 9)] for row in range(num_rows)]
    check_continued(before, [[1, 2, 0][: row % 4] for row in range(num_rows)], 3, 16, 2)


@pytest.mark.parametrize("depth", range(1, 8))
def test_every_depth_repeats_the_period(depth: int) -> None:
    check_continued([[7, 8, 9, 7, 8, 9], [4, 4], [4, 4, 4], [6]], [[7], [], [4, 4], []], depth, 12, 1)


def test_tokens_at_the_ends_of_a_vocabulary() -> None:
    high = LAST_TOKEN
    check_continued([[high, 0, high, 0], [0, 0, 0], [high] * 4], [[high], [0], []], 4, 6, 1)


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 31, 33])
def test_a_search_in_several_parts(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only place of the suffix anywhere: at the ends of the parts, across them, and at the row's first token."""
    monkeypatch.setattr(module, "_PLACES", 8)
    for place in range(length - 3):
        for size in (2, 3):
            tokens = [100 + number for number in range(length)]
            tokens[place : place + size] = tokens[-size:]
            check_continued([tokens], [[]], 5, length, 1)
    two_then_three = [1, 2, 3, *range(100, 100 + length), 9, 2, 3, *range(200, 200 + length), 1, 2, 3]
    check_continued([two_then_three], [[]], 4, len(two_then_three), 1)


def test_what_has_no_place_is_not_written() -> None:
    """A row that is full, and is told of more: nothing is written past it, nor into the row after it."""
    told = NewTokens(numbers([1]), numbers([3]), numbers([[8, 8, 8]]), numbers([3]))
    for kernels in KERNELS:
        history = numbers([[0] * 5, [1, 2, 1, 2, 7], [6] * 5], torch.int32)
        assert kernels.keep_and_continue(history, told, 2).tolist() == [[-1, -1]]
        assert history.tolist() == [[0] * 5, [1, 2, 1, 2, 8], [6] * 5]


def test_no_rows_at_all() -> None:
    none = numbers([])
    for kernels in KERNELS:
        history = numbers([[0] * 5] * 2, torch.int32)
        found = kernels.keep_and_continue(history, NewTokens(none, none, none.view(0, 3), none), 4)
        assert found.shape == (0, 4)
        assert not history.any()


# -- what stays -----------------------------------------------------------------------------------------------


def accepted(
    kernels: RoundKernels, rows: list[int], starts: list[int], drafted: list[list[int]], picked: list[list[int]],
    depth: list[int], limit: list[int],
) -> tuple[AcceptedTokens, list[int], list[int]]:  # fmt: skip
    """What a kernel finds, and the tables after it; `depth` and `limit` have an entry for every row, 0 included."""
    width = len(picked[0])
    tokens = numbers([[50, *more] for more in drafted]).flatten()
    offsets = torch.arange(width, device=DEVICE)
    positions = (numbers(starts)[:, None] + offsets).flatten()
    table = torch.zeros((len(depth), 4), dtype=torch.int32, device=DEVICE)
    queries = Queries(numbers(rows).repeat_interleave(width), positions, table, tokens_per_row=width)
    last_token, length = (torch.full((len(depth),), 7, device=DEVICE) for _ in "tl")
    last_token[0], length[0] = 0, 0
    found = kernels.accept(queries, tokens, numbers(picked), (numbers(depth), numbers(limit)), last_token, length)
    return found, last_token.tolist(), length.tolist()


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize("further", [0, 3])
def test_places_without_a_draft_are_told_apart(width: int, num_rows: int, further: int) -> None:
    """Rows whose drafts are all right, all wrong, none, or only the first; and padding in between. A narrow round has
    the first columns of the table."""
    kinds = [[5] * (width - 1), [6] * (width - 1), [-1] * (width - 1), [5] + [-1] * (width - 2)]
    rows = [0 if number % 5 == 4 else number + 1 for number in range(num_rows)]
    drafts = first_columns([[5] * (width - 1), *(kinds[number % 4] for number in range(num_rows))], further)
    embedded = drafts[numbers(rows)].clamp_min(0)
    width_range = torch.arange(width, device=DEVICE)
    queries = Queries(
        numbers(rows).repeat_interleave(width), (numbers(rows)[:, None] + width_range).flatten(),
        torch.zeros((num_rows + 1, 4), dtype=torch.int32, device=DEVICE), tokens_per_row=width,
    )  # fmt: skip
    tokens = torch.cat([embedded.new_full((num_rows, 1), 50), embedded], 1).flatten()
    picked = torch.full((num_rows, width), 5, device=DEVICE)
    wanted = {0: [5] * width, 1: [5] + [NO_TOKEN] * (width - 1), 2: [5] + [NO_DRAFT] * (width - 1)}
    wanted[3] = [5, 5] + [NO_DRAFT] * (width - 2)
    bounds = (torch.full((num_rows + 1,), width - 1, device=DEVICE), torch.full((num_rows + 1,), 10_000, device=DEVICE))
    for kernels in KERNELS:
        last_token, length = (torch.zeros(num_rows + 1, dtype=torch.int64, device=DEVICE) for _ in "tl")
        found = kernels.accept(queries, tokens, picked, bounds, last_token, length, drafts)
        for place, row in enumerate(rows):
            expected = wanted[place % 4] if row else [NO_TOKEN] * width
            assert found.block[place].tolist() == expected, (kernels, place)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(2, 8), st.integers(1, 33), st.sampled_from((0, 3)))
def test_token_0_stays_only_where_it_was_drafted(data: st.DataObject, width: int, num_rows: int, further: int) -> None:
    """It is what is computed where nothing was drafted; the model may pick it there too."""
    places = st.lists(st.sampled_from((-1, -1, 0, 0, 0, 1)), min_size=width - 1, max_size=width - 1)
    drafted = [data.draw(places) for _ in range(num_rows)]
    rows = [number if data.draw(st.integers(0, 4)) else 0 for number in range(1, num_rows + 1)]
    drafts = first_columns([[0] * (width - 1), *drafted], further)
    queries = Queries(
        numbers(rows).repeat_interleave(width),
        (numbers(rows)[:, None] + torch.arange(width, device=DEVICE)).flatten(),
        torch.zeros((num_rows + 1, 4), dtype=torch.int32, device=DEVICE), tokens_per_row=width,
    )  # fmt: skip
    tokens = torch.cat([numbers([[50]] * num_rows), numbers(drafted).clamp_min(0)], 1).flatten()
    picked, many = numbers([[0] * width] * num_rows), torch.full((num_rows + 1,), 10_000, device=DEVICE)
    for kernels in KERNELS:
        last_token, length = (torch.full((num_rows + 1,), 7, device=DEVICE) for _ in "tl")
        found = kernels.accept(queries, tokens, picked, (many, many), last_token, length, drafts)
        for place, row in enumerate(rows):
            count = 1 + next((at for at, one in enumerate(drafted[place]) if one), width - 1) if row else 0
            rest = [NO_DRAFT if row and one < 0 else NO_TOKEN for one in [0, *drafted[place]][count:]]
            assert found.block[place].tolist() == [0] * count + rest, kernels
            assert (int(found.counts[place]), int(length[place + 1])) == (count, row + count if row else 7)


def staying(drafted: list[int], picked: list[int], depth: int, room: int) -> int:
    """One place after the other."""
    count = 0
    for place in range(len(picked)):
        if place > depth or place >= room or (place and picked[place - 1] != drafted[place - 1]):
            break
        count += 1
    return count


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 8), st.integers(1, 33))
def test_drafts_stay_as_long_as_they_are_right(data: st.DataObject, width: int, num_rows: int) -> None:
    token, small = st.sampled_from((0, 1, 49_151)), st.integers(-1, width + 1)
    drafted = [data.draw(st.lists(token, min_size=width - 1, max_size=width - 1)) for _ in range(num_rows)]
    picked = [[*more, data.draw(token)] for more in drafted]
    for row, place, wrong in data.draw(st.lists(st.tuples(
        st.integers(0, num_rows - 1), st.integers(0, width - 1), st.sampled_from((1, 7, -1, NOT_FINITE))
    ), max_size=8)):  # fmt: skip
        picked[row][place] = wrong
    rows = [number if data.draw(st.integers(0, 4)) else 0 for number in range(1, num_rows + 1)]
    starts = [3 * row for row in rows]
    depth = [0] + [max(0, data.draw(small)) for _ in rows]
    limit = [0] + [3 * number + data.draw(small) for number in range(1, num_rows + 1)]
    for kernels in KERNELS:
        found, last_token, length = accepted(kernels, rows, starts, drafted, picked, depth, limit)
        for place, row in enumerate(rows):
            wanted = staying(drafted[place], picked[place], depth[row], limit[row] - starts[place]) if row else 0
            says = picked[place][:wanted]
            assert int(found.counts[place]) == wanted, kernels
            assert (int(found.rows[place]), int(found.starts[place])) == (row, starts[place])
            assert found.block[place].tolist() == says + [NO_TOKEN] * (width - wanted)
            assert found.tokens[place].tolist() == [max(0, one) for one in picked[place]]
            if row:
                assert (last_token[row], length[row]) == (max(0, says[-1]) if says else 7, starts[place] + wanted)
            else:
                assert (last_token[place + 1], length[place + 1]) == (7, 7), "a row that is not in the step"
        assert (last_token[0], length[0]) == (0, 0)
        assert all(part.is_contiguous() for part in (found.rows, found.starts, found.counts, found.block, found.tokens))


@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_plain_steps_are_accepted_by_row(num_rows: int) -> None:
    """Positions are in the table of lengths, which is written."""
    rows = [0 if number % 5 == 4 else num_rows - number for number in range(num_rows)]
    table = torch.zeros((num_rows + 1, 4), dtype=torch.int32, device=DEVICE)
    picked, bounds = numbers([[9]] * num_rows), (numbers([0] * (num_rows + 1)), numbers([0, *range(11, num_rows + 11)]))
    for kernels in KERNELS:
        last_token, length = numbers([0] + [7] * num_rows), torch.arange(num_rows + 1, device=DEVICE) * 2
        before = length.tolist()
        queries = Queries(numbers(rows), length, table, tokens_per_row=1, by_row=True)
        found = kernels.accept(queries, last_token, picked, bounds, last_token, length)
        assert found.rows.tolist() == rows
        assert found.starts.tolist() == [before[row] for row in rows]
        stays = [int(row > 0 and before[row] < row + 10) for row in rows]
        assert found.counts.tolist() == stays
        grown = {row: count for row, count in zip(rows, stays, strict=True) if row}
        assert length.tolist() == [old + grown.get(row, 0) for row, old in enumerate(before)]
        assert last_token.tolist() == [0] + [9 if grown.get(row) else 7 for row in range(1, num_rows + 1)]


@pytest.mark.parametrize("num_rows", [31, 32, 33, 64, 65])
def test_rows_in_several_programs(num_rows: int) -> None:
    assert ceil_div(65, module._ROWS) == 3
    rows = list(range(1, num_rows + 1))
    drafted, picked = [[1, 2, 3]] * num_rows, [[1, 2, 3, 4] if row % 2 else [1, 9, 3, 4] for row in rows]
    for kernels in KERNELS:
        found, last_token, length = accepted(
            kernels, rows, rows, drafted, picked, [3] * (num_rows + 1), [999] * (num_rows + 1)
        )
        assert found.counts.tolist() == [4 if row % 2 else 2 for row in rows]
        assert last_token[1:] == [4 if row % 2 else 9 for row in rows]
        assert length[1:] == [row + (4 if row % 2 else 2) for row in rows]


def test_nobody_s_round() -> None:
    found, last_token, _ = accepted(TritonRounds(), [0, 0], [0, 0], [[0], [0]], [[0, 5], [0, 5]], [0, 0], [0, 9])
    assert found.counts.tolist() == [0, 0]
    assert last_token == [0, 7]


# -- what rounds begin and end with ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 7), st.integers(0, 2), st.integers(1, 33), st.sampled_from((2, 256, 49_152)))
def test_rounds_are_the_last_token_and_the_drafts(
    data: st.DataObject, depth: int, further: int, num_rows: int, vocab: int
) -> None:
    any_draft = st.sampled_from((-(1 << 40), -1, 0, 1, vocab - 1, vocab, 1 << 40))
    drafts = [[data.draw(any_draft) for _ in range(depth)] for _ in range(num_rows + 1)]
    last_token = [0, *(row % vocab for row in range(num_rows))]
    length = [0, *(3 * row for row in range(1, num_rows + 1))]
    rows = [number if data.draw(st.integers(0, 4)) else 0 for number in range(1, num_rows + 1)]
    wanted = [(row, length[row] + place, token) for row in rows for place, token in enumerate(
        [last_token[row], *(min(max(draft, 0), vocab - 1) for draft in drafts[row])]
    )]  # fmt: skip
    for kernels in KERNELS:
        tables = first_columns(drafts, further), numbers(last_token), numbers(length)
        found = kernels.spread(numbers(rows), *tables, vocab)
        assert (
            list(zip(*(part.tolist() for part in (found.rows, found.positions, found.tokens)), strict=True)) == wanted
        )


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 33, 300])
@pytest.mark.parametrize("further", [0, 2])
def test_drafts_are_kept_by_row(num_rows: int, depth: int, stride: int, further: int) -> None:
    """Where fewer are found than a row has places for, there are none in the others."""
    rows = [0 if number % 5 == 3 else number + 1 for number in range(num_rows)]
    found = torch.randint(-(1 << 40), 1 << 40, (num_rows, depth), device=DEVICE)
    for kernels in KERNELS:
        drafts = torch.full((num_rows + 2, depth + further), -7, device=DEVICE)
        kernels.keep_drafts(drafts, every(stride, rows), found)
        for number, row in enumerate(rows):
            expected = [*found[number].tolist(), *[-1] * further] if row else [-7] * (depth + further)
            assert drafts[number + 1].tolist() == expected, "padding writes to nobody's row"
        assert drafts[-1].tolist() == [-7] * (depth + further)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine here is on the CPU, where these kernels are interpreted")
def test_an_engine_with_these_kernels_says_what_plain_decoding_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceKernels, "rounds", TritonRounds())
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=20, temperature=0.9, seed=3, frequency_penalty=0.7, logprobs=2, ignore_eos=True)
    core = speculating(ngram(3), "disabled")
    prompts = ((5, 9, 200, 3), (1, 2, 1, 2, 1), (11,) * 9, tuple(range(20, 61)))
    check(Driver(core).run([(prompt, way) for prompt in prompts for way in (params, drawn)]))
    assert core.speculation.counts.tokens > core.speculation.counts.rounds, "some drafts were right"
