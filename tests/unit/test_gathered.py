"""Counts that data-parallel ranks gather: computed for the bucket, or left out by a path."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph import Runner, Sample, verify
from phonograph.devices import Device
from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.gathered import global_num_tokens_slot, local_num_tokens, local_num_tokens_slot
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import LoadMode, Registry
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.graphs.phases.phase import sample_from
from runners import make_runner

BUCKET_OF_8 = Extent({"tokens": 3}, {"tokens": 8})
UNPADDED = Extent({"tokens": 3}, {"tokens": 3})
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


@pytest.mark.parametrize("mode", list(LoadMode))
def test_without_a_count_the_batchs_own_local_one_is_loaded_or_the_used_size_counts(
    device: Device, mode: LoadMode
) -> None:
    made = registry(device, 0)
    extent = BUCKET_OF_8 if mode is LoadMode.GRAPH else UNPADDED
    view = made.load(batch(num_tokens=None, local_num_tokens=[7]), extent, mode=mode).batch
    assert view.local_num_tokens.tolist() == [7]
    assert view.local_num_tokens.dtype == torch.int32
    derived = made.load(batch(num_tokens=None), extent, mode=mode).batch
    assert derived.local_num_tokens.tolist() == [3 if mode is LoadMode.GRAPH else 2]


@pytest.mark.parametrize("mode", [LoadMode.EAGER, LoadMode.NO_COPY])
def test_the_eager_path_sees_the_counts_of_the_batch(device: Device, mode: LoadMode) -> None:
    view = registry(device, 0).load(batch(global_num_tokens=[3, 5]), UNPADDED, mode=mode).batch
    assert view.global_num_tokens.tolist() == [3, 5]
    assert view.global_num_tokens.dtype == torch.int64


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 7))
def test_local_counts_cover_all_tokens_in_order_as_chunk_cuts_them(num_tokens: int, padded: int, ranks: int) -> None:
    counts = [local_num_tokens(num_tokens, padded, rank, ranks) for rank in range(ranks)]
    assert sum(counts) == min(num_tokens, padded)
    cut = [len(part) for part in torch.arange(padded).chunk(ranks)]
    whole = [local_num_tokens(padded, padded, rank, ranks) for rank in range(ranks)]
    assert whole == cut + [0] * (ranks - len(cut))


class TestServed:
    """Through a runner, with the default sample function."""

    SLOTS = (Slot("x", ("tokens",), torch.float32),)

    @staticmethod
    def body(batch: dict[str, Any]) -> dict[str, Any]:
        counts, local = batch.get("global_num_tokens"), batch.get("local_num_tokens")
        total = batch["x"].new_zeros(1) - 1 if counts is None else counts.sum().view(1).float()
        return {"x": batch["x"] * 2, "total": total, **({} if local is None else {"local": local + 0})}

    def runner(self, device: Device, *counts: Slot, sizes: tuple[int, ...] = (4, 8)) -> Runner:
        slots = [*self.SLOTS, *counts]
        sample = sample_from(slots, device.torch_device)
        runner = make_runner(self.body, device, slots=slots, bucketed="tokens", sizes=sizes, sample=sample)
        assert runner.report is not None
        return runner

    def test_counts_act_in_a_recording_and_stay_out_of_the_next_one(self, device: Device) -> None:
        runner = self.runner(device, global_num_tokens_slot(2))
        assert {key.absent for key in runner.captured} == {frozenset(), frozenset({"global_num_tokens"})}
        with_counts = {"x": torch.ones(3, device=device.torch_device), "global_num_tokens": [3, 5]}
        without = {"x": with_counts["x"], "global_num_tokens": None}
        for _ in range(2):
            assert runner.run(with_counts)["total"].tolist() == [8.0]
            assert runner.run(without)["total"].tolist() == [-1.0]
            assert runner.run({"x": with_counts["x"]})["total"].tolist() == [-1.0]
        assert runner.stats.eager == {}

    def test_an_eager_batch_has_its_own_counts(self, device: Device) -> None:
        runner = self.runner(device, global_num_tokens_slot(2))
        large = {"x": torch.ones(9, device=device.torch_device), "global_num_tokens": [9, 30]}
        assert runner.run(large)["total"].tolist() == [39.0]
        assert runner.stats.eager.total() == 1

    def test_counts_passed_by_keyword_are_the_padded_ones_too(self, device: Device) -> None:
        slots = [*self.SLOTS, global_num_tokens_slot(2)]
        runner = make_runner(
            lambda batch, global_num_tokens: self.body(batch | {"global_num_tokens": global_num_tokens}),
            device,
            slots=slots,
            bucketed="tokens",
            sizes=(4, 8),
            sample=lambda extent, seed: Sample(
                {"x": torch.ones(extent.used["tokens"], device=device.torch_device)}, {"global_num_tokens": [1, 1]}
            ),
        )
        x = torch.ones(3, device=device.torch_device)
        assert runner.run({"x": x}, global_num_tokens=[3, 5])["total"].tolist() == [8.0]
        assert runner.run({"x": x}, global_num_tokens=None)["total"].tolist() == [-1.0]
        assert runner.stats.eager == {}

    def test_required_counts_have_one_recording_a_size_and_none_are_made_up(self, device: Device) -> None:
        runner = self.runner(device, global_num_tokens_slot(2, required=True))
        assert len(runner.captured) == 2
        x = torch.ones(3, device=device.torch_device)
        assert runner.run({"x": x, "global_num_tokens": [3, 5]})["total"].tolist() == [8.0]
        assert verify(runner).checks
        with pytest.raises(LoadError, match="'global_num_tokens'"):
            runner.run({"x": torch.ones(9, device=device.torch_device)})

    @pytest.mark.parametrize("rank", [0, 1])
    def test_local_counts_of_any_eager_size(self, device: Device, rank: int) -> None:
        runner = self.runner(device, local_num_tokens_slot(rank, 2))
        for used, wanted in ((3, [2, 1]), (5, [4, 1]), (9, [5, 4]), (11, [6, 5])):
            found = runner.run({"x": torch.ones(used, device=device.torch_device)})
            assert found["local"].tolist() == [wanted[rank]]
        assert (runner.stats.replays.total(), runner.stats.eager.total()) == (2, 2)
        assert verify(runner).checks

    def test_a_bucket_that_does_not_divide_stays_eager_and_names_the_slot(self, device: Device) -> None:
        runner = self.runner(device, local_num_tokens_slot(0, 2), sizes=(3, 4))
        assert runner.report is not None
        assert [str(row.key) for row in runner.report.failures] == ["decode[tokens=3]"]
        message = r"slot 'local_num_tokens': 3 padded tokens don't divide over 2 ranks"
        assert re.search(message, str(runner.report.failures[0].error))
        assert runner.run({"x": torch.ones(3, device=device.torch_device)})["local"].tolist() == [2]


def test_the_count_may_be_dotted() -> None:
    compute = local_num_tokens_slot(1, 2, count="meta.num_tokens").compute
    assert compute is not None
    assert compute(SimpleNamespace(meta={"num_tokens": 6}), BUCKET_OF_8) == [2]


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(DeclarationError, match="rank is 2, expected 0 to 1"):
        local_num_tokens_slot(2, 2)
