"""RowUse: how much of a round the rows of a batch can take: some take few drafts or none, some are near their end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.scheduling.acceptance import Acceptance

_ROUNDS_LEFT = 2
"""Rounds that a row must have tokens left for. The last one ends somewhere within it, and what is launched ahead of
that is launched in vain: by less than two, a row is done no sooner than by plain steps, whose number is known."""


class RowUse:
    """Follows the rows that decode; it looks at each of them only where other ones do than before."""

    def __init__(self, limits: Limits) -> None:
        self._depth = limits.tokens_per_row - 1
        self._decodes: tuple[Sequence, ...] = ()
        self._shares: list[float] | None = None
        """By place of a draft, the rows that take one there; None where all rows take all."""
        self._left: list[int] = []
        """Tokens that each may still bring, rising, when they were looked at."""
        self._came = 0.0
        """How many came since then, on average."""

    def look(self, decodes: tuple[Sequence, ...]) -> None:
        """The rows of the next step."""
        if decodes is self._decodes:
            return
        self._decodes, count, depth = decodes, len(decodes), self._depth
        self._left, self._came = sorted([one.max_outputs - len(one.outputs) for one in decodes]), 0.0
        fewer = [most for one in decodes if one.is_draft_bounded and (most := one.draft_depth(depth)) < depth]
        self._shares = [1 - sum(most <= place for most in fewer) / count for place in range(depth)] if fewer else None

    def took(self, decodes: tuple[Sequence, ...], num_tokens: int) -> None:
        """So many came for these rows."""
        if decodes is self._decodes:
            self._came += num_tokens / len(decodes)

    def tokens(self, acceptance: Acceptance, width: int) -> float:
        """What a round of this width brings a row on average, as far as it takes drafts."""
        if self._shares is None:
            return acceptance.tokens(width)
        more = (acceptance.tokens(place + 2) - acceptance.tokens(place + 1) for place in range(width - 1))
        return 1 + sum(share * each for share, each in zip(self._shares, more, strict=False))

    def share_with_room(self, width: int, tokens: float) -> float:
        """Of the rows, those which after all that is in flight have tokens left for rounds of this width."""
        in_flight, wanted = self._decodes[0].num_in_flight, _ROUNDS_LEFT * tokens
        least = self._came + in_flight * tokens / width + wanted
        return 1.0 if self._left[0] >= least else 1 - bisect_left(self._left, least) / len(self._left)


def has_room(sequences: Iterable[Sequence], tokens: float) -> bool:
    """Whether one of these has tokens left for rounds that bring so many."""
    return any(one.max_outputs - len(one.outputs) > _ROUNDS_LEFT * tokens for one in sequences)
