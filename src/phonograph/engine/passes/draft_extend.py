"""draft_extend: before a step, the drafter reads what plain steps left, and drafts from there for a round or a probe.

So plain steps run at the speed of plain decoding, and the first round after them verifies fresh drafts. It puts out the
drafts too: those before a plain step, a probe, are compared with the tokens that come.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.decode import DecodeBatch, rows_slot, sample_rows
from phonograph.engine.passes.draft import drafts_axis
from phonograph.engine.passes.drafted_rounds import DraftedRounds
from phonograph.engine.passes.drafting import Drafter
from phonograph.engine.passes.registry import PassDeclaration
from phonograph.engine.passes.step import Step
from phonograph.engine.passes.unread import UnreadSize
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.sizes import ceil_div


def draft_extend_pass(parts: PassParts, declared: PassDeclaration, drafter: Drafter, unread: UnreadSize | None) -> Pass:
    """The pass over the rows of a step that decode, before the step itself; with drafts for a round or a probe."""
    rounds, limits, tables = DraftedRounds(parts, drafter, unread), parts.limits, parts.tables
    places = 1 if unread is None else unread.places
    ahead = places + rounds.ahead

    def batch(step: Step) -> DecodeBatch:
        width = min(ceil_div(step.longest + ahead, limits.page_size), parts.trials.width)
        tokens_per_row = rounds.width if step.tokens_per_row > 1 or step.probes else 1
        return DecodeBatch(step.decodes.rows, width, SamplingNeeds(), tokens_per_row)

    def body(batch: DecodeBatch) -> torch.Tensor | None:
        return rounds.extend(batch.rows, tables.pages[:, : batch.width], batch.tokens_per_row - 1)

    def written(batch: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.as_tensor(batch.rows).to(tables.length.device).repeat_interleave(places + ahead)
        offsets = torch.arange(-places, ahead, device=rows.device).repeat(len(batch.rows))
        return rows, (tables.length[rows] + offsets).clamp(0, limits.num_positions - 1)

    return Pass(
        declared,
        tokens_per_row=rounds.width,
        bucketed="seqs",
        slots=[rows_slot(limits)],
        batch=batch,
        written=written,
        public=("rows", "width", "tokens_per_row"),
        body=body,
        sample=lambda extent, seed: replace(sample_rows(parts, extent, seed), tokens_per_row=rounds.width),
        axes=[drafts_axis(rounds.width, narrows=False)],
        preserve=parts.trials.running,
        picks=False,
        reads=(*rounds.reads, *drafter.reads),
        writes=(*rounds.writes, *drafter.writes),
    )
