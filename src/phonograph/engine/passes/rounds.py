"""Rounds: rows that decode several tokens in a step, any number of which is accepted, as in speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.readback import Picked
from phonograph.engine.requests.step import NO_TOKEN
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.engine.sampling.sampler import TopLogprobs


@dataclass(frozen=True)
class PickedPlaces:
    """What a mixed step brought its rows: the batch of a pass that goes on from there, such as one that drafts.

    A place is a token that another one was picked after: all of a round, and the last of a prompt. How many of a
    round's stay, the tables know: so much longer is the row.
    """

    rows: Any  # [num_rows]
    firsts: Any  # [num_rows]: the place where each row begins
    lasts: Any  # [num_rows]: and its last one
    tokens: Any  # [num_places]: what was picked after each, 0 where there was a problem
    positions: Any  # [num_places]
    features: Any  # [num_places, hidden], or None where the rounds read nothing
    width: int
    """Pages that the longest sequence has."""
    tokens_per_row: int
    """Places of each round; rows whose prompts ended have one."""

    @classmethod
    def of(
        cls,
        rows: Any,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        *,
        first: int,
        width: int,
        tokens_per_row: int,
    ) -> PickedPlaces:
        """Rounds, then from `first` on rows that have one place each; `rows` is an array."""
        rounds, ends = np.arange(0, first, tokens_per_row), np.arange(first, tokens.shape[0])
        firsts, lasts = np.concatenate([rounds, ends]), np.concatenate([rounds + tokens_per_row - 1, ends])
        # On the host, and yet tensors: a check in service compares what a pass hands on.
        known = [torch.from_numpy(one) for one in (rows, firsts, lasts)]
        return cls(known[0], known[1], known[2], tokens, positions, features, width, tokens_per_row)


class Rounds(Protocol):
    """What passes that compute up to `Limits.tokens_per_row` tokens of a row have in common: steps of decodes alone,
    and mixed ones. It reads and writes the request tables, and nothing of it is known to the host."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the model after which it takes hidden states."""
        ...

    @property
    def ahead(self) -> int:
        """How many positions past the end of a round it reads."""
        ...

    def tokens(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The token that each of these rows computes so many places after its length; at 0 it is the last token."""
        ...

    @property
    def leaves(self) -> Sequence[str]:
        """Columns in which `read` leaves what comes to be read later; without any, a plain step hands all on."""
        ...

    def read(
        self, tokens: torch.Tensor, following: torch.Tensor, queries: Queries, taps: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        """Take in what the model computed for the tokens of a mixed step, within its recording.

        `following` are the tokens that come after each in its prompt; below 0 where one is yet to be picked. Returns
        what a pass that goes on from here takes of every token (`PickedPlaces.features`), if anything.
        """
        ...

    def accept(
        self, logits: torch.Tensor, tokens: torch.Tensor, queries: Queries, needs: SamplingNeeds
    ) -> tuple[Picked, torch.Tensor]:
        """Pick what follows each of the tokens, decide how many of each row stay, and note them in the tables.

        Logits, tokens and queries are those of whole rounds: [num_rows * tokens_per_row]. Returns a block of [num_rows,
        tokens_per_row], or [num_rows] where that is one token a row; and all that was picked, whether it stays or not.
        """
        ...


def widened(plain: Picked, width: int) -> Picked:
    """Rows that have one token each, as rounds of so many places."""
    block = plain.tokens.new_full((plain.tokens.shape[0], width), NO_TOKEN)
    block[:, 0] = plain.tokens
    if plain.logprobs is None:
        return Picked(block)
    # There is one of each place of the block; those of places without a token mean nothing.
    wide = [part[:, None].repeat(1, width, *[1] * (part.dim() - 1)) for part in _tensors(plain.logprobs)]
    return Picked(block, TopLogprobs(*wide))


def joined(rounds: Picked, plain: Picked) -> Picked:
    """Rounds, then rows that have one token each: in one block, unless all have one."""
    ends = plain if rounds.tokens.dim() == 1 else widened(plain, rounds.tokens.shape[1])
    tokens = torch.cat([rounds.tokens, ends.tokens])
    if rounds.logprobs is None or ends.logprobs is None:
        return Picked(tokens)
    pairs = zip(_tensors(rounds.logprobs), _tensors(ends.logprobs), strict=True)
    return Picked(tokens, TopLogprobs(*(torch.cat(pair) for pair in pairs)))


def _tensors(found: TopLogprobs) -> tuple[torch.Tensor, ...]:
    return found.token_logprob, found.top_ids, found.top_logprobs
