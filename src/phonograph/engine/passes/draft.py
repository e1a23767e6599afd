"""draft: what is drafted after a round among prompts, for its rows and those whose prompts ended, in one recording.

Rounds alone in a step draft within their own recording (`target_verify`). Among prompts, tokens are picked after the
recording, so drafts have one of their own: a drafter's chain is many small launches, which would be most of the step.
After a plain step it lets a drafter keep up for which nothing is left to be read later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.decode import rows_slot
from phonograph.engine.passes.drafted_rounds import DraftedRounds
from phonograph.engine.passes.drafting import Accepted, Drafter, ReadsTarget
from phonograph.engine.passes.registry import PassDeclaration
from phonograph.engine.passes.rounds import PickedPlaces
from phonograph.engine.passes.step import Step
from phonograph.engine.passes.unread import UnreadSize
from phonograph.engine.requests.limits import half_width
from phonograph.engine.state.tables import RequestTables
from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.graphs.phases.axes import Axis


def drafts_axis(width: int, *, narrows: bool, has_plain: bool = True) -> Axis:
    """Rounds of all drafts; of half as many, where that may pay; or one token a row, as plain decoding has it, where
    the pass has a part in that.

    For passes whose batches have a field `tokens_per_row`.
    """
    half = {"half": half_width(width)} if narrows and half_width(width) > 1 else {}
    widths = {"on": width, **half, **({"off": 1} if has_plain else {})}
    names = {found: name for name, found in widths.items()}

    def applied(batch: Any, value: str) -> Any:
        return replace(batch, tokens_per_row=widths[value])

    return Axis("drafts", tuple(widths), of=lambda batch: names[batch.tokens_per_row], apply=applied)


def accepted_of(batch: PickedPlaces, tables: RequestTables) -> Accepted:
    """The places of each row, side by side. A row whose prompt ended has one, which stands in all of its round; what a
    drafter makes of those after the last that stays is written again later."""
    width, rows, is_real = batch.tokens_per_row, batch.rows, batch.rows > 0
    offsets = torch.arange(width, device=rows.device)
    places = torch.minimum(batch.firsts[:, None] + offsets, batch.lasts[:, None])
    starts = batch.positions[batch.firsts] * is_real
    counts = (tables.length[rows] - starts).clamp(0, width) * is_real
    tokens, features = batch.tokens[places] * is_real[:, None], None
    if batch.features is not None:
        features = torch.where(is_real[:, None, None], batch.features[places], 0.0).flatten(0, 1)
    return Accepted(rows, starts, tokens, counts, tables.pages[:, : batch.width], features)


class DraftSample:
    """Rounds, then rows that have one place, as far as there are rows for trials and places; the rest is padding."""

    def __init__(self, parts: PassParts, width: int, features: torch.dtype | None) -> None:
        self._trials = parts.trials
        self._page_size = parts.limits.page_size
        self._num_positions = parts.limits.num_positions
        self._width = width
        self._vocab = parts.model.config.vocab
        self._hidden = parts.model.config.hidden
        self._features = features
        self._device = parts.tables.length.device

    def __call__(self, extent: Extent, seed: int) -> PickedPlaces:
        numbers = np.random.default_rng(seed)
        num_rows, num_places = extent.used["seqs"], extent.used["places"]
        most = min(num_rows, self._trials.num_rows)
        num_rounds = int(numbers.integers(0, min(most, num_places // self._width) + 1))
        count = num_rounds + min(most - num_rounds, num_places - num_rounds * self._width)
        widths = np.where(np.arange(count) < num_rounds, self._width, 1)
        rows, firsts, lasts = np.zeros((3, num_rows), dtype=np.int64)
        rows[:count], lasts[:count] = np.arange(1, count + 1), np.cumsum(widths) - 1
        firsts[:count] = lasts[:count] - widths + 1
        # The tables have lengths of trials from here on: what is between the two stays.
        last = min(self._page_size + self._width, self._trials.last_start)
        positions = numbers.integers(self._page_size, last + 1, size=num_places)
        positions = np.minimum(positions, self._num_positions - 1)
        tokens, features = numbers.integers(0, self._vocab, size=num_places), None
        if self._features is not None:
            drawn = torch.Generator(self._device).manual_seed(seed)
            shape = num_places, self._hidden
            features = torch.randn(shape, generator=drawn, device=self._device).to(self._features)
        return PickedPlaces(rows, firsts, lasts, tokens, positions, features, self._trials.width, self._width)


def draft_pass(
    parts: PassParts,
    declared: PassDeclaration,
    drafter: Drafter,
    unread: UnreadSize | None = None,
    *,
    narrows: bool = False,
) -> Pass:
    """The pass over all rows that a mixed step picked tokens for; of plain steps only where these leave nothing."""
    rounds, limits, tables = DraftedRounds(parts, drafter, unread), parts.limits, parts.tables
    most = limits.max_seqs * rounds.width
    features = drafter.kept[0].dtype if isinstance(drafter, ReadsTarget) else None

    def body(batch: PickedPlaces) -> None:
        rounds.draft(accepted_of(batch, tables), batch.tokens_per_row - 1)

    def written(batch: PickedPlaces) -> tuple[torch.Tensor, torch.Tensor]:
        device, count = tables.length.device, rounds.width + rounds.ahead
        rows, firsts, positions = (
            torch.as_tensor(one).to(device) for one in (batch.rows, batch.firsts, batch.positions)
        )
        offsets = torch.arange(count, device=device).repeat(len(rows))
        return rows.repeat_interleave(count), positions[firsts].repeat_interleave(count) + offsets

    unfilled = Pad.unread(because="rows name their places, and the null row the first one")
    place: dict[str, Any] = {"pad": Pad.fill(0), "valid": (0, most - 1)}
    read = [] if features is None else [Slot("features", ("places", parts.model.config.hidden), features, pad=unfilled)]
    return Pass(
        declared,
        tokens_per_row=rounds.width,
        bucketed="seqs",
        slots=[
            rows_slot(limits),
            Slot("firsts", ("seqs",), torch.int64, **place),
            Slot("lasts", ("seqs",), torch.int64, **place),
            Slot("tokens", ("places",), torch.int64, pad=unfilled, valid=(0, parts.model.config.vocab - 1)),
            Slot("positions", ("places",), torch.int64, pad=unfilled, valid=(0, limits.num_positions - 1)),
            *read,
        ],
        dims=[Dim("places", limit=most)],
        batch=_of_no_step,
        written=written,
        public=("rows", "firsts", "lasts", "positions", "width", "tokens_per_row"),
        body=body,
        sample=DraftSample(parts, rounds.width, features),
        axes=[drafts_axis(rounds.width, narrows=narrows, has_plain=not rounds.leaves)],
        preserve=parts.trials.running,
        picks=False,
        reads=(*rounds.reads, *drafter.reads),
        writes=(*rounds.writes, *drafter.writes),
    )


def _of_no_step(step: Step) -> Any:
    raise DeclarationError(
        f"step {step.number} names the pass {step.pass_name!r}, which takes what another one hands to it. "
        "Name that other one."
    )
