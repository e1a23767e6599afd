"""Window layers: whatever comes in which parts, they hold and give what transformers' own layers do, and masks fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
from transformers.cache_utils import StaticSlidingWindowLayer

from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.hf.generation_cache import WindowLayer


def parts(max_len: int) -> st.SearchStrategy[list[int]]:
    """Lengths of what comes, at most as many tokens as the cache is for."""
    return st.lists(st.integers(1, 6), min_size=1, max_size=max_len).map(
        lambda sizes: [size for index, size in enumerate(sizes) if sum(sizes[: index + 1]) <= max_len]
    )


@settings(max_examples=200, deadline=None)
@given(window=st.integers(1, 9), max_len=st.integers(1, 24), sizes=parts(24), reset_at=st.integers(0, 30))
def test_a_window_layer_is_the_same_as_that_of_transformers(
    window: int, max_len: int, sizes: list[int], reset_at: int
) -> None:
    ours, theirs = (
        kind(max_cache_len=max_len, sliding_window=window) for kind in (WindowLayer, StaticSlidingWindowLayer)
    )
    generator = torch.Generator().manual_seed(0)
    for index, size in enumerate(sizes):
        if index == reset_at:
            ours.reset()
            theirs.reset()
        assert ours.get_mask_sizes(size) == theirs.get_mask_sizes(size)
        if size == 1 and ours.is_initialized:
            with entering(Current("decode", "full", Stage.WARMING)):  # as a recording asks for it
                length, offset = ours.get_mask_sizes(1)
            assert (length, int(offset)) == theirs.get_mask_sizes(1)
        keys, values = (torch.randn(2, 1, size, 3, generator=generator) for _ in range(2))
        for found, wanted in zip(ours.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(found, wanted)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert int(ours.get_seq_length()) == theirs.get_seq_length()
