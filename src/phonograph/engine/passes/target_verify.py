"""target_verify: rows decode in rounds: the target verifies what was drafted for them, and new tokens are drafted.

A draft is accepted if and only if it is what the target itself picks there. Noise is a function of seed, position and
token, so the output is that of plain decoding whatever the drafter says, greedy or sampled. Drafts are made at the end
of a round and wait in a column, so that rounds among prompts find them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.chain import chained
from phonograph.engine.passes.decode import DecodeBatch, DecodeBatches, rows_slot, sample_rows
from phonograph.engine.passes.draft import draft_pass, drafts_axis
from phonograph.engine.passes.draft_extend import draft_extend_pass
from phonograph.engine.passes.drafted_rounds import DraftedRounds
from phonograph.engine.passes.drafter_checks import check_drafts, kept_in_pages, made_drafter
from phonograph.engine.passes.drafter_writes import check_writes
from phonograph.engine.passes.drafting import Accepted, Drafter, Drafting
from phonograph.engine.passes.embed import embed_pass
from phonograph.engine.passes.prefill import prefill_pass
from phonograph.engine.passes.readback import Picked
from phonograph.engine.passes.registry import (
    DRAFT,
    DRAFT_EXTEND,
    EMBED,
    HEARTBEAT,
    PREFILL,
    TARGET_VERIFY,
    PassDeclaration,
)
from phonograph.engine.passes.sampling_tail import axes_for
from phonograph.engine.passes.unread import UnreadSize
from phonograph.engine.requests.limits import half_width
from phonograph.engine.state.column import Column, RowSource, TrialRows, Writer


def round_columns(depth: int) -> tuple[Column, ...]:
    """What every row has that decodes in rounds of so many drafts."""

    def no_draft(entry: RowSource) -> object:
        return -1 if depth == 1 else ()

    def drafted(trial: TrialRows) -> torch.Tensor:
        found = torch.randint(-1, trial.vocab, (trial.count, depth), generator=trial.numbers)
        return found[:, 0] if depth == 1 else found

    return (
        Column(
            "limit",
            torch.int64,
            value=lambda entry: entry.sequence.max_computed,
            trial=lambda trial: trial.whole(trial.last_start, trial.num_positions + 1),
            is_public=True,
        ),
        Column(
            "depth",
            torch.int64,
            value=lambda entry: entry.sequence.draft_depth(depth),
            trial=lambda trial: trial.whole(0, depth + 1),
            is_public=True,
        ),
        Column(
            "draft",
            torch.int64,
            default=-1,
            width=depth,
            # The host knows none: a row begins, and a step that is undone goes on, without.
            writer=Writer.ENTRY | Writer.GRAPH,
            value=no_draft,
            trial=drafted,
        ),
    )


class _Links:
    """The bodies of a round, over the same rows."""

    def __init__(self, parts: PassParts, rounds: DraftedRounds, backend: str) -> None:
        self._parts = parts
        self._rounds = rounds
        self._model = parts.model_for(backend)

    def verify(self, batch: DecodeBatch) -> tuple[Picked, Accepted, tuple[torch.Tensor, ...]]:
        """The target over all tokens of the round, and how many stay; or over the last token of each row alone."""
        tables, width = self._parts.tables, batch.tokens_per_row
        pages = tables.pages[:, : batch.width]
        if width == 1:
            tokens, queries = tables.last_token, Queries(batch.rows, tables.length, pages, 1, by_row=True)
        else:
            spread = self._rounds.spread(batch.rows, width, self._model.kernels.rounds)
            tokens, queries = spread.tokens, Queries(spread.rows, spread.positions, pages, tokens_per_row=width)
        hidden = self._model.hidden(tokens, queries, self._parts.cache, taps=self._rounds.taps)
        if width == 1:
            self._rounds.leave(tokens, queries, hidden.taps)
        picked, accepted = self._rounds.verify(self._model.logits(hidden.states), tokens, queries, batch.needs)
        if batch.needs.states:
            states = hidden.states.float()
            picked = picked._replace(states=states if width == 1 else states.view(-1, width, states.shape[1]))
        return picked, accepted, hidden.taps

    def draft(self, batch: DecodeBatch, found: tuple[Picked, Accepted, tuple[torch.Tensor, ...]]) -> Picked:
        """What is drafted for the next round; after a plain step nothing is, and what it left is read later."""
        picked, accepted, taps = found
        if batch.tokens_per_row > 1 or not self._rounds.leaves:
            self._rounds.draft(replace(accepted, features=self._rounds.features(taps)), batch.tokens_per_row - 1)
        return picked


PLAIN_STEPS = "drafts=off"
"""What recordings of steps without drafts are called."""


HALF_ROUNDS = "drafts=half"
"""And those of rounds of half as many drafts."""


def target_verify_pass(
    parts: PassParts,
    backend: str,
    declared: PassDeclaration,
    drafter: Drafter,
    unread: UnreadSize | None = None,
    *,
    narrows: bool = False,
) -> Pass:
    """The pass over rows that decode in rounds: verify, then draft, as one recording."""
    rounds, length = DraftedRounds(parts, drafter, unread), parts.tables.length
    links, batches = _Links(parts, rounds, backend), DecodeBatches(parts.limits, rounds.ahead)

    def written(batch: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor]:
        # The target has all places of the round, a drafter some after them.
        count = rounds.width + rounds.ahead
        rows = torch.as_tensor(batch.rows).to(length.device).repeat_interleave(count)
        return rows, length[rows] + torch.arange(count, device=length.device).repeat(len(batch.rows))

    verify = Pass(
        declared,
        tokens_per_row=rounds.width,
        bucketed="seqs",
        slots=[rows_slot(parts.limits)],
        batch=batches.batch,
        public=("rows", "width", "tokens_per_row"),
        is_steady=batches.is_steady,
        body=links.verify,
        sample=lambda extent, seed: replace(sample_rows(parts, extent, seed), tokens_per_row=rounds.width),
        axes=[*axes_for(parts.gives_states), drafts_axis(rounds.width, narrows=narrows)],
        preserve=parts.trials.running,
        reads=rounds.reads,
        writes=rounds.leaves,
    )
    draft = replace(
        verify,
        body=links.draft,
        axes=(),
        reads=(*rounds.reads, *drafter.reads),
        writes=(*rounds.writes, *drafter.writes),
    )
    return replace(chained(declared, verify, draft), written=written, before=DRAFT_EXTEND.name)


def speculating_passes(
    drafting: Drafting, *, embeddings: bool = False, narrows: bool = False
) -> tuple[PassDeclaration, ...]:
    """`SPECULATING`, with this drafter; rows among prompts verify what was drafted too, pooled ones among them.

    With `narrows` there are recordings of rounds of half as many drafts.
    """

    half = half_width(drafting.depth + 1) - 1
    asked = {drafting.depth, half} if narrows and half else {drafting.depth}

    def target_verify(parts: PassParts, backend: str) -> Pass:
        drafter = made_drafter(drafting, parts)

        def check() -> None:
            check_writes(drafting, drafter, parts)
            check_drafts(drafting, drafter, parts, asked)

        found = target_verify_pass(parts, backend, declared, drafter, drafting.unread, narrows=narrows)
        return replace(found, check=check)

    def extend(parts: PassParts, backend: str) -> Pass:
        return draft_extend_pass(parts, extends, made_drafter(drafting, parts), drafting.unread)

    def draft(parts: PassParts, backend: str) -> Pass:
        return draft_pass(parts, drafts, made_drafter(drafting, parts), drafting.unread, narrows=narrows)

    def mixed(plain: PassDeclaration, make: Callable[..., Pass]) -> PassDeclaration:
        def made(parts: PassParts, backend: str) -> Pass:
            drafter = made_drafter(drafting, parts)
            rounds = DraftedRounds(parts, drafter, drafting.unread)
            found = make(parts, backend, plain, rounds)
            reads, writes = (*rounds.reads, *drafter.reads), (*rounds.leaves, *drafter.writes)
            return replace(found, before=DRAFT_EXTEND.name, then=DRAFT.name, reads=reads, writes=writes)

        return replace(plain, make=made)

    def columns() -> Sequence[Column]:
        unread = () if drafting.unread is None else drafting.unread.columns()
        return (*round_columns(drafting.depth), *unread, *drafting.columns())

    declared = replace(TARGET_VERIFY, make=target_verify, columns=columns, keeps=kept_in_pages(drafting))
    extends, drafts = replace(DRAFT_EXTEND, make=extend), replace(DRAFT, make=draft)
    passes = declared, mixed(PREFILL, prefill_pass), extends, drafts, HEARTBEAT
    return (*passes, mixed(EMBED, embed_pass)) if embeddings else passes
