"""Counts that data-parallel ranks gather: computed for the bucket, or left out by a path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph.devices import Device
from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.buffers import LoadMode, Registry
from phonograph.graphs.extent import Dim, Extent
from phonograph.graphs.gathered import global_num_tokens_slot, local_num_tokens, local_num_tokens_slot
from phonograph.graphs.pool import BufferPool
from phonograph.graphs.slots import Pad, Slot

BUCKET_OF_8 = Extent({"tokens": 3}, {"tokens": 8})
COUNTS = frozenset({"local_num_tokens", "global_num_tokens"})


def registry(device: Device, rank: int, num_ranks: int = 2) -> Registry:
    slots = [
        Slot("ids", ("tokens",), torch.int64, pad=Pad.fill(0)),
        local_num_tokens_slot(rank, num_ranks),
        global_num_tokens_slot(num_ranks),
    ]
    pool = BufferPool(device)
    made = Registry(device, slots, {"tokens": Dim("tokens")}, owner="decode")
    made.declare(pool, "tokens", 8)
    pool.seal()
    return made


def batch(**more: Any) -> SimpleNamespace:
    ids: dict[str, Any] = {
        "ids": [1, 2, 3],
        "num_tokens": 100,
        "local_num_tokens": None,
        "global_num_tokens": [100, 60],
    }
    return SimpleNamespace(**(ids | more))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hundred_tokens_in_a_bucket_of_8_are_4_on_each_of_2_ranks(device: Device, rank: int) -> None:
    view = registry(device, rank).load(batch(), BUCKET_OF_8).batch
    assert view.local_num_tokens.tolist() == [4]
    assert view.global_num_tokens.tolist() == [8, 8]


@pytest.mark.parametrize(
    ("num_tokens", "counts"), [(0, [0, 0]), (3, [3, 0]), (4, [4, 0]), (5, [4, 1]), (8, [4, 4]), (100, [4, 4])]
)
def test_the_ranks_share_the_bucket_in_order(num_tokens: int, counts: list[int]) -> None:
    assert [local_num_tokens(num_tokens, 8, rank, 2) for rank in range(2)] == counts


def test_a_path_that_leaves_them_out_carries_the_batchs_own(device: Device) -> None:
    own = batch(local_num_tokens=torch.tensor([77]))
    for mode in (LoadMode.GRAPH, LoadMode.EAGER):
        view = registry(device, 0).load(own, BUCKET_OF_8, mode=mode, without=COUNTS).batch
        assert view.local_num_tokens is own.local_num_tokens
        assert view.global_num_tokens is own.global_num_tokens


def test_without_counts_the_global_ones_decline(device: Device) -> None:
    view = registry(device, 0).load(batch(global_num_tokens=None), BUCKET_OF_8).batch
    assert view.global_num_tokens is None


def test_without_a_count_the_batchs_own_local_one_is_loaded(device: Device) -> None:
    made = registry(device, 0)
    view = made.load(batch(num_tokens=None, local_num_tokens=[2]), BUCKET_OF_8).batch
    assert view.local_num_tokens.tolist() == [2]
    assert view.local_num_tokens.dtype == torch.int32
    with pytest.raises(LoadError, match=r"'local_num_tokens'.*declined"):
        made.load(batch(num_tokens=None), BUCKET_OF_8)


def test_the_count_may_be_dotted() -> None:
    compute = local_num_tokens_slot(1, 2, count="meta.num_tokens").compute
    assert compute is not None
    assert compute(SimpleNamespace(meta={"num_tokens": 6}), BUCKET_OF_8) == [2]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"9 padded tokens.*2 ranks.*Choose buckets"):
        local_num_tokens(5, 9, 0, 2)
    with pytest.raises(DeclarationError, match="no rank 2 among 2"):
        local_num_tokens_slot(2, 2)
