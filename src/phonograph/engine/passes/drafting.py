"""Drafter protocol: what proposes the next tokens of rows; the target verifies them, so no output depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from phonograph.engine.cache.groups import Kept
from phonograph.engine.models.interface import Model
from phonograph.engine.ops.kernels import NewTokens
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.unread import UnreadSize
from phonograph.engine.state.column import Column
from phonograph.errors import DeclarationError
from phonograph.numbers import is_whole


@dataclass(frozen=True)
class Accepted:
    """What rounds brought: of each row's tokens the first so many, after the place where its round began."""

    rows: torch.Tensor  # [num_rows], 0 for padding
    starts: torch.Tensor  # [num_rows]: the row's length before the round
    tokens: torch.Tensor  # [num_rows, any]: the token picked after each place, 0 where there was a problem
    counts: torch.Tensor  # [num_rows]: how many of them stay; 0 for padding, and after the end of a row
    table: torch.Tensor  # [all rows, any]: page numbers, as `Queries.table`
    features: torch.Tensor | None = None  # [num_rows * any, hidden]: of the tokens before, if the drafter reads them

    @property
    def new(self) -> NewTokens:
        """The tokens that stay, as kernels take them."""
        return NewTokens(self.rows, self.starts, self.tokens, self.counts)


class Drafter(Protocol):
    """What proposes tokens: one object for each pass of an engine, so that what they share is in columns and pages.

    It runs inside recordings, and after the tables are written. One that raises when it is called drafts nothing, and
    while it is recorded that holds for the recording. What fails on the device fails the step: indices that are made of
    tokens have to be in range.
    """

    @property
    def reads(self) -> Sequence[str]:
        """Columns of passes that it reads, by name."""
        ...

    @property
    def writes(self) -> Sequence[str]:
        """Columns that it writes, by name; the drafts are written for it."""
        ...

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        """[num_rows, depth]: the tokens that may follow the last one of each row; below 0 is none.

        Rounds may be narrower than they can be, so `depth` is that of the declaration or less. Any tokens may be in the
        result.
        """
        ...

    def keep_up(self, accepted: Accepted) -> None:
        """Take in what rows got in steps after which nothing is drafted, so that it can draft after a later one.

        One step at a time; or, where the declaration has places for unread tokens, those of several steps together.
        """
        ...


@runtime_checkable
class ReadsTarget(Drafter, Protocol):
    """A drafter that reads hidden states of the target, and keeps something of every token in pages."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the target after which states are taken, from 0 on: at least one."""
        ...

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """The memory that it writes to, at least one tensor; features are of the type of the first."""
        ...

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[num_tokens, hidden]: what it needs of the tapped states of some tokens, in their order."""
        ...

    def read(self, following: torch.Tensor, features: torch.Tensor, queries: Queries) -> None:
        """Take in tokens of prompts; `following` are those that come after each.

        Where that is not known yet it is below 0, and what is taken in means nothing: `draft` has that place once more.
        """
        ...


def extended(accepted: Accepted, places: int) -> Queries:
    """So many places of every row, from where its round began on."""
    offsets = torch.arange(places, device=accepted.rows.device)
    rows, positions = accepted.rows.repeat_interleave(places), (accepted.starts[:, None] + offsets).flatten()
    return Queries(rows, positions, accepted.table, tokens_per_row=places)


def _no_columns() -> Sequence[Column]:
    return ()


@dataclass(frozen=True)
class Drafting:
    """A drafter as an engine declares it."""

    name: str
    depth: int
    """Tokens that are drafted for a row in each round, at most."""
    make: Callable[[PassParts], Drafter]
    """Called for every pass, and again while memory is measured."""
    columns: Callable[[], Sequence[Column]] = _no_columns
    """Request state of its own."""
    keeps: Callable[[Model], Sequence[Kept]] | None = None
    """What layers of its own keep in pages."""
    weights: object = None
    """Tensors of its own, in dataclasses: benchmarks count by them what a round reads. The engine does not ask for
    them: memory is measured, when the declaration and all that `make` makes are there."""
    unread: UnreadSize | None = None
    """What plain steps leave for it, where it reads hidden states of the target, and not in every step. Limits have as
    many places (`Limits.unread_places`)."""
    why: str = ""
    """How it came to be this one, where nobody asked for it by name."""

    def __post_init__(self) -> None:
        if not is_whole(self.depth) or self.depth < 1:
            raise DeclarationError(
                f"the drafter {self.name!r} drafts {self.depth!r} tokens a round. Give a whole number of at least 1."
            )

    def __str__(self) -> str:
        named = f"{self.name} ({self.why})" if self.why else self.name
        return f"{named} drafts {self.depth} token{'' if self.depth == 1 else 's'} a round"
