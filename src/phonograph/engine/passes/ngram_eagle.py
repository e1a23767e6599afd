"""ngram+eagle: a drafter of two, n-gram lookup for the rows where it finds something, and the head for the others."""

from __future__ import annotations

from dataclasses import replace

import torch

from phonograph.engine.models.draft_head import DraftHead
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafter, Drafting, ReadsTarget
from phonograph.engine.passes.eagle import EagleDrafter, eagle
from phonograph.engine.passes.ngram import NgramDrafter, ngram


class CombinedDrafter:
    """The protocol `ReadsTarget`: a row gets all drafts of the first drafter if that has any for it, else the second's.

    Both take in every token, so that each can draft whenever it is its turn. Drafts of a row are never mixed: those of
    a head follow from its own first one.
    """

    def __init__(self, parts: PassParts, first: Drafter, second: ReadsTarget) -> None:
        self._first, self._second = first, second
        self.reads, self.writes = (*first.reads, *second.reads), (*first.writes, *second.writes)
        self.taps = second.taps
        self.kept = (*second.kept, *(parts.tables[name] for name in first.writes))

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._second.features(taps)

    def read(self, following: torch.Tensor, features: torch.Tensor, queries: Queries) -> None:
        self._second.read(following, features, queries)

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        first, second = self._first.draft(accepted, depth), self._second.draft(accepted, depth)
        return torch.where(first[:, :1] >= 0, first, second)

    def keep_up(self, accepted: Accepted) -> None:
        self._first.keep_up(accepted)
        self._second.keep_up(accepted)


def ngram_eagle(head: DraftHead, depth: int, unread_places: int = 0) -> Drafting:
    """The declaration: layers and weights are the head's."""
    first, second = ngram(depth), eagle(head, depth, unread_places)
    return replace(
        second,
        name=f"{first.name}+{second.name}",
        make=lambda parts: CombinedDrafter(parts, NgramDrafter(parts), EagleDrafter(parts, head)),
        columns=lambda: (*first.columns(), *second.columns()),
    )
