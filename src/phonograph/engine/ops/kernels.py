"""Kernels protocol: the operations of a layer. Each call is a unit that an implementation may fuse into one launch.

The residual stream travels as a pair: `x`, and what the last projection adds to it, `delta`. The next norm does the
addition, so it costs no pass over memory of its own. It may be in float32 where the weights are not:
what is projected or normed from it is in the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Queries, StepAttention
from phonograph.errors import DeclarationError

Op = Literal["linear", "norm_linear", "norm_gated"]
"""The calls that multiply with a matrix."""


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of rotary positions, in float32; sin carries the sign of the rotation."""

    cos: torch.Tensor  # [num_positions, head_dim]
    sin: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Where the tokens of a step stand: found once per step, read by every layer."""

    cos: torch.Tensor  # [num_tokens, head_dim], of their positions
    sin: torch.Tensor
    slots: torch.Tensor  # [num_tokens]: page · page_size + place in the page, for their keys and values

    def __getitem__(self, part: slice) -> Places:
        """Those of some tokens."""
        return Places(self.cos[part], self.sin[part], self.slots[part])


@dataclass(frozen=True)
class Heads:
    """How the columns of a fused qkv projection are split: query heads, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None

    def check(self, columns: int, angles: int, kept: tuple[int, ...]) -> None:
        """Refuse projections, rotary angles and pages of other sizes: kernels go by addresses, and would read and write
        what lies beside. Pages are `kept` as (num_kv_heads, head_dim)."""
        size = f"{self.num_heads} heads and {self.num_kv_heads} of keys, of {self.head_dim} numbers each"
        found = {
            "projects to": (columns, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim),
            "has angles for": (angles, self.head_dim),
            "keeps pages of": (kept, (self.num_kv_heads, self.head_dim)),
            "norms queries of": (_width(self.q_norm, self.head_dim), self.head_dim),
            "norms keys of": (_width(self.k_norm, self.head_dim), self.head_dim),
            "shares keys among": (self.num_heads % self.num_kv_heads, 0),
        }
        wrong = [f"{what} {there}, expected {right}" for what, (there, right) in found.items() if there != right]
        if wrong:
            raise DeclarationError(
                f"a layer of {size}: it {'; it '.join(wrong)}. Correct Model.keeps, the rope table, or the heads."
            )


def _width(norm: Norm | None, head_dim: int) -> int:
    return head_dim if norm is None else norm.weight.numel()


@runtime_checkable
class RotatingAttention(StepAttention, Protocol):
    """One that takes projections as they come, where a launch of its own for their rotation can be saved."""

    def rotate_and_attend(
        self, layer: int, qkv: torch.Tensor, heads: Heads, places: Places, window: int | None
    ) -> torch.Tensor:
        """What `Kernels.rotate_and_store` and `attend` do, one after the other."""
        ...


class RoundKernels(Protocol):
    """What rounds of drafts need besides layers: small integers of few rows, where launches are all that costs."""

    def spread(
        self, rows: torch.Tensor, drafts: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor, vocab: int
    ) -> RoundTokens:
        """What rows compute in a round: each its last token, and what was drafted after it, at the positions from its
        length on. Tables have an entry for every row, `drafts` is [all rows, depth], or the first columns of a wider
        one. Whatever was drafted, what comes out is a token.
        """
        ...

    def keep_drafts(
        self, drafts: torch.Tensor, rows: torch.Tensor, found: torch.Tensor, marks: ReadMarks | None = None
    ) -> None:
        """Write what was found ([num_rows, depth or less]) to the rows of `drafts`, and none to further places; nobody
        reads those of the null row. Where there are marks, all that the rows have is read by now."""
        ...

    def leave(
        self,
        unread: Unread,
        queries: Queries,
        tokens: torch.Tensor,
        taps: Sequence[torch.Tensor],
        following: torch.Tensor | None = None,
    ) -> None:
        """Leave what a step computed to be read later: of each query its token, and the tapped states ([num_tokens,
        hidden] each). Where the tokens that come after them are given, only those leave something after which one is
        yet to be picked: `following` is below 0 there.

        A row that is marked as read past what it leaves is read up to there.
        """
        ...

    def left(self, unread: Unread, rows: torch.Tensor, length: torch.Tensor, last_token: torch.Tensor) -> LeftTokens:
        """What rows left since it was last read. The tables have the length and the last token of every row."""
        ...

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
        """Find how many of each row's tokens stay, and note the last of them and the row's length in the tables.

        `tokens` ([num_rows * tokens_per_row]) are those of the queries: a row's last token, then drafts; `picked`
        ([num_rows, tokens_per_row]) is what the model says after each. Drafts stay as long as each is what was picked
        before it, and the first pick that is none stays too; at most one more than the row's depth, none at or past
        its limit: `bounds`, which are tables with an entry for every row. Rows of which none stays, and the null row,
        are left as they were. A problem in place of a token is noted as token 0. Where there is a table `drafts` ([all
        rows, tokens_per_row - 1]), places for which it has nothing, a number below 0, hold no draft, whatever token was
        computed there: none is accepted, and `NO_DRAFT` tells them apart.
        By row, as for `write_next_token`, `length` is the table that the queries' positions are in.
        """
        ...

    def keep(self, history: torch.Tensor, new: NewTokens) -> None:
        """Write the tokens that stay to their places in `history` ([all rows, num_positions])."""
        ...

    def keep_and_continue(self, history: torch.Tensor, new: NewTokens, depth: int) -> torch.Tensor:
        """`keep`, then [num_rows, depth] in int64: how each row went on after the latest place at which its last three
        tokens stood before, or its last two; -1 where there is none.

        Where the end of the row is reached, the tokens since that place repeat themselves.
        """
        ...


@dataclass(frozen=True)
class Unread:
    """What plain steps leave for a drafter to read later, of all rows: in rings, by position."""

    states: torch.Tensor  # [all rows, places, taps, hidden]
    tokens: torch.Tensor  # [all rows, places]: the token at each position
    read_to: torch.Tensor  # [all rows]: all positions before it are read; past the row's length, nothing is left


@dataclass(frozen=True)
class ReadMarks:
    """Tables with an entry for every row: up to where it is read, and how long it is."""

    read_to: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True)
class LeftTokens:
    """Of each row the positions that are not read, `places` of them, of which the first `counts` are there."""

    starts: torch.Tensor  # [num_rows]
    tokens: torch.Tensor  # [num_rows, places]: the token that came after each position
    counts: torch.Tensor  # [num_rows]; 0 for padding
    taps: tuple[torch.Tensor, ...]  # [num_rows * places, hidden] each


@dataclass(frozen=True)
class RoundTokens:
    """The tokens of a round, [num_rows * tokens_per_row] each; those of a row stand together."""

    rows: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class AcceptedTokens:
    """What stays of rounds; all of these are contiguous."""

    rows: torch.Tensor  # [num_rows]
    starts: torch.Tensor  # [num_rows]: the length of each row before its round

    counts: torch.Tensor  # [num_rows]; 0 for padding
    block: torch.Tensor  # [num_rows, tokens_per_row]: what was picked, NO_TOKEN or NO_DRAFT after the last that stays
    tokens: torch.Tensor  # the same, whole, with 0 for problems


@dataclass(frozen=True)
class NewTokens:
    """Tokens that rows got: of each row the first so many, at the positions after the one where it was."""

    rows: torch.Tensor  # [num_rows], 0 for padding
    starts: torch.Tensor  # [num_rows]
    tokens: torch.Tensor  # [num_rows, any]
    counts: torch.Tensor  # [num_rows]


class Kernels(Protocol):
    """One implementation; stateless, so that graphs of all shapes share it."""

    @property
    def name(self) -> str: ...

    @property
    def rounds(self) -> RoundKernels: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what they found and chose, for `explain`."""
        ...

    def prepare(self, matrix: Matrix) -> Matrix:
        """Called for every matrix at load: the same values, with a better form of them besides where there is one."""
        ...

    def takes(self, op: Op, num_tokens: int, matrix: Matrix) -> bool:
        """Whether this call can be made with this number of tokens and this matrix: prepared or not, of any format.

        Where it is declined, `ops.projections` runs the parts: `add_norm`, the product, `silu_mul`; and torch's product
        where `linear` is declined too.
        """
        ...

    def embed_tokens(
        self,
        embedding: torch.Tensor,
        tokens: torch.Tensor,
        angles: Angles,
        queries: Queries,
        page_size: int,
        residual: torch.dtype,
    ) -> tuple[torch.Tensor, Places]:
        """What a step begins with: its tokens' rows of the embedding, in the dtype of the residual stream, and their
        places.

        Padding gets the first place of the null page. Where the queries go by row, the tokens do. A row's table holds
        the null page after its own pages: what is computed past its end is written there.
        """
        ...

    def places(self, angles: Angles, queries: Queries, page_size: int) -> Places:
        """The places alone, for a step whose embeddings are given."""
        ...

    def write_next_token(
        self,
        queries: Queries,
        tokens: torch.Tensor,
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> None:
        """What a step ends with: the token after every query, and its row's length, are noted in the tables; the null
        row stays empty.

        By row, `length` is the table that the queries' positions are in. A problem in place of a token is noted as
        token 0, so that the steps launched ahead of its discovery read nothing outside the tables.
        """
        ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + delta), x + delta); nothing is added where delta is None. The sum may be x itself, changed, unless
        the caller `keeps` x."""
        ...

    def joined_norms(self, parts: Sequence[torch.Tensor], norms: Sequence[Norm]) -> torch.Tensor:
        """Two or three inputs of one width, each normed, side by side: [num_tokens, len(parts) * width]."""
        ...

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + delta) projected, x + delta); the sum may be x itself, changed."""
        ...

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: Matrix, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(silu(gate) · up of norm(x + delta), x + delta); gate and up are the two halves of the projection.

        The sum may be x itself, changed, unless the caller `keeps` x.
        """
        ...

    def linear(self, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x projected; in the dtype of the matrix, or in float32 on request: sums are not rounded then,
        and may be beyond the range of the matrix' dtype."""
        ...

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up of [num_tokens, gate and up side by side]."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        places: Places,
        cache: PagedCache,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values into their pages; returns the queries.

        qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], the result [num_tokens, num_heads, head_dim]:
        new, or `out`, contiguous, where that is given.
        """
        ...

    def resume_overlap(self) -> None:
        """Called before a replay where ordinary launches came since the last one: on some devices these end a state in
        which recorded launches follow each other more closely. It computes nothing."""
        ...
