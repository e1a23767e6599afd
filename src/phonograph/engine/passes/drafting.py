"""Drafter protocol: what proposes the next tokens of rows; the target verifies them, so no output depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from phonograph.engine.cache.groups import Kept
from phonograph.engine.models.interface import Model
from phonograph.engine.passes.base import PassParts
from phonograph.engine.state.column import Column


@dataclass(frozen=True)
class Accepted:
    """What rounds brought: of each row's tokens the first so many, after the place where its round began."""

    rows: torch.Tensor  # [num_rows], 0 for padding
    starts: torch.Tensor  # [num_rows]: the row's length before the round
    tokens: torch.Tensor  # [num_rows, any]: the token picked after each place, 0 where there was a problem
    counts: torch.Tensor  # [num_rows]: how many of them stay; 0 for padding, and after the end of a row


class Drafter(Protocol):
    """One for an engine, made with its passes. It runs inside recordings, and after the tables are written."""

    @property
    def reads(self) -> Sequence[str]:
        """Columns of passes that it reads, by name."""
        ...

    @property
    def writes(self) -> Sequence[str]:
        """Columns that it writes, by name; the drafts are written for it."""
        ...

    def draft(self, accepted: Accepted) -> torch.Tensor:
        """[num_rows, depth]: the tokens that may follow the last one of each row; below 0 is none.

        Anything may be in it. A drafter that raises drafts nothing.
        """
        ...


def _no_columns() -> Sequence[Column]:
    return ()


@dataclass(frozen=True)
class Drafting:
    """A drafter as an engine declares it."""

    name: str
    depth: int
    """Tokens that are drafted for a row in each round."""
    make: Callable[[PassParts], Drafter]
    columns: Callable[[], Sequence[Column]] = _no_columns
    """Request state of its own."""
    keeps: Callable[[Model], Sequence[Kept]] | None = None
    """What layers of its own keep in pages."""
