"""PrefillBatch: chunks of prompts and rows that decode, as far as the host knows them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from phonograph.engine.ops.queries import Span, Spans
from phonograph.engine.passes.rounds import Rounds
from phonograph.engine.passes.step import PromptChunk, Step
from phonograph.engine.requests.limits import Limits
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.engine.state.column import Array
from phonograph.sizes import ceil_div

_NONE: Array = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt chunks and, before them, rows that decode: their tokens come from the tables."""

    tokens: Any
    rows: Any
    positions: Any
    """Of rows that decode several tokens in a step, the offset from the row's length, which only the tables know."""
    decoding: Any
    ends: Any
    """Index of the last token of every sequence that samples; of one that decodes, all of its tokens. Then those of
    prompt tokens that the likelihood of the next one is wanted after, and of those whose hidden state is wanted."""
    width: int
    needs: SamplingNeeds
    spans: Many[Span] | None
    """Of the sequences whose places the host knows."""
    spans_from: int = 0
    """Index of the first token that spans tell of; before it are those of rows that decode several."""
    targets: Any = None
    """What follows the scored ones of `ends` in their prompts; None where no prompt is scored."""
    following: Any = None
    """The token after each one of a prompt, for rounds that read it; where it is yet to be picked, -1."""
    tokens_per_row: int = 1
    """Tokens of each row that decodes."""
    num_stated: int = 0
    """How many of `ends`, the last, are there for their hidden state."""
    sampled_rows: Any = None
    """The rows that something is sampled for, each once, for the tail of rounds."""

    @property
    def num_sampled(self) -> int:
        """How many of `ends` something is sampled after."""
        count: int = self.ends.shape[0] - self.num_stated
        return count if self.targets is None else count - len(self.targets)


class PrefillBatches:
    """Makes the batches of steps with prefills, decodes first."""

    def __init__(self, limits: Limits, rounds: Rounds | None = None) -> None:
        self._page_size = limits.page_size
        self._is_exact = limits.tokens_per_row == 1
        """Whether the host knows where rows that decode are."""
        self._ahead = 0 if rounds is None else rounds.ahead
        self._has_following = rounds is not None and bool(rounds.taps)

    def batch(self, step: Step) -> PrefillBatch:
        """Rows, tokens and positions as far as the host knows them."""
        chunks, sizes, starts, chunk_rows, samples = _chunks(step)
        lengths = _NONE if step.lengths is None else step.lengths
        decoding, is_exact = step.decodes.rows, self._is_exact
        num_decoding = len(decoding) * step.tokens_per_row
        ends = num_decoding + np.cumsum(sizes)  # of each chunk, one past its last token
        total = num_decoding + int(sizes.sum())
        tokens, is_decoding = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=bool)
        is_decoding[:num_decoding] = True  # their tokens are in the tables
        each = chain.from_iterable(chunk.tokens for chunk in chunks)
        tokens[num_decoding:] = np.fromiter(each, np.int64, total - num_decoding)
        if is_exact:
            told = (decoding, lengths - 1, np.ones_like(decoding)), (chunk_rows, starts, sizes)
            rows, positions = rows_and_positions(*map(np.concatenate, zip(*told, strict=True)))
        else:
            found = rows_and_positions(chunk_rows, starts, sizes)
            rows, positions = after_rounds(decoding, step.tokens_per_row, *found)
        scored, targets, stated = _wanted(chunks, ends - sizes)
        # What goes on from the end of a prompt may have as many places for it as for a round.
        longest = max(lengths.max(initial=0), (starts + sizes + self._ahead * samples).max(initial=0))
        return PrefillBatch(
            tokens,
            rows,
            positions,
            is_decoding,
            np.concatenate([np.arange(num_decoding), (ends - 1)[samples], np.asarray(scored + stated, dtype=np.int64)]),
            ceil_div(int(longest) + self._ahead, self._page_size),
            step.needs,
            self._spans(decoding, lengths, (sizes, starts, chunk_rows), ends - sizes),
            0 if is_exact else num_decoding,
            np.asarray(targets, dtype=np.int64) if targets else None,
            _following(tokens, num_decoding, chunks, ends) if self._has_following else None,
            step.tokens_per_row,
            len(stated),
            None if is_exact else np.concatenate([decoding, chunk_rows[samples]]),
        )

    def _spans(self, decoding: Array, lengths: Array, chunks: Many[Array], firsts: Array) -> Spans:
        """Of rows that decode as far as the host knows where they are, and of chunks."""
        sizes, starts, rows = chunks
        if not self._is_exact:
            return Spans(rows, firsts, starts, sizes)
        own = decoding, np.arange(len(decoding)), lengths - 1, np.ones_like(decoding)
        return Spans(*(np.concatenate(both) for both in zip(own, (rows, firsts, starts, sizes), strict=True)))


def _chunks(step: Step) -> tuple[tuple[PromptChunk, ...], Array, Array, Array, Array]:
    """Those of a step; their sizes, starts and rows, and which of them sample."""
    chunks, count = step.prefills, len(step.prefills)
    told = [(len(chunk.tokens), chunk.start, chunk.row, chunk.samples) for chunk in chunks]
    sizes, starts, rows, samples = np.asarray(told, dtype=np.int64).reshape(count, 4).T
    return chunks, sizes, starts, rows, samples.astype(bool)


def _wanted(chunks: Many[PromptChunk], firsts: Array) -> tuple[list[int], list[int], list[int]]:
    """Indices of tokens that the likelihood of the next one is wanted after, these next ones, and indices of tokens
    whose hidden state is wanted."""
    scored, targets, stated = list[int](), list[int](), list[int]()
    for chunk, first in zip(chunks, firsts.tolist(), strict=True):
        if chunk.targets:
            scored += range(first, first + len(chunk.targets))
            targets += chunk.targets
        if chunk.num_stated:
            stated += range(first, first + chunk.num_stated)
    return scored, targets, stated


def _following(tokens: Array, num_decoding: int, chunks: Many[PromptChunk], ends: Array) -> Array:
    """The token after each one of a prompt, -1 where it is yet to be picked."""
    found = np.full_like(tokens, -1)
    found[num_decoding:-1] = tokens[num_decoding + 1 :]
    found[ends - 1] = [chunk.following for chunk in chunks]
    return found


def after_rounds(decoding: Array, width: int, rows: Array, positions: Array) -> tuple[Array, Array]:
    """The rows and offsets of these rounds, before those of other tokens."""
    offsets = np.tile(np.arange(width, dtype=np.int64), len(decoding))
    return np.concatenate([np.repeat(decoding, width), rows]), np.concatenate([offsets, positions])


def rows_and_positions(rows: Array, starts: Array, counts: Array) -> tuple[Array, Array]:
    """The row and the position of every token of these sequences, one after the other."""
    firsts = np.cumsum(counts) - counts
    return np.repeat(rows, counts), np.arange(int(counts.sum())) + np.repeat(starts - firsts, counts)
