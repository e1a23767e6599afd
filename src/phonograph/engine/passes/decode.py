"""decode: one token for each of some rows; all that changes from step to step is in the request tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.readback import Picked
from phonograph.engine.passes.registry import DECODE
from phonograph.engine.passes.sampling_tail import axes_for
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.limits import Limits
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.sizes import ceil_div


@dataclass(frozen=True)
class DecodeBatch:
    """Rows that decode; everything else is in the tables."""

    rows: Any
    width: int
    """Pages that the longest sequence has; a recording looks at all that a row can have."""
    needs: SamplingNeeds
    tokens_per_row: int = 1


class DecodeBatches:
    """Makes the batches of steps without prefills; while the same rows decode, they need none."""

    def __init__(self, limits: Limits, ahead: int = 0) -> None:
        """`ahead` is how many positions past a step its body looks at."""
        self._page_size = limits.page_size
        self._ahead = ahead
        self._version = self._tokens_per_row = 0

    def is_steady(self, step: Step) -> bool:
        """Whether this step decodes just the rows that the last batch was made for."""
        same = step.decodes.version == self._version and step.tokens_per_row == self._tokens_per_row
        return same and not step.decodes.needs.constrained

    def batch(self, step: Step) -> DecodeBatch:
        """The rows of a step."""
        self._version, self._tokens_per_row = step.decodes.version, step.tokens_per_row
        width = ceil_div(step.longest + self._ahead, self._page_size)
        return DecodeBatch(step.decodes.rows, width, step.decodes.needs, step.tokens_per_row)


class DecodeBody:
    """Gathers from the tables, runs the model, picks tokens, and notes them in the tables."""

    def __init__(self, parts: PassParts, backend: str = "full") -> None:
        self._parts = parts
        self._model = parts.model_for(backend)

    def __call__(self, batch: DecodeBatch) -> Picked:
        parts = self._parts
        tables, pages = parts.tables, parts.tables.pages[:, : batch.width]
        queries = Queries(batch.rows, tables.length, pages, tokens_per_row=1, by_row=True)
        hidden = self._model.hidden(tables.last_token, queries, parts.cache)
        picked = parts.tail.next_tokens(self._model.logits(hidden.states), queries, batch.needs)
        return picked._replace(states=hidden.states.float()) if batch.needs.states else picked


def rows_slot(limits: Limits) -> Slot:
    """The rows of a batch, as the one input that a decode has."""
    return Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0, null=True), valid=(0, limits.max_seqs))


def sample_rows(parts: PassParts, extent: Extent, seed: int) -> DecodeBatch:
    """A batch of the rows that trial runs fill; those that a large bucket holds besides are null."""
    rows = np.zeros(extent.used["seqs"], dtype=np.int64)
    count = min(len(rows), parts.trials.num_rows)
    rows[:count] = np.arange(1, count + 1)
    return DecodeBatch(rows, parts.trials.width, SamplingNeeds())


def decode_pass(parts: PassParts, backend: str = "full") -> Pass:
    """The pass over all rows of a step that decode."""
    batches, length = DecodeBatches(parts.limits), parts.tables.length

    def written(batch: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.as_tensor(batch.rows).to(length.device)
        return rows, length[rows]

    return Pass(
        DECODE,
        tokens_per_row=1,
        bucketed="seqs",
        slots=[rows_slot(parts.limits)],
        batch=batches.batch,
        written=written,
        public=("rows", "width"),
        is_steady=batches.is_steady,
        body=DecodeBody(parts, backend),
        sample=lambda extent, seed: sample_rows(parts, extent, seed),
        axes=axes_for(parts.gives_states),
        preserve=parts.trials.running,
    )
