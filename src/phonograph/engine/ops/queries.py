"""Attention protocol: queries of a step against the pages of their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
import torch

from phonograph.engine.cache.groups import PagedCache

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence in a step, as the host knows them; only eager code may use it."""

    row: int
    first: int
    """Index of its first token in the step."""
    start: int
    """Position of that token in the sequence."""
    count: int


class Spans(Sequence[Span]):
    """Spans as the columns of one array, each made when it is looked at: most attention looks at none."""

    def __init__(self, rows: Array, firsts: Array, starts: Array, counts: Array) -> None:
        self._told = rows, firsts, starts, counts

    def __len__(self) -> int:
        return len(self._told[0])

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> Spans: ...

    def __getitem__(self, index: int | slice) -> Span | Spans:
        if isinstance(index, slice):
            return Spans(*(one[index] for one in self._told))
        return Span(*(int(one[index]) for one in self._told))

    def __iter__(self) -> Iterator[Span]:
        return map(Span, *(one.tolist() for one in self._told))


@dataclass(frozen=True)
class Queries:
    """Where the tokens of a step stand. Every token sees its sequence up to its own position.

    The tokens of one row stand together, at consecutive positions. What attention gives for padding is finite and
    means nothing.
    """

    rows: torch.Tensor  # [num_tokens], 0 for padding
    positions: torch.Tensor  # [num_tokens], 0 for padding; by row, [num_rows]
    table: torch.Tensor  # [num_rows, width]: the page numbers of each row's sequence; row 0 is null
    tokens_per_row: int | None
    """Tokens that every row has in this step: 1 where rows decode, a fixed number, or None where rows differ."""
    spans: Sequence[Span] | None = None
    """The sequences of an eager step; None where a graph is recorded, whose kernels read device memory only."""
    spans_from: int = 0
    """Index of the first token that spans tell of. Where the tokens before it stand, only the device knows."""
    by_row: bool = False
    """Whether positions, and the tokens that go with them, are tables with an entry for every row: in decode steps,
    whose kernels then need no launch to gather them. The tables are not written before the end of the step."""

    _gathered: list[torch.Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.by_row and self.tokens_per_row != 1:
            found = f"found {self.tokens_per_row} tokens a row, expected 1"
            raise ValueError(f"queries by row: {found}, since a table has one position for each row.")
        for name, places in (("rows", self.rows), ("positions", self.positions)):
            if not places.is_contiguous():
                found = f"{name} lie {places.stride(-1)} numbers apart"
                raise ValueError(f"queries of {len(self.rows)} tokens: {found}, and kernels take them one by one.")

    @property
    def token_positions(self) -> torch.Tensor:
        """[num_tokens], for kernels that don't look through rows themselves; as they are when this is first read."""
        if not self.by_row:
            return self.positions
        if not self._gathered:  # no cached_property: torch.compile can't trace its lock
            self._gathered.append(self.positions[self.rows])
        return self._gathered[0]


class Scores(NamedTuple):
    """How products of queries and keys become weights, where a model differs from the plain softmax. A tuple, so that a
    traced graph can hold it."""

    scale: float | None = None
    """What products are multiplied by; None for head_dim ** -0.5."""
    softcap: float | None = None
    """Scores are bent by a tanh so that none is larger."""
    sinks: torch.Tensor | None = None
    """[num_heads]: a score that takes part in each head's softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        return self.scale is None and self.softcap is None and self.sinks is None


PLAIN = Scores()


class StepAttention(Protocol):
    """Attention of one step: what all layers share is already computed."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        """Mix values for q ([num_tokens, num_heads, head_dim]); with a window, only over that many last positions.

        `layer` counts the layers of the cache that was prepared for. The numbers of a head lie together in q. The
        result is new, or `out`, contiguous, where that is given.
        """
        ...


class Attention(Protocol):
    """One implementation; stateless, so that graphs of all shapes share it."""

    @property
    def name(self) -> str: ...

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        """Do once per step, before the layers, what depends on the queries alone.

        The cache holds layers of one shape. A model whose layers differ prepares for each shape (`PreparedAttention`).

        It runs inside the recording. Host planning that a library needs belongs in `Phase.host_plan` or in a gap,
        outside of it; what `Phase.host_plan` planned is picked up here by the number of tokens.
        """
        ...
