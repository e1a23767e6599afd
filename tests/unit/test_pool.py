"""The pool: one allocation for all that ask for the same, which never moves, and says what it could not share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph.devices import Device, EmulatedDevice
from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.inputs.pool import BufferPool, Lease
from phonograph.sizes import next_power_of_two

CPU = torch.device("cpu")


class Unsharing(EmulatedDevice):
    """A device that says it must not share."""

    name = "unsharing"
    capabilities = replace(EmulatedDevice.capabilities, shares_buffers=False)


def ask(
    pool: BufferPool, num_elements: int, name: str = "ids", dtype: torch.dtype = torch.int64, owner: str = "a"
) -> Lease:
    return pool.request(name, num_elements, dtype, pool.device.torch_device, owner)


def span(lease: Lease) -> range:
    return range(lease.tensor.data_ptr(), lease.tensor.data_ptr() + lease.num_bytes)


@pytest.fixture
def pool(device: Device) -> BufferPool:
    return BufferPool(device)


class TestSharing:
    @pytest.mark.parametrize("counts", [(4, 16, 8), (16, 8, 4), (4, 8, 16)])
    def test_the_largest_request_is_the_allocation_in_any_order(
        self, pool: BufferPool, counts: tuple[int, ...]
    ) -> None:
        leases = {count: ask(pool, count) for count in counts}
        pool.seal()
        assert len({lease.tensor.data_ptr() for lease in leases.values()}) == 1
        assert {count: lease.tensor.numel() for count, lease in leases.items()} == {4: 4, 8: 8, 16: 16}
        assert leases[16].tensor.untyped_storage().nbytes() == 16 * 8

    def test_another_name_dtype_or_device_shares_nothing(self, pool: BufferPool) -> None:
        leases = [
            ask(pool, 4),
            ask(pool, 4, name="rows"),
            ask(pool, 8, dtype=torch.int32),
            pool.request("ids", 4, torch.int64, torch.device("meta"), "a"),
        ]
        pool.seal()
        assert pool.report().num_allocations == 4
        assert not set(span(leases[0])) & set(span(leases[1]))
        assert not set(span(leases[0])) & set(span(leases[2]))
        assert leases[3].tensor.device.type == "meta"

    def test_bytes_saved_are_reported(self, pool: BufferPool) -> None:
        ask(pool, 100)
        ask(pool, 60, owner="b")
        ask(pool, 10, name="rows", owner="b")
        pool.seal()
        report = pool.report()
        assert (report.bytes_requested, report.bytes_allocated, report.bytes_saved) == (1360, 880, 480)
        assert (report.num_leases, report.num_allocations) == (3, 2)
        assert "480 saved" in str(report)

    def test_a_device_that_must_not_share_gets_no_sharing(self) -> None:
        pool = BufferPool(Unsharing())
        first, second = ask(pool, 4), ask(pool, 8, owner="b")
        held = SimpleNamespace(ids=torch.arange(4))
        pool.share_in(held)
        pool.seal()
        assert not set(span(first)) & set(span(second))
        assert held.ids.data_ptr() not in {first.tensor.data_ptr(), second.tensor.data_ptr()}
        assert pool.report().bytes_saved == 0
        assert all("unsharing device does not share" in line for line in pool.report().private)
        assert len(pool.report().private) == 3


class TestSeal:
    def test_memory_is_there_only_after_the_seal(self, pool: BufferPool) -> None:
        lease = ask(pool, 4)
        with pytest.raises(DeclarationError, match=r"'ids' of a .*seal\(\)"):
            _ = lease.tensor

    def test_a_second_seal_changes_nothing(self, pool: BufferPool) -> None:
        lease = ask(pool, 4)
        pool.seal()
        before = lease.tensor.data_ptr()
        pool.seal()
        assert lease.tensor.data_ptr() == before

    def test_a_later_request_gets_its_own_memory_and_says_so(
        self, pool: BufferPool, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = ask(pool, 4)
        pool.seal()
        address = first.tensor.data_ptr()
        with caplog.at_level(logging.INFO, "phonograph"):
            late = ask(pool, 64, owner="late")
        assert first.tensor.data_ptr() == address
        assert not set(span(first)) & set(span(late))
        assert pool.report().private == ("late.ids: asked for after the pool was sealed, with 4 elements of it",)
        assert "not shared: late.ids" in str(pool.report())
        assert "asked for after the pool was sealed" in caplog.text
        assert pool.report().bytes_saved == 0

    def test_a_later_request_that_fits_shares_what_is_there(self, pool: BufferPool) -> None:
        first = ask(pool, 8)
        pool.seal()
        address = first.tensor.data_ptr()
        late, other = ask(pool, 5, owner="late"), ask(pool, 5, name="rows", owner="late")
        assert (first.tensor.data_ptr(), late.tensor.data_ptr()) == (address, address)
        assert late.tensor.numel() == 5
        assert not set(span(first)) & set(span(other))
        assert pool.report().private == (
            "late.rows: asked for after the pool was sealed, and there was no earlier one like it",
        )
        assert pool.report().bytes_saved == 5 * 8

    def test_a_report_before_the_seal_is_the_one_after_it(self, pool: BufferPool) -> None:
        assert pool.report().bytes_saved == 0
        ask(pool, 100)
        assert pool.report().bytes_saved == 0
        ask(pool, 60, owner="b")
        before = pool.report()
        pool.seal()
        assert pool.report() == before

    def test_what_is_not_to_be_shared_is_not(self, pool: BufferPool) -> None:
        place = pool.device.torch_device
        first, second = ask(pool, 8), ask(pool, 8, owner="b")
        own = pool.request("ids", 4, torch.int64, place, "c", shared=False)
        pool.seal()
        late = pool.request("ids", 4, torch.int64, place, "d", shared=False)
        assert first.tensor.data_ptr() == second.tensor.data_ptr()
        assert not set(span(first)) & (set(span(own)) | set(span(late)))
        assert not set(span(own)) & set(span(late))
        assert pool.report().private == tuple(f"{owner}.ids: its slot is declared with shared=False" for owner in "cd")

    def test_what_has_its_memory_is_never_repointed(self, pool: BufferPool) -> None:
        lease = ask(pool, 4)
        pool.seal()
        with pytest.raises(DeclarationError, match="already"):
            lease.place(torch.zeros(4, dtype=torch.int64))

    def test_an_ambient_inference_mode_does_not_reach_the_memory(self, pool: BufferPool) -> None:
        lease = ask(pool, 4)
        with torch.inference_mode():
            pool.seal()
            late = ask(pool, 4)
        for one in (lease, late):
            assert not one.tensor.is_inference()
            one.tensor.fill_(3)
            assert one.tensor.tolist() == [3] * 4


@dataclass
class Holder:
    ids: Any
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor


class TestShareIn:
    def test_tensors_become_pool_views_in_place(self, pool: BufferPool) -> None:
        lease = ask(pool, 8)
        holder = Holder(torch.arange(6, device=pool.device.torch_device).view(2, 3))
        pool.share_in(holder)
        pool.seal()
        assert holder.ids.data_ptr() == lease.tensor.data_ptr()
        assert holder.ids.tolist() == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.parametrize("kind", [dict, SimpleNamespace, Holder])
    def test_containers_are_walked_in_depth(self, kind: Any) -> None:
        pool = BufferPool(EmulatedDevice())
        inner = kind(ids=torch.tensor([1, 2]))
        outer = kind(ids=torch.tensor([3]), more=kind(ids=None, more={"deep": SimpleNamespace(x=inner)}))
        inner_lease = pool.request("more.more.deep.x.ids", 2, torch.int64, CPU, "b")
        pool.share_in(outer)
        pool.seal()

        def ids(holder: Any) -> Any:
            return holder["ids"] if isinstance(holder, dict) else holder.ids

        assert ids(inner).data_ptr() == inner_lease.tensor.data_ptr()
        assert ids(inner).tolist() == [1, 2]
        assert ids(outer).tolist() == [3]
        assert pool.report().num_leases == 3

    def test_a_frozen_dataclass_is_adopted(self) -> None:
        pool = BufferPool(EmulatedDevice())
        lease, frozen = ask(pool, 2), Frozen(torch.tensor([1, 2]))
        pool.share_in(frozen)
        pool.seal()
        assert frozen.ids.data_ptr() == lease.tensor.data_ptr()

    def test_after_the_seal_it_is_placed_at_once(self) -> None:
        pool = BufferPool(EmulatedDevice())
        lease = ask(pool, 4)
        pool.seal()
        holder = Holder(torch.tensor([1, 2]), {"new": torch.tensor([3])})
        pool.share_in(holder, owner="late")
        assert holder.ids.tolist() == [1, 2]
        assert holder.ids.data_ptr() == lease.tensor.data_ptr()
        assert pool.num_loads > 0, "what a runner left there is gone"
        assert [line.split(":")[0] for line in pool.report().private] == ["late.more.new"]
        with (
            pool.using("running decode"),
            pytest.raises(LoadError, match="sharing in the tensors of late: its buffers"),
        ):
            pool.share_in(refused := Holder(ids := torch.tensor([5, 6])), owner="late")
        pool.share_in(Holder(torch.tensor([7])))
        assert refused.ids is ids, "what was refused is not adopted later"

    def test_fields_that_are_one_tensor_stay_one(self) -> None:
        pool = BufferPool(EmulatedDevice())
        ids = torch.arange(6)
        first, second = SimpleNamespace(a=ids, b=ids), {"c": ids}
        pool.share_in(first)
        pool.share_in(second)
        pool.seal()
        first.b.fill_(7)
        assert first.a is first.b
        assert second["c"].tolist() == [7] * 6
        assert ids.tolist() == list(range(6))
        assert (pool.report().num_leases, pool.report().bytes_allocated) == (1, 48)

    def test_views_of_a_field_stay_views_of_it(self) -> None:
        pool = BufferPool(EmulatedDevice())
        whole = torch.arange(12).view(3, 4)
        holder = SimpleNamespace(part=whole[1:, 2:], flat=whole.view(-1), turned=whole.t(), whole=whole)
        pool.share_in(holder)
        pool.seal()
        assert len({one.untyped_storage().data_ptr() for one in vars(holder).values()}) == 1
        holder.part.fill_(-1)
        assert holder.whole.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, 9, -1, -1]]
        assert holder.flat.tolist() == holder.whole.flatten().tolist()
        assert holder.turned.tolist() == holder.whole.t().tolist()
        assert whole[1, 2] == 6

    @pytest.mark.parametrize("late", [False, True])
    def test_memory_that_no_one_field_shows_stays_where_it_is(self, late: bool) -> None:
        pool = BufferPool(EmulatedDevice())
        base = torch.arange(8)
        overlap = SimpleNamespace(left=base[:5], right=base[3:])
        recast = SimpleNamespace(bits=base.view(torch.int32)[:2], ids=base[:6])
        if late:
            pool.seal()
        pool.share_in(overlap)
        pool.share_in({"only": recast})
        pool.seal()
        overlap.left.fill_(9)
        assert overlap.right.tolist() == [9, 9, 5, 6, 7]
        assert recast.ids.tolist() == [9] * 5 + [5]
        assert len(pool.report().private) == 4
        assert all("stays where it is" in line for line in pool.report().private)
        assert pool.report().bytes_saved == 0

    def test_tensors_without_memory_are_no_aliases(self) -> None:
        pool = BufferPool(EmulatedDevice())
        empty, meta = torch.zeros(0), torch.zeros(3, device="meta")
        holder = SimpleNamespace(a=empty, b=torch.zeros(0, 4), c=meta, d=torch.zeros(4, device="meta"))
        pool.share_in(holder)
        pool.seal()
        assert [tuple(one.shape) for one in vars(holder).values()] == [(0,), (0, 4), (3,), (4,)]
        assert pool.report().private == ()

    @pytest.mark.parametrize("ambient", [False, True])
    def test_inference_tensors_get_a_fresh_private_allocation(self, ambient: bool) -> None:
        pool = BufferPool(EmulatedDevice())
        lease = ask(pool, 4)
        with torch.inference_mode():
            holder = Holder(torch.tensor([1, 2]), {"normal": torch.ones(1)})
        with torch.inference_mode(ambient):
            pool.share_in(holder)
            pool.seal()
        assert not holder.ids.is_inference()
        assert holder.ids.data_ptr() != lease.tensor.data_ptr()
        assert holder.ids.tolist() == [1, 2]
        holder.ids.fill_(9)  # outside inference mode
        assert holder.ids.tolist() == [9, 9]
        assert [line.split(":")[0] for line in pool.report().private] == ["Holder.ids", "Holder.more.normal"]

    @pytest.mark.parametrize("bad", [[torch.ones(2)], 3, "name", (torch.ones(1),), object(), Holder])
    def test_anything_else_is_refused_with_its_path_and_nothing_is_changed(self, bad: Any) -> None:
        pool = BufferPool(EmulatedDevice())
        ids = torch.tensor([1, 2])
        holder = Holder(ids, {"deep": SimpleNamespace(x=bad)})
        with pytest.raises(DeclarationError, match=rf"more\.deep\.x is a {type(bad).__name__}.*Leave it out"):
            pool.share_in(holder)
        pool.seal()
        assert holder.ids is ids
        assert pool.report().num_leases == 0

    def test_an_object_that_holds_itself_is_refused(self) -> None:
        holder = SimpleNamespace(ids=torch.tensor([1]))
        holder.more = {"back": holder}
        with pytest.raises(DeclarationError, match=r"more\.back holds itself"):
            BufferPool(EmulatedDevice()).share_in(holder)


@pytest.mark.parametrize(("size", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (2**53 + 1, 2**54)])
def test_next_power_of_two(size: int, power: int) -> None:
    assert next_power_of_two(size) == power
