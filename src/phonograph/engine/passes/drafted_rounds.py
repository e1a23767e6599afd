"""DraftedRounds: what a row computes is its last token and what was drafted after it; how many of them stay.

Both passes of an engine that speculates have one: steps of decodes alone, and mixed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phonograph.engine.ops.kernels import ReadMarks, RoundKernels, RoundTokens
from phonograph.engine.ops.layers.rounds import mark_read, tokens_at
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafter, ReadsTarget
from phonograph.engine.passes.readback import Picked
from phonograph.engine.passes.unread import NAMES, UnreadSize
from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.requests.request import MAX_LOGPROBS
from phonograph.engine.requests.step import NO_TOKEN
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.engine.sampling.penalties import count_tokens
from phonograph.engine.sampling.sampler import TopLogprobs
from phonograph.errors import DeclarationError
from phonograph.graphs.phases.context import Stage, current
from phonograph.graphs.phases.opaque import opaque


def _fake_verified(logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """What the opaque call returns: tokens, what is accepted, and logprobs where they are needed."""
    width, (_, has_logprobs, *_) = others[_WIDTH], others[_NEEDS]
    num = logits.shape[0] // width
    whole = [logits.new_empty(shape, dtype=torch.int64) for shape in ((num, width), num, num, (num, width), num)]
    if not has_logprobs:
        return tuple(whole)
    top = (num, width, min(MAX_LOGPROBS, logits.shape[1]))
    likely = [logits.new_empty(shape, dtype=torch.float32) for shape in (top[:2], top)]
    return (*whole, likely[0], logits.new_empty(top, dtype=torch.int64), likely[1])


_WIDTH, _NEEDS = 2, 3
"""Where `DraftedRounds._verify` has them, after the logits."""


def _fake_features(taps: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    return taps[0].new_empty(taps[0].shape, dtype=dtype)


def _fake_read(taps: tuple[torch.Tensor, ...], following: Any, places: Any, kept: Any) -> torch.Tensor:
    return _fake_features(taps, kept[0].dtype)


def _no_result(*args: Any) -> None:
    return None


class DraftedRounds:
    """The protocol `Rounds`: what each row computes is its last token, and what was drafted after it."""

    def __init__(self, parts: PassParts, drafter: Drafter, unread: UnreadSize | None = None) -> None:
        self._parts = parts
        self._drafter = drafter
        self._failures = parts.drafter_failures
        if unread is not None and unread.places < parts.limits.tokens_per_row:
            found = f"{unread.places} places for what is unread, and rounds of {parts.limits.tokens_per_row} tokens"
            raise DeclarationError(f"{found}, which leave a state each. Give it as many places at least.")
        self._unread = None if unread is None else unread.in_tables(parts.tables)
        self._reader = drafter if isinstance(drafter, ReadsTarget) else None
        self.taps: tuple[int, ...] = () if self._reader is None else self._reader.taps
        self._kept: tuple[torch.Tensor, ...] = () if self._reader is None else self._reader.kept
        if self._unread is not None:
            self._kept = (*self._kept, self._unread.read_to)
        self.leaves: Sequence[str] = () if self._unread is None else NAMES
        self.reads: Sequence[str] = ("limit", "depth", "draft", *self.leaves)
        self.writes: Sequence[str] = ("draft", *self.leaves)
        self._vocab = parts.model.config.vocab
        self.width = parts.limits.tokens_per_row
        self.ahead = self.width - 1
        self._opaque_verify = opaque(self._verify, fake=_fake_verified, mutates=("last_token", "length"))
        self._opaque_draft = opaque(self._draft, fake=_no_result, mutates=("drafts", "kept"))
        self._opaque_leave = opaque(self._leave, fake=_no_result, mutates=("states", "ring", "read_to"))
        self._opaque_extend = opaque(self._extend, fake=_no_result, mutates=("drafts", "kept"))
        self._opaque_read = opaque(self._read, fake=_fake_read, mutates=("kept",))
        self._opaque_features = opaque(self._features, fake=_fake_features)

    @property
    def _drafts(self) -> torch.Tensor:
        """[max_seqs + 1, depth], also where that is 1."""
        return self._parts.tables["draft"].view(-1, self.width - 1)

    def _drafts_of(self, width: int) -> torch.Tensor:
        """Of every row those that a round of this width takes."""
        return self._drafts[:, : width - 1]

    def tokens(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return tokens_at(rows, offsets, self._drafts, self._parts.tables.last_token, self._vocab)

    def spread(self, rows: torch.Tensor, width: int, kernels: RoundKernels) -> RoundTokens:
        """All tokens of a round of these rows."""
        tables = self._parts.tables
        return kernels.spread(rows, self._drafts_of(width), tables.last_token, tables.length, self._vocab)

    def verify(
        self, logits: torch.Tensor, tokens: torch.Tensor, queries: Queries, needs: SamplingNeeds
    ) -> tuple[Picked, Accepted]:
        """Pick what follows each token, find how many of each row stay, and note these in the tables."""
        width = queries.tokens_per_row
        assert width is not None
        tables, places = self._parts.tables, (queries.rows, queries.positions, queries.table)
        asked = (needs.level.value, needs.logprobs, needs.constrained, needs.masked)
        run = self._opaque_verify if current().stage is Stage.COMPILING else self._verify
        block, rows, starts, said, counts, *logprobs = run(
            logits, tokens, places, width, asked, queries.by_row, tables.last_token, tables.length
        )
        if width == 1:
            # Of a row that is past its end nobody takes the token.
            block, logprobs = block[:, 0], [part[:, 0] for part in logprobs]
        picked = Picked(block, TopLogprobs(*logprobs) if logprobs else None)
        return picked, Accepted(rows, starts, said, counts, queries.table)

    def _verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        width: int,
        asked: tuple[int, bool, bool, bool],
        by_row: bool,
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """As one call that no compiler looks into. The tables are the ones that it has; as arguments, they say what is
        written."""
        level, *others = asked
        queries, needs = Queries(*places, width, by_row=by_row), SamplingNeeds(Sampling(level), *others)
        tables = self._parts.tables
        is_penalised = needs.level is Sampling.PENALISED
        said = _said(tokens.view(-1, width)[:, 1:]) if is_penalised and width > 1 else None
        picked = self._parts.tail.pick(logits, queries, needs, said)
        block, bounds = picked.tokens.view(-1, width), (tables["depth"], tables["limit"])
        # Last, once everything that may fail is done: a step that raised is run again on the state that it found.
        kernels = self._parts.model.kernels.rounds
        taken = kernels.accept(queries, tokens, block, bounds, last_token, length, self._drafts_of(width))
        if is_penalised:
            for place, token in enumerate(block.unbind(1)):
                count_tokens(tables["counts"], taken.rows * (place < taken.counts), token)
        told = taken.block if width > 1 else block
        found, likely = (told, taken.rows, taken.starts, taken.tokens, taken.counts), picked.logprobs
        if likely is None:
            return found
        parts = (likely.token_logprob, likely.top_ids, likely.top_logprobs)
        return (*found, *(part.view(-1, width, *part.shape[1:]) for part in parts))

    def draft(self, accepted: Accepted, depth: int) -> None:
        """Draft so many tokens, and keep them for the next round; or, of none, only let the drafter take in the new
        tokens."""
        run = self._opaque_draft if current().stage is Stage.COMPILING else self._draft
        table, features = accepted.table, accepted.features
        places = (accepted.rows, accepted.starts, accepted.tokens, accepted.counts, table)
        run(places, features, depth, self._drafts, self._kept)

    def _draft(
        self,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        features: torch.Tensor | None,
        depth: int,
        drafts: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
    ) -> None:
        """As one call that no compiler looks into; the last arguments say what is written."""
        accepted, marks = Accepted(*places, features), self._marks
        rows = accepted.rows
        try:
            if depth:
                found = self._drafter.draft(accepted, depth)
                if found.shape != (len(rows), depth):
                    raise ValueError(f"drafts of shape {list(found.shape)}, expected {[len(rows), depth]}")
                self._parts.model.kernels.rounds.keep_drafts(drafts, rows, found, marks)
            else:
                self._drafter.keep_up(accepted)
                self._mark_read(rows)
        except Exception as error:  # no output depends on drafts
            self._failures.note("nothing is drafted", error)
            drafts.index_fill_(0, rows, -1)
            self._mark_read(rows)  # what it has not read is left nowhere

    def _mark_read(self, rows: torch.Tensor) -> None:
        if (marks := self._marks) is not None:
            mark_read(marks, rows)

    @property
    def _marks(self) -> ReadMarks | None:
        return None if self._unread is None else ReadMarks(self._unread.read_to, self._parts.tables.length)

    def leave(
        self,
        tokens: torch.Tensor,
        queries: Queries,
        taps: tuple[torch.Tensor, ...],
        following: torch.Tensor | None = None,
    ) -> None:
        """What a step computed of its tokens, for the drafter to read later; nothing where there is no place for it.

        It comes before tokens are accepted, while the tables have those that were computed. With `following`, only
        tokens after which one is yet to be picked are left.
        """
        if self._unread is None:
            return
        run = self._opaque_leave if current().stage is Stage.COMPILING else self._leave
        places, unread = (queries.rows, queries.positions, queries.table), self._unread
        run(places, tokens, queries.by_row, taps, following, unread.states, unread.tokens, unread.read_to)

    def _leave(
        self,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tokens: torch.Tensor,
        by_row: bool,
        taps: tuple[torch.Tensor, ...],
        following: torch.Tensor | None,
        states: torch.Tensor,
        ring: torch.Tensor,
        read_to: torch.Tensor,
    ) -> None:
        """As one call that no compiler looks into; the last arguments say what is written."""
        assert self._unread is not None
        queries = Queries(*places, 1 if by_row else None, by_row=by_row)
        self._parts.model.kernels.rounds.leave(self._unread, queries, tokens, taps, following)

    def extend(self, rows: torch.Tensor, table: torch.Tensor, depth: int) -> torch.Tensor | None:
        """Let the drafter read what rows left, and draft so many tokens, or none; returns what rows have then, if any
        ([num_rows, depth])."""
        run = self._opaque_extend if current().stage is Stage.COMPILING else self._extend
        run(rows, table, depth, self._drafts, self._kept)
        return self._drafts[rows] if depth else None

    def _extend(
        self, rows: torch.Tensor, table: torch.Tensor, depth: int, drafts: torch.Tensor, kept: tuple[torch.Tensor, ...]
    ) -> None:
        """As one call that no compiler looks into; the last arguments say what is written."""
        tables, features = self._parts.tables, None
        if self._unread is not None:
            left = self._parts.model.kernels.rounds.left(self._unread, rows, tables.length, tables.last_token)
            features = self._features(left.taps, self._kept[0].dtype)
            found = left.starts, left.tokens, left.counts
        elif self._reader is None:
            # It has read all of them; from the last one on it drafts.
            lasts, is_real = (tables.length[rows] - 1).clamp_min(0), (rows > 0).long()
            found = lasts, tables.last_token[rows][:, None], is_real
        else:
            return  # states of earlier steps are nowhere: what was drafted stays
        # A row that left nothing keeps its drafts: what else is in its places is another's, or long read.
        self._draft((rows * (found[2] > 0), *found, table), features, depth, drafts, kept)
        self._mark_read(rows)

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """What the drafter needs of the target's hidden states, if anything."""
        if self._reader is None:
            return None
        run = self._opaque_features if current().stage is Stage.COMPILING else self._features
        return run(taps, self._kept[0].dtype)

    def _features(self, taps: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros where the drafter fails: it drafts nonsense from them, and whoever compiles has a shape to count on."""
        assert self._reader is not None
        try:
            found = self._reader.features(taps)
            if found.shape != taps[0].shape:
                raise ValueError(f"features of shape {list(found.shape)}, expected {list(taps[0].shape)}")
            return found.to(dtype)
        except Exception as error:  # no output depends on drafts
            self._failures.note("it drafts from zeros", error)
            return torch.zeros_like(taps[0], dtype=dtype)

    def read(
        self, tokens: torch.Tensor, following: torch.Tensor, queries: Queries, taps: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        # Of rounds too, since a recording serves both; there all is read at once, and marked so.
        self.leave(tokens, queries, taps, following)
        if current().stage is not Stage.COMPILING:
            return self._taken_in(taps, following, queries)
        places = queries.rows, queries.token_positions, queries.table
        return self._opaque_read(taps, following, places, self._kept)

    def _read(
        self,
        taps: tuple[torch.Tensor, ...],
        following: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        kept: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """As one call that no compiler looks into; the last argument says what is written."""
        return self._taken_in(taps, following, Queries(*places, tokens_per_row=None))

    def _taken_in(self, taps: tuple[torch.Tensor, ...], following: torch.Tensor, queries: Queries) -> torch.Tensor:
        assert self._reader is not None
        features = self._features(taps, self._kept[0].dtype)
        try:
            self._reader.read(following, features, queries)
        except Exception as error:  # no output depends on drafts
            self._failures.note("it does not know these tokens of prompts", error)
        return features

    def accept(
        self, logits: torch.Tensor, tokens: torch.Tensor, queries: Queries, needs: SamplingNeeds
    ) -> tuple[Picked, torch.Tensor]:
        picked, accepted = self.verify(logits, tokens, queries, needs)
        return picked, accepted.tokens


def _said(drafted: torch.Tensor) -> torch.Tensor:
    """[num_rows * tokens_per_row, depth]: of a round's drafts those that come before each of its places."""
    depth = drafted.shape[1]
    places = torch.arange(depth, device=drafted.device)
    before = places < torch.arange(depth + 1, device=drafted.device)[:, None]
    return torch.where(before, drafted[:, None], NO_TOKEN).flatten(0, 1)
