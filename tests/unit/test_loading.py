"""How a load gets there: shared and growing memory, one transfer, the host ring, and the mode without copies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph.devices import Device, EmulatedDevice
from phonograph.errors import LoadError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import LoadMode, Registry
from phonograph.graphs.inputs.slot import Pad, Slot
from registries import WIDE, as_kind, by_hand, floats, ints, registry, tokens


class TestSharedBuffers:
    def test_interleaved_prefill_and_decode_stay_right(self, device: Device) -> None:
        pool = BufferPool(device)
        shared = [ints("ids"), floats("hidden", "tokens", WIDE)]
        prefill = registry(device, *shared, ints("starts", "seqs"), dims=[Dim("seqs", limit=4)], largest=64, pool=pool)
        decode = registry(device, floats("hidden", "tokens", WIDE), ints("rows"), ints("ids", pad=-2), pool=pool)
        pool.seal()
        assert pool.report().bytes_saved > 0
        for step in range(6):
            used = 3 + 7 * step
            ids, hidden = torch.arange(used) + step, torch.randn(used, WIDE)
            extent = Extent({"tokens": used, "seqs": 2}, {"tokens": 64, "seqs": 4})
            batch = {"ids": ids.numpy(), "hidden": hidden.to(device.torch_device), "starts": [0, step]}
            view = prefill.load(batch, extent).batch
            assert torch.equal(view["ids"].cpu(), by_hand(ids, (64,), -1))
            assert torch.equal(view["hidden"].cpu(), by_hand(hidden, (64, WIDE), 0, torch.float32))
            assert view["starts"].tolist() == [0, step, -1, -1]
            for rows in range(1, 4):
                small = {"ids": [step] * rows, "rows": [rows] * rows, "hidden": np.full((rows, WIDE), step)}
                view = decode.load(small, tokens(rows, 8)).batch
                assert view["ids"].tolist() == [step] * rows + [-2] * (8 - rows)
                assert view["rows"].tolist() == [rows] * rows + [-1] * (8 - rows)
                assert view["hidden"][:, 0].tolist() == [step] * rows + [0] * (8 - rows)

    def test_eager_buffers_grow_without_moving_captured_ones(self, device: Device) -> None:
        made = registry(device, ints("ids"), floats("hidden", "tokens", WIDE))

        def batch(used: int) -> dict[str, Any]:
            return {"ids": list(range(used)), "hidden": np.full((used, WIDE), used)}

        captured = made.load(batch(3), tokens(3, 8)).batch
        addresses = [captured[name].data_ptr() for name in ("ids", "hidden")]
        views = {}
        for used in (3, 20, 21, 100):
            views[used] = made.load(batch(used), tokens(used), mode=LoadMode.EAGER).batch
            assert views[used]["ids"].tolist() == list(range(used))
            assert views[used]["hidden"][:, 0].tolist() == [used] * used
            assert made.holds(views[used]["ids"])
            assert made.holds(views[used]["hidden"])
        sizes = {used: view["hidden"].untyped_storage().nbytes() for used, view in views.items()}
        assert sizes == {3: 4 * WIDE * 4, 20: 32 * WIDE * 4, 21: 32 * WIDE * 4, 100: 128 * WIDE * 4}
        assert {used: view["ids"].untyped_storage().nbytes() for used, view in views.items()} == {
            3: 32,
            20: 256,
            21: 256,
            100: 1024,
        }
        again = made.load(batch(2), tokens(2, 8)).batch
        assert [again[name].data_ptr() for name in ("ids", "hidden")] == addresses

    def test_after_growth_small_batches_use_the_grown_buffers(self, device: Device) -> None:
        made = registry(device, floats("hidden", "tokens", WIDE))

        def load(used: int) -> torch.Tensor:
            batch = {"hidden": np.full((used, WIDE), used)}
            view: torch.Tensor = made.load(batch, tokens(used), mode=LoadMode.EAGER).batch["hidden"]
            return view

        load(2)
        grown = load(50)
        assert load(2).data_ptr() == grown.data_ptr()
        assert made.holds(load(2))

    def test_any_number_of_eager_sizes_may_come(self) -> None:
        made = registry(EmulatedDevice(), ints("ids"))
        for used in (*range(600), 3):
            view = made.load({"ids": np.arange(used)}, tokens(used), mode=LoadMode.EAGER).batch["ids"]
            assert view.tolist() == list(range(used))

    @pytest.mark.parametrize("mode", list(LoadMode))
    def test_buffers_first_used_under_inference_mode_can_be_written_outside_it(
        self, device: Device, mode: LoadMode
    ) -> None:
        seen: list[torch.Tensor] = []

        def compute(batch: Any, extent: Extent) -> torch.Tensor:
            seen.append(batch["ids"])
            return seen[-1]

        made = registry(device, ints("ids"), floats("hidden", "tokens", WIDE), ints("n", compute=compute))
        extent = tokens(2, 4) if mode is LoadMode.GRAPH else tokens(2)
        with torch.inference_mode():
            made.load({"ids": [1, 2], "hidden": np.ones((2, WIDE))}, extent, mode=mode)
        view = made.load({"ids": [3, 4], "hidden": np.zeros((2, WIDE))}, extent, mode=mode).batch
        assert [view["ids"][:2].tolist(), view["n"][:2].tolist()] == [[3, 4], [3, 4]]
        assert not seen[-1].is_inference()
        for tensor in view.values():
            assert not tensor.is_inference()
            tensor.fill_(1)

    @pytest.mark.parametrize("mode", list(LoadMode))
    @pytest.mark.parametrize("shape", [("tokens",), ("tokens", WIDE), (WIDE, "tokens")])
    def test_values_that_lie_in_the_buffers_are_read_before_those_are_written(
        self, device: Device, mode: LoadMode, shape: tuple[int | str, ...]
    ) -> None:
        made = registry(device, floats("a", *shape), floats("b", *shape), ints("ids"))

        def load(a: Any, b: Any, ids: Any, used: int, padded: int) -> dict[str, Any]:
            extent = tokens(used, padded) if mode is LoadMode.GRAPH else tokens(used)
            view: dict[str, Any] = made.load({"a": a, "b": b, "ids": ids}, extent, mode=mode).batch
            return view

        def rows(value: torch.Tensor, count: int) -> torch.Tensor:
            return value.narrow(shape.index("tokens"), 0, count)

        first, second = torch.randn(2, *made.slots[0].sizes({"tokens": 2}))
        view = load(first.numpy(), second.numpy(), [1, 2], 2, 2)
        swapped = load(view["b"], view["a"], [3, 4], 2, 2)
        assert torch.equal(rows(swapped["a"], 2).cpu(), second)
        assert torch.equal(rows(swapped["b"], 2).cpu(), first)
        spread = load(swapped["b"], swapped["a"], [5, 6], 2, 4)
        assert torch.equal(rows(spread["a"], 2).cpu(), first)
        assert torch.equal(rows(spread["b"], 2).cpu(), second)
        fewer = load(rows(spread["b"], 1), rows(spread["a"], 1), [7], 1, 1)
        assert torch.equal(rows(fewer["a"], 1).cpu(), rows(second, 1))
        assert torch.equal(rows(fewer["b"], 1).cpu(), rows(first, 1))
        assert fewer["ids"].tolist() == [7]

    @pytest.mark.parametrize("mode", list(LoadMode))
    def test_the_last_steps_tokens_may_be_this_steps_other_input(self, device: Device, mode: LoadMode) -> None:
        made = registry(device, ints("ids"), ints("last"))
        ids = made.load({"ids": [1, 2], "last": [0, 0]}, tokens(2), mode=mode).batch["ids"]
        view = made.load({"ids": [7, 8], "last": ids}, tokens(2), mode=mode).batch
        assert [view["ids"].tolist(), view["last"].tolist()] == [[7, 8], [1, 2]]


class Watched:
    """A device whose fences write down what happens to them."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.log: list[tuple[str, int]] = []
        self._fences = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def fence(self) -> WatchedFence:
        self._fences += 1
        return WatchedFence(self._device.fence(), self._fences - 1, self.log)


class WatchedFence:
    def __init__(self, fence: Any, number: int, log: list[tuple[str, int]]) -> None:
        self._fence, self._number, self._log = fence, number, log

    def record(self) -> None:
        self._log.append(("record", self._number))
        self._fence.record()

    def synchronize(self) -> None:
        self._log.append(("wait", self._number))
        self._fence.synchronize()


class Ops(TorchDispatchMode):
    """Writes down the ops that reach the dispatcher, and how many bytes the copies among them write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        self.names.append(name)
        if name == "copy_":
            self.sent.append(args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def counted(made: Registry) -> tuple[int, int, int]:
    return (made.counts.transfers, made.counts.grouped, made.counts.plain)


class TestCopies:
    def test_eight_host_values_go_in_one_transfer(self, device: Device) -> None:
        dtypes = [
            torch.int64,
            torch.int32,
            torch.int16,
            torch.uint8,
            torch.bool,
            torch.float64,
            torch.float32,
            torch.half,
        ]
        slots = [Slot(f"s{i}", ("tokens", 2), dtype, pad=Pad.fill(1)) for i, dtype in enumerate(dtypes)]
        made = registry(device, *slots)
        values = {slot.name: torch.randint(0, 2, (3, 2)).to(slot.dtype) for slot in slots}
        batch = as_kind(values, "numpy", device)
        made.load(batch, tokens(3, 8))
        before = counted(made)
        with torch.no_grad(), Ops() as seen:
            made.fill_prepared(batch, tokens(3, 8), {}, made.prepare(tokens(3, 8)))
        assert seen.names == ["copy_"]
        assert counted(made) == (before[0] + 1, before[1], before[2])
        view = made.load(batch, tokens(3, 8)).batch
        for slot in slots:
            assert torch.equal(view[slot.name].cpu(), by_hand(values[slot.name], (8, 2), 1, slot.dtype))

    def test_absent_and_computed_values_and_bfloat16_go_with_them(self, device: Device) -> None:
        slots = [ints("ids"), Slot("scale", ("tokens",), torch.bfloat16), floats("absent", absent=2.0)]
        made = registry(device, *slots, ints("computed", compute=lambda batch, extent: (batch["ids"] + 1).tolist()))
        batch = {"ids": [1, 2, 3], "scale": [0.5, 1.5, 2.5]}
        with torch.no_grad(), Ops() as seen:
            view = made.load(batch, tokens(3, 4)).batch
        assert seen.names.count("copy_") == 1
        assert counted(made) == (1, 0, 0)
        assert view["computed"].tolist() == [2, 3, 4, -1]
        assert view["absent"].tolist() == [2.0, 2.0, 2.0, 0.0]
        assert view["scale"].tolist() == [0.5, 1.5, 2.5, 0.0]

    def test_device_values_go_in_one_grouped_copy(self, device: Device) -> None:
        slots = [ints(f"s{i}", *(("tokens",) if i % 2 else ("tokens", 2))) for i in range(6)]
        made = registry(device, *slots)
        values = {s.name: torch.randint(0, 9, s.sizes({"tokens": 8}), device=device.torch_device) for s in slots}
        made.load(values, tokens(8))
        before = counted(made)
        with torch.no_grad(), Ops() as seen:
            made.fill_prepared(values, tokens(8), {}, made.prepare(tokens(8)))
        assert seen.names == ["_foreach_copy_"]
        assert counted(made) == (before[0], before[1] + 1, before[2])
        view = made.load(values, tokens(8)).batch
        assert all(torch.equal(view[name], value) for name, value in values.items())

    def test_values_are_grouped_by_their_dtypes(self, device: Device) -> None:
        slots = [ints("a"), ints("b"), Slot("c", ("tokens",), torch.int32, pad=Pad.fill(0)), floats("d"), floats("e")]
        made = registry(device, *slots)
        place = device.torch_device
        values = {
            "a": torch.arange(8, device=place),
            "b": torch.arange(8, dtype=torch.int32, device=place),
            "c": torch.arange(8, device=place),
            "d": torch.randn(8, device=place),
            "e": torch.randn(8, device=place),
        }
        view = made.load(values, tokens(8)).batch
        assert counted(made) == (0, 4, 0)
        for slot in slots:
            assert torch.equal(view[slot.name], values[slot.name].to(slot.dtype))

    def test_large_and_strided_values_go_by_plain_copies(self, device: Device) -> None:
        slots = [floats("large", "tokens", 1 << 16), ints("ids"), ints("at", 3, "tokens")]
        made = registry(device, *slots)
        place = device.torch_device
        large = torch.randn(5, 1 << 16, device=place)
        values = {
            "large": large,
            "ids": torch.arange(5, device=place),
            "at": torch.ones(3, 5, dtype=torch.int64, device=place),
        }
        view = made.load(values, tokens(5)).batch
        assert counted(made) == (0, 1, 1)
        assert torch.equal(view["large"], large)
        view = made.load(values, tokens(5, 8)).batch  # `at` has rows of 8 now, and tails to fill
        assert counted(made) == (1, 2, 3)
        assert torch.equal(view["at"].cpu(), by_hand(values["at"], (3, 8), -1))
        assert not view["large"][5:].any()

    @pytest.mark.parametrize("large_first", [False, True])
    def test_only_the_part_of_the_block_that_is_written_is_sent(self, device: Device, large_first: bool) -> None:
        slots = [ints("ids"), ints("table", "tokens", 500)]
        made = registry(device, *(reversed(slots) if large_first else slots))
        table = torch.ones(8, 500, dtype=torch.int64, device=device.torch_device)
        batch = {"ids": np.arange(8), "table": table}
        with torch.no_grad(), Ops() as seen:
            view = made.load(batch, tokens(8)).batch
        assert seen.sent == [64]
        assert view["ids"].tolist() == list(range(8))
        assert torch.equal(view["table"], table)

    def test_a_block_is_not_written_again_before_its_fence_has_passed(self, device: Device) -> None:
        watched = Watched(device)
        made = registry(watched, ints("ids"))
        blocks: dict[int, int] = {}
        for step in range(8):
            watched.log.clear()
            made.load({"ids": [step]}, tokens(1, 2))
            waited, recorded = watched.log
            assert waited == ("wait", recorded[1])
            assert recorded[0] == "record"
            blocks[recorded[1]] = blocks.get(recorded[1], 0) + 1
        assert len(blocks) >= 2  # the host need not wait for the last transfer
        assert max(blocks.values()) - min(blocks.values()) <= 1

    def test_a_fence_is_waited_for_before_the_host_writes(self) -> None:
        """While the wait lasts, the block still holds what its transfer reads."""

        class Looking(Watched):
            def fence(self) -> WatchedFence:
                looking, number = self, self._fences
                made = super().fence()

                class Fence(WatchedFence):
                    def synchronize(self) -> None:
                        looking.held.append((number, looking.blocks[number].clone()))

                return Fence(made._fence, number, self.log)

            def host_block(self, num_bytes: int) -> torch.Tensor:
                block = torch.zeros(num_bytes, dtype=torch.uint8)
                self.blocks.append(block)
                return block

            blocks: list[torch.Tensor]
            held: list[tuple[int, torch.Tensor]]

        device = Looking(EmulatedDevice())
        device.blocks, device.held = [], []
        made = registry(device, ints("ids"), largest=2)
        for step in range(1, 10):
            made.load({"ids": [step, step]}, tokens(2))
        contents = [block.view(torch.int64).tolist() for _, block in device.held]
        ring = len(device.blocks)
        assert contents == [[0, 0]] * ring + [[step, step] for step in range(1, 10 - ring)]

    def test_device_values_alone_take_no_host_block(self, device: Device) -> None:
        watched = Watched(device)
        made = registry(watched, ints("ids"))
        made.load({"ids": torch.ones(4, dtype=torch.int64, device=device.torch_device)}, tokens(4))
        assert watched.log == []


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("mode", LoadMode)
@pytest.mark.parametrize("wide", [4, WIDE])
def test_a_sparse_tensor_is_refused_by_the_slots_name(device: Device, place: Any, mode: LoadMode, wide: int) -> None:
    made = registry(device, floats("x", "tokens", wide, place=place))
    for on in {torch.device("cpu"), device.torch_device if place == "device" else torch.device("cpu")}:
        for value in (torch.ones(3, wide, device=on).to_sparse(), torch.ones(3, wide, device=on).to_sparse_csr()):
            with pytest.raises(LoadError, match=r"slot 'x' is a dense tensor, the batch has a sparse_\w+ one"):
                made.load({"x": value}, tokens(3, 8 if mode is LoadMode.GRAPH else 3), mode=mode)


class TestNoCopy:
    def test_gives_what_eager_gives_and_carries_device_values(self, device: Device) -> None:
        slots = [
            ints("ids"),
            ints("listed"),
            Slot("narrowed", ("tokens",), torch.int32, pad=Pad.fill(0)),
            floats("hidden", "tokens", WIDE),
            floats("mask", absent=0.0),
            ints("n", compute=lambda batch, extent: batch["ids"] + 1),
        ]
        made = registry(device, *slots)
        place = device.torch_device
        batch: dict[str, Any] = {
            "ids": torch.tensor([1, 2], device=place),
            "listed": [3, 4],
            "narrowed": torch.tensor([5, 6], device=place),
            "hidden": torch.randn(2, WIDE, device=place),
            "mask": None,
        }
        eager = made.load(batch, tokens(2), mode=LoadMode.EAGER).batch
        kept = {name: value.clone() for name, value in eager.items() if value is not None}
        view = made.load(batch, tokens(2), mode=LoadMode.NO_COPY).batch
        assert view.keys() == eager.keys()
        assert view["mask"].tolist() == [0.0, 0.0]
        for name, value in kept.items():
            assert torch.equal(view[name], value)
            assert view[name].dtype == value.dtype
        assert view["ids"] is batch["ids"]
        assert view["hidden"] is batch["hidden"]
        assert made.holds(eager["ids"])
        assert not any(made.holds(value) for value in view.values())
        made.load({**batch, "listed": [8, 9], "narrowed": batch["narrowed"] + 1}, tokens(2), mode=LoadMode.NO_COPY)
        assert view["listed"].tolist() == [3, 4]
        assert view["narrowed"].tolist() == [5, 6]
        assert view["n"].tolist() == [2, 3]

    def test_a_carried_value_is_checked_all_the_same(self, device: Device) -> None:
        made = registry(device, ints("ids"), ints("rows"))
        place = device.torch_device
        with pytest.raises(LoadError, match="slot 'rows'"):
            made.load(
                {
                    "ids": torch.ones(2, dtype=torch.int64, device=place),
                    "rows": torch.ones(3, dtype=torch.int64, device=place),
                },
                tokens(2),
                mode=LoadMode.NO_COPY,
            )

    def test_what_must_be_padded_is_copied(self, device: Device) -> None:
        made = registry(device, ints("ids"))
        ids = torch.tensor([1, 2], device=device.torch_device)
        assert made.load({"ids": ids}, tokens(2, 4), mode=LoadMode.NO_COPY).batch["ids"].tolist() == [1, 2, -1, -1]

    def test_an_empty_slot_beside_a_smaller_item_is_loaded(self, device: Device) -> None:
        made = registry(device, ints("ids"), Slot("count", (), torch.int32))
        batch = {"ids": np.zeros(0, np.int64), "count": np.asarray(7, np.int32)}
        view = made.load(batch, tokens(0), mode=LoadMode.NO_COPY).batch
        assert view["ids"].tolist() == []
        assert view["count"].item() == 7


class TestSharing:
    """Runners of one pool."""

    def made(self, device: Device, *sets: list[Slot]) -> tuple[BufferPool, list[Registry]]:
        pool = BufferPool(device)
        return pool, [registry(device, *slots, pool=pool) for slots in sets]

    def test_packed_slots_of_all_runners_lie_in_one_block_filled_from_one_ring(self, device: Device) -> None:
        pool, (first, second) = self.made(device, [ints("ids"), ints("rows")], [ints("positions")])
        pool.seal()
        late = registry(device, ints("ids"), ints("rows"), pool=pool)
        views = [
            first.load({"ids": [1], "rows": [2]}, tokens(1, 2)).batch["ids"],
            second.load({"positions": [3]}, tokens(1, 8)).batch["positions"],
            late.load({"ids": [1], "rows": [2]}, tokens(1, 2)).batch["ids"],
        ]
        assert len({view.data_ptr() for view in views}) == 1
        assert pool.report().num_allocations == 1
        assert len(pool.rings) == 1

    @pytest.mark.parametrize("private", ["wide", "ids"])
    def test_a_slot_can_keep_its_memory_to_itself(self, device: Device, private: str) -> None:
        def slots(shared: bool) -> list[Slot]:
            wide = floats("wide", "tokens", WIDE, shared=shared or private != "wide")
            return [ints("ids", shared=shared or private != "ids"), wide]

        pool, (first, second) = self.made(device, slots(shared=False), slots(shared=True))
        pool.seal()
        batches = [{"ids": [n], "wide": np.full((1, WIDE), n, dtype=np.float32)} for n in (1, 2)]
        kept = first.load(batches[0], tokens(1, 2)).batch
        other = second.load(batches[1], tokens(1, 2)).batch
        assert kept[private].flatten()[0] == 1, "still what was loaded"
        for name in ("ids", "wide"):
            assert (kept[name].data_ptr() == other[name].data_ptr()) == (name != private)
        before = first.counts.transfers
        first.load({"ids": [1], "wide": torch.ones(1, WIDE, device=device.torch_device)}, tokens(1, 2))
        assert first.counts.transfers == before + 1
        assert ["shared=False" in line for line in pool.report().private] == [True]

    def test_a_new_size_writes_nothing_before_the_batch_is_read(self, device: Device) -> None:
        """A value may lie in the buffer that the size's first load writes."""
        unread = Slot("at", ("tokens", WIDE), torch.float32, pad=Pad.unread(because="nobody looks"), valid=(0, 9))
        made = registry(device, unread)
        view = made.load({"at": np.full((4, WIDE), 7, dtype=np.float32)}, tokens(4, 8)).batch["at"]
        for padded in (6, 4):
            view = made.load({"at": view[:3]}, tokens(3, padded)).batch["at"]
            assert view[:3].tolist() == [[7.0] * WIDE] * 3

    def test_an_unread_tail_never_holds_what_only_another_runner_may_have(self, device: Device) -> None:
        unread = Pad.unread(because="nobody looks")
        narrow = ints("at", "tokens", place="host")
        limited = Slot("at", ("tokens",), torch.int64, pad=unread, place="host", valid=(0, 9))
        pool, (first, second) = self.made(device, [narrow], [limited])
        pool.seal()
        for used, padded in ((3, 4), (2, 8), (1, 2), (1, 8)):
            first.load({"at": [1000] * 8}, tokens(8))
            view = second.load({"at": [5] * used}, tokens(used, padded)).batch["at"]
            assert view.tolist() == [5] * used + [0] * (padded - used)


def test_pad_values_that_still_stand_are_not_mistaken_for_others() -> None:
    """The same sizes again skip the pad values in the host block; anything else in between writes them anew."""
    slots = [
        Slot("a", ("seqs",), torch.int64, pad=Pad.fill(7)),
        Slot("b", ("seqs",), torch.int64, pad=Pad.fill(8), absent=-1),
    ]
    dims = {"seqs": Dim("seqs")}
    device = EmulatedDevice()
    registry, pool = Registry(device, slots, dims), BufferPool(device)
    registry.declare(pool, "seqs", 8)
    pool.seal()
    generator = random.Random(3)
    for _ in range(200):
        used, padded = generator.choice([(3, 4), (3, 8), (4, 4), (5, 8)])
        a = np.arange(used)
        b: Any = generator.choice([np.arange(used), list(range(used)), torch.arange(used), None])
        view = registry.load({"a": a, "b": b}, Extent({"seqs": used}, {"seqs": padded})).batch
        assert view["a"].tolist() == [*range(used), *[7] * (padded - used)]
        wanted = [*range(used)] if b is not None else [-1] * used
        assert view["b"].tolist() == wanted + [8] * (padded - used)
