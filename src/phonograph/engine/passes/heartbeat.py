"""heartbeat: a decode of the null row, which shows that the device responds. Its phase is called `idle`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.decode import DecodeBatch, DecodeBody, rows_slot
from phonograph.engine.passes.registry import HEARTBEAT
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.graphs.inputs.extent import Extent


def heartbeat_pass(parts: PassParts, backend: str) -> Pass:
    """The pass without requests."""
    return Pass(
        HEARTBEAT,
        tokens_per_row=1,
        bucketed="seqs",
        slots=[rows_slot(parts.limits)],
        batch=lambda step: _null_rows(1),
        body=DecodeBody(parts, backend),
        sample=_sample,
        preserve=_nothing_to_keep,
    )


def _null_rows(count: int) -> DecodeBatch:
    return DecodeBatch(np.zeros(count, dtype=np.int64), 1, SamplingNeeds())


def _sample(extent: Extent, seed: int) -> DecodeBatch:
    return _null_rows(extent.used["seqs"])


def _nothing_to_keep(batch: Any) -> AbstractContextManager[Any]:
    """The null row and page belong to no request: nothing to preserve."""
    return nullcontext({})
