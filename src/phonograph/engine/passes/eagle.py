"""eagle: a drafter with a head of its own, which reads hidden states of the target and keeps keys beside its."""

from __future__ import annotations

from dataclasses import replace

import torch

from phonograph.engine.models.draft_head import DraftHead
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafting, extended
from phonograph.engine.passes.registry import TARGET_VERIFY
from phonograph.engine.passes.unread import UnreadSize


class EagleDrafter:
    """The protocol `ReadsTarget`: extends the head's cache by what stays of a round, then drafts a chain."""

    reads = ()
    writes = ()

    def __init__(self, parts: PassParts, head: DraftHead) -> None:
        self._head = head
        self._cache = parts.beside[TARGET_VERIFY.name]
        self.taps = head.config.taps
        self.kept = self._cache.tensors

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._head.features(taps)

    def read(self, following: torch.Tensor, features: torch.Tensor, queries: Queries) -> None:
        self._head.store(following.clamp_min(0), features, queries, self._cache)

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        head, rows, width = self._head, accepted.rows, accepted.tokens.shape[1]
        q, hidden = self._extended(accepted)
        lasts = (accepted.counts - 1).clamp_min(0)
        chosen = torch.arange(rows.shape[0], device=rows.device) * width + lasts
        q, hidden = q[chosen], hidden[chosen]
        queries = Queries(rows, accepted.starts + lasts, accepted.table, tokens_per_row=1)
        hidden, token = head.first(q, hidden, queries, self._cache)
        drafted = [token]
        for _ in range(depth - 1):
            queries = replace(queries, positions=queries.positions + 1)
            hidden, token = head.next(token, hidden, queries, self._cache)
            drafted.append(token)
        return torch.stack(drafted, dim=1)

    def keep_up(self, accepted: Accepted) -> None:
        self._extended(accepted)

    def _extended(self, accepted: Accepted) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head has for every place of the round, all of which the cache gets; what is past the last token
        that stays is written again later."""
        assert accepted.features is not None
        queries = extended(accepted, accepted.tokens.shape[1])
        return self._head.store(accepted.tokens.flatten(), accepted.features, queries, self._cache)


def eagle(head: DraftHead, depth: int, unread_places: int = 0) -> Drafting:
    """The declaration; with places for unread tokens, plain steps leave states for the head, and don't run it."""
    return Drafting(
        "eagle",
        depth,
        lambda parts: EagleDrafter(parts, head),
        keeps=lambda model: head.layers.keeps,
        weights=(head.weights, head.layers.weights),
        unread=UnreadSize.of(unread_places, len(head.config.taps), head.weights.embedding),
    )
