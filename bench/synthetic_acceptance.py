"""Synthetic acceptance: rounds whose drafts are accepted at set rates, whatever the weights say.

For measuring what rounds cost where no trained drafter is at hand. **What such an engine says is not what its model
says**: a draft that is to be accepted takes the place of the token that the model picked, and one that is not is made
wrong. Only `Never` leaves the output as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from unittest.mock import patch

import torch

from phonograph.engine.ops.kernels import (
    AcceptedTokens,
    LeftTokens,
    NewTokens,
    ReadMarks,
    RoundKernels,
    RoundTokens,
    Unread,
)
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.queries import Queries
from phonograph.engine.sampling.sampler import hashes

_PARTS = 10_000


@dataclass(frozen=True)
class _Inner:
    """The protocol `RoundKernels`, all of it another's."""

    inner: RoundKernels

    def spread(
        self, rows: torch.Tensor, drafts: torch.Tensor, last_token: torch.Tensor, length: torch.Tensor, vocab: int
    ) -> RoundTokens:
        return self.inner.spread(rows, drafts, last_token, length, vocab)

    def keep_drafts(
        self, drafts: torch.Tensor, rows: torch.Tensor, found: torch.Tensor, marks: ReadMarks | None = None
    ) -> None:
        self.inner.keep_drafts(drafts, rows, found, marks)

    def leave(
        self,
        unread: Unread,
        queries: Queries,
        tokens: torch.Tensor,
        taps: Sequence[torch.Tensor],
        following: torch.Tensor | None = None,
    ) -> None:
        self.inner.leave(unread, queries, tokens, taps, following)

    def left(self, unread: Unread, rows: torch.Tensor, length: torch.Tensor, last_token: torch.Tensor) -> LeftTokens:
        return self.inner.left(unread, rows, length, last_token)

    def keep(self, history: torch.Tensor, new: NewTokens) -> None:
        self.inner.keep(history, new)

    def keep_and_continue(self, history: torch.Tensor, new: NewTokens, depth: int) -> torch.Tensor:
        return self.inner.keep_and_continue(history, new, depth)


@dataclass(frozen=True)
class AtRate(_Inner):
    """Every draft is accepted with this probability if all before it were; drawn by row and position."""

    rate: float = 0.5

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
        if width > 1:
            drafted = tokens.view(-1, width)[:, 1:]
            rows, places = (part.view(-1, width)[:, 1:] for part in (queries.rows, queries.token_positions))
            drawn = hashes(rows.flatten(), places.flatten(), rows.new_zeros(1)).view(rows.shape)
            is_right = drawn % _PARTS < round(self.rate * _PARTS)
            # A wrong one differs from the draft by the lowest bit, which keeps it a token of any even vocabulary.
            said = torch.where(is_right, drafted, drafted ^ 1)
            picked = torch.cat([said, picked[:, -1:]], 1)
        return self.inner.accept(queries, tokens, picked, bounds, last_token, length, drafts)


@dataclass(frozen=True)
class Never(_Inner):
    """Drafts are made wrong, and should one be right, it is not accepted: rounds bring one token, the model's."""

    def keep_drafts(
        self, drafts: torch.Tensor, rows: torch.Tensor, found: torch.Tensor, marks: ReadMarks | None = None
    ) -> None:
        # By the lowest bit, which keeps them tokens of any even vocabulary.
        self.inner.keep_drafts(drafts, rows, torch.where(found < 0, found, found ^ 1), marks)

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
        if picked.shape[1] > 1:  # plain steps have no drafts, and are to take what they take in service
            bounds = torch.zeros_like(bounds[0]), bounds[1]
        return self.inner.accept(queries, tokens, picked, bounds, last_token, length, drafts)


def expected(rate: float, depth: int) -> float:
    """Tokens a round at this rate, the target's own counted."""
    return sum(rate**place for place in range(depth + 1))


@contextmanager
def accepting(rate: float | None) -> Iterator[None]:
    """Engines that are opened here accept at this rate; None for never."""

    def found(inner: RoundKernels) -> RoundKernels:
        return Never(inner) if rate is None else AtRate(inner, rate)

    with ExitStack() as stack:
        stack.enter_context(patch.object(ReferenceKernels, "rounds", found(ReferenceKernels.rounds)))
        if find_spec("triton") is not None:
            made = importlib.import_module("phonograph.engine.ops.triton.layers")
            rounds = made.TritonRounds
            stack.enter_context(patch.object(made, "TritonRounds", lambda overlap: found(rounds(overlap))))
        yield


def rates_of(counts: Sequence[int], rounds: int) -> list[float]:
    """How often the draft in each place was accepted, of rounds that came so far."""
    reached = [rounds, *counts[:-1]]
    return [round(count / before, 4) if before else 0.0 for count, before in zip(counts, reached, strict=True)]
