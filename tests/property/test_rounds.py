"""Rounds: blocks of several tokens on their way to the host, and the sample batches that have them."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import LLM, EmulatedDevice, EngineOptions, Extent
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.ops.layers.rounds import as_block
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.prefill import PrefillSample
from phonograph.engine.passes.readback import Picked, Readback
from phonograph.engine.passes.rounds import joined
from phonograph.engine.requests.limits import Limits
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.state.column import TableSizes
from phonograph.engine.state.columns import MASKS, PENALTIES, PLACE
from phonograph.engine.state.tables import RequestTables


@given(st.data(), st.integers(1, 6), st.integers(0, 5), st.integers(0, 5))
def test_rounds_and_plain_rows_come_back_as_they_were(
    data: st.DataObject, width: int, num_rounds: int, num_plain: int
) -> None:
    counts = data.draw(st.lists(st.integers(0, width), min_size=num_rounds, max_size=num_rounds))
    tokens = torch.arange(num_rounds * width).view(num_rounds, width)
    plain = torch.arange(500, 500 + num_plain)
    block = as_block(tokens, torch.tensor(counts, dtype=torch.int64))
    picked = joined(Picked(block), Picked(plain))
    found = Readback(EmulatedDevice(), 10 * width, depth=1).start(picked).wait()
    wanted = [token for row, count in zip(tokens.tolist(), counts, strict=True) for token in row[:count]]
    assert found.tokens == wanted + plain.tolist()
    assert found.counts == counts + [1] * num_plain


@cache
def parts_for(width: int) -> PassParts:
    options = EngineOptions(max_seqs=1, max_tokens=16, max_len=48, page_size=8, dtype=torch.float32)
    executor = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=options).executor
    limits = Limits(max_seqs=5, max_tokens=40, max_len=40, page_size=8, num_pages=20, tokens_per_row=width)
    sizes = TableSizes(5, executor.vocab, 6)
    tables = RequestTables(EmulatedDevice(), (*PLACE, *TorchSampler.columns, *PENALTIES, *MASKS), sizes)
    return PassParts(executor.model, TorchSampler(), tables, executor.cache, {}, limits)


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 999), st.booleans(), st.data())
def test_sample_batches_are_like_those_of_steps(
    num_tokens: int, width: int, seed: int, spans: bool, data: st.DataObject
) -> None:
    parts = parts_for(width)
    num_ends = data.draw(st.integers(0, parts.limits.max_seqs * width))
    used = {"tokens": num_tokens, "sampled": num_ends}
    batch = PrefillSample(parts, spans=spans)(Extent(used, used), seed)
    first = batch.spans_from
    assert (batch.spans is not None) == spans
    assert first % width == 0
    assert first == 0 or width > 1
    assert first <= num_ends
    assert batch.positions[:first].tolist() == list(range(width)) * (first // width), "offsets"
    assert batch.rows[:first].tolist() == [row for row in range(1, first // width + 1) for _ in range(width)]
    assert batch.ends[:first].tolist() == list(range(first))
    assert batch.decoding[:first].all()
    assert width == 1 or not batch.decoding[first:].any()
    rest = batch.rows[first:]
    assert len(batch.tokens) == len(batch.rows) == len(batch.positions) == len(batch.decoding) == num_tokens
    assert ((batch.rows >= 0) & (batch.rows <= parts.limits.max_seqs)).all()
    assert ((batch.positions >= 0) & (batch.positions < parts.limits.num_positions)).all()
    assert not set(rest.tolist()) & set(batch.rows[:first].tolist()), "a row is in one part alone"
    for told in batch.spans or ():
        at = slice(told.first, told.first + told.count)
        assert batch.rows[at].tolist() == [told.row] * told.count
        assert np.array_equal(batch.positions[at], np.arange(told.start, told.start + told.count))
        assert told.first >= first
