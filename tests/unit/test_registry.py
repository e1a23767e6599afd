"""The registry: what a load writes, what it leaves alone, and what the view shows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phonograph.devices import Device, EmulatedDevice, open_device
from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import LoadMode, Registry
from phonograph.graphs.inputs.slot import Pad, Slot
from registries import GARBAGE, WIDE, as_kind, by_hand, floats, ints, registry, spoil, tokens


class Spoiled:
    """A device whose host blocks come full of garbage."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def host_block(self, num_bytes: int) -> torch.Tensor:
        block: torch.Tensor = self._device.host_block(num_bytes)
        return block.fill_(GARBAGE)


class TestShapes:
    @pytest.mark.parametrize("kind", ["tensor", "numpy", "list"])
    @pytest.mark.parametrize(
        ("shape", "used", "padded"),
        [
            (("tokens",), (3,), (8,)),
            ((3, "tokens"), (3, 3), (3, 8)),
            (("tokens", WIDE), (3, WIDE), (8, WIDE)),
            (("seqs", "pages"), (2, 3), (4, 5)),
            (("pages", 2, "seqs"), (3, 2, 2), (5, 2, 4)),
            ((), (), ()),
            ((4,), (4,), (4,)),
        ],
    )
    def test_dims_stand_on_any_axis(
        self, device: Device, shape: tuple[int | str, ...], used: tuple[int, ...], padded: tuple[int, ...], kind: str
    ) -> None:
        slot = Slot("x", shape, torch.float32, pad=Pad.fill(-7))
        dims = [Dim("tokens"), Dim("seqs", per="tokens"), Dim("pages", limit=5)]
        made = registry(device, slot, dims=dims)
        extent = Extent({"tokens": 3, "seqs": 2, "pages": 3}, {"tokens": 8, "seqs": 4, "pages": 5})
        spoil(made.load({"x": torch.ones(used)}, extent).batch["x"])
        value = torch.randn(used)
        given = {"tensor": value.to(device.torch_device), "numpy": value.numpy(), "list": value.tolist()}[kind]
        view = made.load({"x": given}, extent).batch["x"]
        assert torch.equal(view.cpu(), by_hand(value, padded, -7, torch.float32))
        assert view.is_contiguous()

    def test_the_order_of_dims_in_an_extent_does_not_matter(self, device: Device) -> None:
        made = registry(device, ints("x", "tokens", "pages"), dims=[Dim("tokens"), Dim("pages", limit=4)])
        tall = Extent({"tokens": 3, "pages": 2}, {"tokens": 4, "pages": 4})
        wide = Extent({"pages": 3, "tokens": 2}, {"pages": 4, "tokens": 4})
        for extent, shape in ((tall, (3, 2)), (wide, (2, 3)), (tall, (3, 2))):
            value = torch.randint(0, 9, shape)
            view = made.load({"x": value.numpy()}, extent).batch["x"]
            assert torch.equal(view.cpu(), by_hand(value, (4, 4), -1))

    def test_a_batch_that_the_extent_does_not_hold_is_refused(self, device: Device) -> None:
        made = registry(device, ints("x"))
        with pytest.raises(LoadError, match=r"loading decode.*uses 5 tokens.*padded to 4"):
            made.load({"x": [0] * 5}, tokens(5, 4))
        with pytest.raises(LoadError, match=r"loading decode.*padded to 16 tokens.*hold 8"):
            made.load({"x": [0] * 5}, tokens(5, 16))
        with pytest.raises(LoadError, match="nothing of dim 'tokens'"):
            made.load({"x": [0] * 5}, Extent({"seqs": 5}, {"seqs": 5}))


class TestPadding:
    @pytest.mark.parametrize("kind", ["tensor", "numpy"])
    def test_only_the_declared_tail_is_touched(self, device: Device, kind: str) -> None:
        whole = torch.full((3, 10), 99, device=device.torch_device)
        made = registry(device, ints("x", 3, "tokens"), adopt={"x": whole})
        value = torch.arange(9).view(3, 3)
        made.load({"x": value.to(device.torch_device) if kind == "tensor" else value.numpy()}, tokens(3, 8))
        assert torch.equal(whole[:, :8].cpu(), by_hand(value, (3, 8), -1))
        assert torch.equal(whole[:, 8:].cpu(), torch.full((3, 2), 99))

    @pytest.mark.parametrize("slot", [ints("x", "tokens"), floats("x", "tokens", WIDE)], ids=["packed", "wide"])
    @pytest.mark.parametrize("kind", ["tensor", "numpy"])
    def test_memory_behind_the_padded_view_is_not_changed(self, device: Device, slot: Slot, kind: str) -> None:
        made = registry(device, slot)
        whole = made.load({"x": torch.zeros(slot.sizes({"tokens": 8}), dtype=slot.dtype).numpy()}, tokens(8)).batch["x"]
        spoil(whole)
        before = whole[5:].clone()
        value = torch.ones(slot.sizes({"tokens": 3}), dtype=slot.dtype)
        view = made.load({"x": value.to(device.torch_device) if kind == "tensor" else value.numpy()}, tokens(3, 5))
        assert view.batch["x"].data_ptr() == whole.data_ptr()
        assert torch.equal(whole[5:], before)
        assert torch.equal(whole[:3].cpu(), value)

    @pytest.mark.parametrize("kind", ["tensor", "numpy", "list"])
    def test_every_element_is_defined_over_garbage(self, device: Device, kind: str) -> None:
        slots = [
            ints("ids"),
            Slot("mask", ("tokens", 3), torch.bool, pad=Pad.fill(True)),
            floats("hidden", "tokens", WIDE),
            Slot("scale", (2, "tokens"), torch.bfloat16, pad=Pad.fill(1.5)),
            Slot("rows", ("tokens",), torch.int32, pad=Pad.unread(because="nobody looks"), valid=(2, 9)),
            Slot("wide", ("tokens", WIDE), torch.float32, pad=Pad.unread(because="nobody looks"), valid=(3.0, 4.0)),
            ints("on_host", place="host"),
        ]
        made = registry(Spoiled(device), *slots)
        values = {
            "ids": torch.arange(3),
            "mask": torch.rand(3, 3) > 0.5,
            "hidden": torch.randn(3, WIDE),
            "scale": torch.randn(2, 3).bfloat16(),
            "rows": torch.tensor([4, 5, 6], dtype=torch.int32),
            "wide": torch.full((3, WIDE), 3.5),
            "on_host": torch.arange(3),
        }
        fills = {"ids": -1, "mask": True, "hidden": 0, "scale": 1.5, "rows": 2, "wide": 3, "on_host": -1}
        for slot in slots:
            spoil(made.load(as_kind(values, "list", device), tokens(3, 8)).batch[slot.name])
        view = made.load(as_kind(values, kind, device), tokens(3, 8)).batch
        for slot in slots:
            wanted = by_hand(values[slot.name], slot.sizes({"tokens": 8}), fills[slot.name], slot.dtype)
            assert torch.equal(view[slot.name].cpu(), wanted), slot.name

    def test_an_unread_tail_never_holds_another_slots_bytes(self, device: Device) -> None:
        rows = Slot("rows", ("tokens",), torch.int64, pad=Pad.unread(because="nobody looks"), valid=(0, 9))
        made = registry(device, ints("ids"), rows)
        for used, padded in ((8, 8), (1, 2), (2, 6), (1, 8)):
            batch = {"ids": [10**12] * used, "rows": torch.ones(used, dtype=torch.int64, device=device.torch_device)}
            view = made.load(batch, tokens(used, padded)).batch["rows"]
            assert view.tolist() == [1] * used + [0] * (padded - used)

    def test_poison_fills_only_the_unread_tails(self, device: Device) -> None:
        unread = Pad.unread(because="nobody looks")
        made = registry(device, ints("ids"), Slot("rows", (2, "tokens"), torch.int64, pad=unread, valid=(3, 9)))
        view = made.load({"ids": [5, 6], "rows": [[4, 4], [4, 4]]}, tokens(2, 4)).batch
        for pattern, poison in ((0, 3), (1, 9)):
            made.poison_unread(tokens(2, 4), pattern)
            assert view["rows"].tolist() == [[4, 4, poison, poison]] * 2
            assert view["ids"].tolist() == [5, 6, -1, -1]

    @pytest.mark.parametrize("kind", ["tensor", "numpy", "list"])
    def test_a_batch_of_nothing_is_all_padding(self, device: Device, kind: str) -> None:
        slots = [
            ints("ids"),
            floats("hidden", "tokens", WIDE),
            ints("table", "tokens", "pages"),
            ints("at", 3, "tokens"),
        ]
        made = registry(device, *slots, dims=[Dim("pages", limit=2)])
        full = {"ids": torch.ones(8, dtype=torch.int64), "hidden": torch.ones(8, WIDE)}
        full |= {"table": torch.ones(8, 2, dtype=torch.int64), "at": torch.ones(3, 8, dtype=torch.int64)}
        made.load(as_kind(full, kind, device), Extent({"tokens": 8, "pages": 2}, {"tokens": 8, "pages": 2}))
        empty = {name: value[:0] if name != "at" else value[:, :0] for name, value in full.items()}
        batch = as_kind(empty, kind, device)
        used = made.measure(batch)
        assert used["tokens"] == 0
        view = made.load(batch, Extent(used, {"tokens": 8, "pages": 2})).batch
        assert view["ids"].tolist() == [-1] * 8
        assert view["table"].tolist() == [[-1] * 2] * 8
        assert view["at"].tolist() == [[-1] * 8] * 3
        assert not view["hidden"].any()
        eager = made.load(batch, Extent(used, used), mode=LoadMode.EAGER).batch
        assert [tuple(eager[name].shape) for name in ("ids", "hidden", "at")] == [(0,), (0, WIDE), (3, 0)]


class TestOptional:
    @pytest.mark.parametrize("slot", [floats("mask", absent=1.0), floats("mask", "tokens", WIDE, absent=1.0)])
    def test_an_absent_input_is_reset_for_graphs(self, device: Device, slot: Slot) -> None:
        made = registry(device, ints("ids"), slot)
        yesterday = torch.full(slot.sizes({"tokens": 3}), 5.0)
        made.load({"ids": [1, 2, 3], "mask": yesterday.numpy()}, tokens(3, 8))
        view = made.load({"ids": [1, 2, 3], "mask": None}, tokens(3, 8)).batch
        neutral = torch.ones(slot.sizes({"tokens": 3}))
        assert torch.equal(view["mask"].cpu(), by_hand(neutral, slot.sizes({"tokens": 8}), 0, torch.float32))

    @pytest.mark.parametrize("mode", [LoadMode.EAGER, LoadMode.NO_COPY])
    @pytest.mark.parametrize("slot", [floats("mask", absent=1.0), floats("mask", "tokens", WIDE, absent=1.0)])
    def test_the_eager_path_reads_the_same_neutral_value(self, device: Device, mode: LoadMode, slot: Slot) -> None:
        made = registry(device, ints("ids"), slot)
        yesterday = np.full(slot.sizes({"tokens": 2}), 5.0, dtype=np.float32)
        made.load({"ids": [1, 2], "mask": yesterday}, tokens(2), mode=mode)
        view = made.load({"ids": [1, 2], "mask": None}, tokens(2), mode=mode).batch
        assert torch.equal(view["mask"].cpu(), torch.ones(slot.sizes({"tokens": 2})))

    @pytest.mark.parametrize("mode", list(LoadMode))
    def test_a_keyed_input_is_none_in_the_view(self, device: Device, mode: LoadMode) -> None:
        made = registry(device, ints("ids"), floats("mask", keyed=True))
        assert made.load({"ids": [1], "mask": None}, tokens(1), mode=mode).batch["mask"] is None
        assert made.load({"ids": [1], "mask": [2.0]}, tokens(1), mode=mode).batch["mask"].tolist() == [2.0]

    def test_a_dim_that_only_an_absent_input_has_is_as_large_as_in_a_graph(self, device: Device) -> None:
        """A mean over an empty axis would not be the mean over the neutral values that a graph reads."""
        made = registry(device, ints("ids"), floats("mask", "cells", absent=1.0), dims=[Dim("cells", limit=4)])
        batch = {"ids": [1], "mask": None}
        used = made.measure(batch)
        assert used == {"cells": 4, "tokens": 1}
        view = made.load(batch, Extent(used, {"tokens": 2, "cells": 4})).batch
        assert view["mask"].tolist() == [1.0] * 4
        assert made.load(batch, Extent(used, used), mode=LoadMode.EAGER).batch["mask"].tolist() == [1.0] * 4

    @pytest.mark.parametrize("optional", [{"absent": 1.0}, {"keyed": True}])
    def test_a_dim_per_another_keeps_its_ratio_where_its_only_input_is_absent(
        self, device: Device, optional: dict[str, Any]
    ) -> None:
        dims = [Dim("pairs", per="tokens", times=2)]
        made = registry(device, ints("ids"), floats("bias", "pairs", **optional), dims=dims)
        assert made.measure({"ids": [1, 2, 3], "bias": None}) == {"tokens": 3, "pairs": 6}

    def test_a_dim_that_only_keyed_inputs_have_is_unused_where_they_are_absent(self, device: Device) -> None:
        made = registry(device, ints("ids"), floats("mask", "cells", keyed=True), dims=[Dim("cells", limit=4)])
        assert made.measure({"ids": [1], "mask": None}) == {"tokens": 1, "cells": 0}

    def test_a_missing_input_that_is_not_optional_is_refused(self, device: Device) -> None:
        made = registry(device, ints("ids"), floats("mask"))
        for batch in ({"ids": [1]}, {"ids": [1], "mask": None}):
            with pytest.raises(LoadError, match=r"loading decode: slot 'mask'.*no 'mask'.*absent=… or keyed=True"):
                made.load(batch, tokens(1))


class TestComputed:
    def test_runs_after_the_others_and_sees_what_they_loaded(self, device: Device) -> None:
        def compute(batch: Any, extent: Extent) -> Any:
            assert isinstance(batch["lens"], torch.Tensor)
            assert batch["lens"].dtype == torch.int64
            assert batch["scale"].dtype == torch.bfloat16
            assert batch["limit"].tolist() == [3]
            assert batch["wide"].shape == (2, WIDE)
            return batch["lens"].cumsum(0) + extent.padded["tokens"]

        slots = [
            ints("ends", compute=compute),  # declared before what it reads
            ints("lens"),
            Slot("scale", ("tokens",), torch.bfloat16),
            ints("limit", 1, place="host"),
            floats("wide", "tokens", WIDE),
        ]
        made = registry(device, *slots)
        batch = {"lens": [3, 4], "scale": [1.0, 2.0], "limit": [3], "wide": np.ones((2, WIDE)), "ends": None}
        assert made.load(batch, tokens(2, 4)).batch["ends"].tolist() == [7, 11, -1, -1]
        assert batch["ends"] is None
        assert batch["lens"] == [3, 4]

    @pytest.mark.parametrize("mode", list(LoadMode))
    @pytest.mark.parametrize("batch", [{"ids": [1, 2]}, {"ids": [1, 2], "n": None}, {"ids": [1, 2], "n": [9, 9]}])
    def test_is_exposed_also_where_the_batch_has_none(self, device: Device, mode: LoadMode, batch: Any) -> None:
        made = registry(device, ints("ids"), ints("n", compute=lambda batch, extent: [5, 6]))
        assert made.load(batch, tokens(2), mode=mode).batch["n"].tolist() == [5, 6]

    def test_may_give_the_padded_rows_itself(self, device: Device) -> None:
        made = registry(device, ints("ids"), ints("n", compute=lambda batch, extent: [4] * extent.padded["tokens"]))
        assert made.load({"ids": [1, 2]}, tokens(2, 4)).batch["n"].tolist() == [4, 4, 4, 4]

    def test_where_it_declines_the_own_value_is_loaded_or_carried(self, device: Device) -> None:
        made = registry(device, ints("ids"), ints("n", compute=lambda batch, extent: None))
        own = torch.tensor([8], device=device.torch_device)
        graph = made.load({"ids": [1], "n": own}, tokens(1, 2)).batch["n"]
        assert graph.tolist() == [8, -1]
        assert graph.data_ptr() != own.data_ptr()
        assert made.load({"ids": [1], "n": own}, tokens(1), mode=LoadMode.NO_COPY).batch["n"] is own
        for mode in (LoadMode.EAGER, LoadMode.NO_COPY):
            found = made.load({"ids": [1], "n": [8]}, tokens(1), mode=mode).batch["n"]
            assert torch.equal(found.cpu(), torch.tensor([8])), "as a replay has it, and not the batch's list"
            with pytest.raises(LoadError, match="its compute declined and the batch has no 'n'"):
                made.load({"ids": [1], "n": None}, tokens(1), mode=mode)

    @pytest.mark.parametrize("mode", list(LoadMode))
    def test_a_keyed_one_is_absent_where_the_batch_has_none(self, device: Device, mode: LoadMode) -> None:
        """The batch's None chose the recording, which reads no buffer."""
        made = registry(device, ints("ids"), ints("n", compute=lambda batch, extent: [5], keyed=True))
        assert made.load({"ids": [1], "n": None}, tokens(1), mode=mode).batch["n"] is None
        assert made.load({"ids": [1], "n": [9]}, tokens(1), mode=mode).batch["n"].tolist() == [5]

    def test_where_it_declines_and_there_is_nothing_the_declaration_decides(self, device: Device) -> None:
        def decline(batch: Any, extent: Extent) -> None:
            return None

        batch = {"ids": [1]}
        absent = registry(device, ints("ids"), ints("n", compute=decline, absent=7))
        assert absent.load(batch, tokens(1, 2)).batch["n"].tolist() == [7, -1]
        keyed = registry(device, ints("ids"), ints("n", compute=decline, keyed=True))
        assert keyed.load(batch, tokens(1, 2)).batch["n"] is None
        with pytest.raises(LoadError, match="slot 'n': its compute declined and the batch has no 'n'"):
            registry(device, ints("ids"), ints("n", compute=decline)).load(batch, tokens(1, 2))

    def test_what_does_not_fit_is_refused_by_name(self, device: Device) -> None:
        for value in ([1, 2, 3], [[1], [2, 3]], [0.5], "text"):
            made = registry(device, ints("ids"), ints("n", compute=lambda batch, extent, value=value: value))
            with pytest.raises(LoadError, match="slot 'n'"):
                made.load({"ids": [1]}, tokens(1, 2))

    def test_a_view_of_the_host_ring_is_copied(self, device: Device) -> None:
        made = registry(device, ints("ids"), ints("same", compute=lambda batch, extent: batch["ids"]))
        first = made.load({"ids": [1, 2]}, tokens(2), mode=LoadMode.NO_COPY).batch["same"]
        for _ in range(4):  # as often as the ring has blocks, and once more
            made.load({"ids": [8]}, tokens(1), mode=LoadMode.NO_COPY, without=frozenset({"same"}))
        assert first.tolist() == [1, 2]

    def test_a_dim_that_only_computed_slots_have_is_used_whole(self, device: Device) -> None:
        slots = [
            ints("ids"),
            ints("n", "pages", compute=lambda b, e: [1, 2]),
            ints("m", "four", compute=lambda b, e: None),
        ]
        made = registry(device, *slots, dims=[Dim("pages", limit=2), Dim("four", per="tokens", times=4)])
        assert made.measure({"ids": [1, 2, 3]}) == {"pages": 2, "four": 12, "tokens": 3}


class TestWithout:
    @pytest.mark.parametrize("mode", list(LoadMode))
    @pytest.mark.parametrize("left_out", ["ids", "hidden", "mask", "n", "ngram_table"])
    def test_any_slot_can_be_left_out(self, device: Device, mode: LoadMode, left_out: str) -> None:
        slots = [
            ints("ids"),
            floats("hidden", "tokens", WIDE),
            floats("mask", absent=0.0),
            ints("n", compute=lambda batch, extent: [1, 2]),
            ints("ngram_table", source="ngram.table"),
        ]
        own: dict[str, Any] = {"ids": [1, 2], "hidden": np.ones((2, WIDE)), "mask": [1.0, 1.0], "n": [3, 3]}
        batch = SimpleNamespace(**own, ngram=SimpleNamespace(table=[4, 4]))
        view = registry(device, *slots).load(batch, tokens(2), mode=mode, without=frozenset({left_out})).batch
        found = {name: getattr(view, name) for name in own} | {"ngram_table": view.ngram.table}
        raw = own | {"ngram_table": batch.ngram.table}
        for name, value in found.items():
            assert (value is raw[name]) == (name == left_out)
            assert isinstance(value, torch.Tensor) == (name != left_out)

    def test_what_is_left_out_is_not_written(self, device: Device) -> None:
        made = registry(device, ints("ids"), floats("hidden", "tokens", WIDE))
        buffer = made.load({"ids": [1], "hidden": np.full((1, WIDE), 5.0)}, tokens(1, 2)).batch["hidden"]
        made.load({"ids": [2], "hidden": np.zeros((1, WIDE))}, tokens(1, 2), without=frozenset({"hidden"}))
        assert torch.equal(buffer[0].cpu(), torch.full((WIDE,), 5.0))

    def test_an_unknown_name_is_refused(self, device: Device) -> None:
        with pytest.raises(DeclarationError, match="without idz, which is no slot"):
            registry(device, ints("ids")).load({"ids": [1]}, tokens(1), without=frozenset({"idz"}))


class TestDotted:
    @pytest.mark.parametrize("holder", [SimpleNamespace, dict])
    def test_a_field_below_an_object_or_dict(self, device: Device, holder: Any) -> None:
        made = registry(device, ints("table", source="ngram.token_table"))
        ngram = holder(token_table=[1, 2], other="kept")
        batch = SimpleNamespace(ngram=ngram)
        before = copy.deepcopy(ngram)
        view = made.load(batch, tokens(2, 4)).batch
        assert batch.ngram is ngram
        assert ngram == before
        assert view.ngram is not ngram
        below = view.ngram if holder is dict else vars(view.ngram)
        assert below["token_table"].tolist() == [1, 2, -1, -1]
        assert below["other"] == "kept"

    def test_a_proxy_beside_the_batch(self, device: Device) -> None:
        slots = [ints("ids"), floats("hidden", "tokens", WIDE, source="pp.hidden"), Slot("rank", (), torch.int64)]
        made = registry(device, *slots)
        hidden = torch.randn(2, WIDE)
        proxy = SimpleNamespace(hidden=hidden.to(device.torch_device), stage=1)
        kwargs = {"pp": proxy, "rank": 3}
        assert made.measure({"ids": [1, 2]}, kwargs) == {"tokens": 2}
        view = made.load({"ids": [1, 2]}, tokens(2, 4), kwargs=kwargs)
        assert view.kwargs["pp"].stage == 1
        assert torch.equal(view.kwargs["pp"].hidden.cpu(), by_hand(hidden, (4, WIDE), 0, torch.float32))
        assert view.kwargs["rank"].item() == 3
        assert view.batch.keys() == {"ids"}
        assert torch.equal(proxy.hidden.cpu(), hidden)
        assert proxy.hidden.shape == (2, WIDE)
        assert kwargs == {"pp": proxy, "rank": 3}

    def test_a_missing_holder_is_refused_by_its_path(self, device: Device) -> None:
        made = registry(device, ints("table", source="ngram.token_table"), dims=[Dim("tokens", field="n")])
        with pytest.raises(LoadError, match=r"slot 'table'.*no 'ngram\.token_table'"):
            made.load(SimpleNamespace(ngram=None, n=2), tokens(2, 4))


class TestHostSlots:
    @pytest.mark.parametrize("kind", ["tensor", "numpy", "list"])
    @pytest.mark.parametrize("mode", list(LoadMode))
    def test_stay_on_the_host(self, device: Device, kind: str, mode: LoadMode) -> None:
        made = registry(device, ints("ids"), ints("on_host", place="host"))
        batch = as_kind({"ids": torch.tensor([1, 2]), "on_host": torch.tensor([3, 4])}, kind, device)
        extent = tokens(2, 4) if mode is LoadMode.GRAPH else tokens(2)
        view = made.load(batch, extent, mode=mode).batch
        assert view["on_host"].device.type == "cpu"
        assert view["on_host"].tolist() == [3, 4, -1, -1][: extent.padded["tokens"]]
        assert view["ids"].device == device.torch_device

    @pytest.mark.gpu
    def test_a_device_value_is_refused_for_a_host_slot(self) -> None:
        made = registry(open_device("cuda"), ints("on_host", place="host"))
        with pytest.raises(LoadError, match=r"slot 'on_host' is on cpu.*cuda:0. Move it"):
            made.load({"on_host": torch.ones(1, dtype=torch.int64, device="cuda")}, tokens(1))


@dataclass
class Batch:
    ids: Any
    seqs: int = 1
    label: str = "kept"

    def half(self, first: bool) -> Batch:
        """Slices itself, as a batch that is split over two streams does."""
        middle = len(self.ids) // 2
        return Batch(self.ids[:middle] if first else self.ids[middle:], self.seqs, self.label)


@dataclass(frozen=True)
class FrozenBatch:
    ids: Any
    label: str = "kept"


class SlottedBatch:
    __slots__ = ("ids", "label")

    def __init__(self, ids: Any, label: str = "kept") -> None:
        self.ids, self.label = ids, label


class DictBatch(dict[str, Any]):
    pass


class TestView:
    @pytest.mark.parametrize("kind", [Batch, FrozenBatch, SimpleNamespace, SlottedBatch, dict, DictBatch])
    @pytest.mark.parametrize("mode", list(LoadMode))
    def test_the_template_is_not_modified(self, device: Device, kind: Any, mode: LoadMode) -> None:
        ids = torch.tensor([1, 2], device=device.torch_device)
        batch = kind(ids=ids, label="kept")
        view = registry(device, ints("ids")).load(batch, tokens(2), mode=mode).batch

        def fields(holder: Any) -> tuple[Any, Any]:
            return (holder["ids"], holder["label"]) if isinstance(holder, dict) else (holder.ids, holder.label)

        assert type(view) is kind
        assert view is not batch
        assert fields(batch)[0] is ids
        assert ids.tolist() == [1, 2]
        assert fields(view)[0].tolist() == [1, 2]
        assert fields(view)[1] == "kept"

    def test_views_share_storage_with_the_buffers_at_fixed_addresses(self, device: Device) -> None:
        made = registry(device, ints("ids"), ints("at", 3, "tokens"), floats("hidden", "tokens", WIDE))

        def load(used: int, padded: int) -> dict[str, Any]:
            batch = {"ids": [used] * used, "at": [[used] * used] * 3, "hidden": np.full((used, WIDE), used)}
            view: dict[str, Any] = made.load(batch, tokens(used, padded)).batch
            return view

        first = load(2, 4)
        addresses = {name: first[name].data_ptr() for name in first}
        load(5, 8)
        for used in (4, 1, 3):
            again = load(used, 4)
            assert {name: again[name].data_ptr() for name in again} == addresses
            assert torch.equal(again["ids"], first["ids"])
            assert first["ids"].tolist() == [used] * used + [-1] * (4 - used)
            assert first["hidden"].untyped_storage().data_ptr() == again["hidden"].untyped_storage().data_ptr()

    def test_a_dim_may_name_the_field_that_carries_its_size(self, device: Device) -> None:
        made = registry(device, ints("ids", "seqs"), bucketed="seqs", dims=[Dim("seqs", field="seqs")])
        batch = Batch(ids=[7, 8, 9], seqs=3)
        assert made.measure(batch) == {"seqs": 3}
        view = made.load(batch, Extent({"seqs": 3}, {"seqs": 4})).batch
        assert view.seqs == 4
        assert view.ids.tolist() == [7, 8, 9, -1]
        assert batch.seqs == 3
        assert made.load(batch, Extent({"seqs": 3}, {"seqs": 3}), mode=LoadMode.EAGER).batch.seqs == 3

    def test_a_size_may_lie_below_another_field(self, device: Device) -> None:
        slot = Slot("n", (1,), torch.int64)
        made = registry(device, slot, bucketed="seqs", dims=[Dim("seqs", field="meta.batch_size")])
        batch = {"n": [1], "meta": {"batch_size": 3}}
        assert made.measure(batch) == {"seqs": 3}
        assert made.load(batch, Extent({"seqs": 3}, {"seqs": 4})).batch["meta"] == {"batch_size": 4}
        assert batch["meta"] == {"batch_size": 3}

    def test_a_view_splits_into_halves_like_the_batch(self, device: Device) -> None:
        batch = Batch(ids=torch.tensor([1, 2, 3, 4], device=device.torch_device))
        view = registry(device, ints("ids")).load(batch, tokens(4)).batch
        for first in (True, False):
            assert view.half(first).ids.tolist() == batch.half(first).ids.tolist()
            assert view.half(first).label == batch.half(first).label
            assert view.half(first).ids.untyped_storage().data_ptr() == view.ids.untyped_storage().data_ptr()

    def test_live_is_the_load_without_its_padding(self, device: Device) -> None:
        slots = [
            ints("ids"),
            floats("mask", absent=0.0),
            floats("bias", keyed=True),
            ints("n", compute=lambda batch, extent: [5, 6], absent=0),
            ints("declined", compute=lambda batch, extent: None, absent=0),
            ints("left_out"),
        ]
        made = registry(device, *slots, dims=[Dim("tokens", field="count")])
        batch = {"ids": [1, 2], "mask": None, "bias": None, "left_out": [3, 3], "count": 2}
        view = made.load(batch, tokens(2, 4), without=frozenset({"left_out"})).batch
        live = made.live(batch, tokens(2, 4)).batch
        assert live["ids"].tolist() == [1, 2]
        assert live["ids"].data_ptr() == view["ids"].data_ptr()
        assert live["n"].tolist() == [5, 6]
        assert live["mask"].tolist() == [0.0, 0.0]
        assert live["bias"] is None
        assert live["declined"].tolist() == [0, 0]
        assert live["left_out"] is batch["left_out"]
        assert (live["count"], view["count"]) == (2, 4)


class TestMeasure:
    def test_a_size_is_read_from_the_first_value_that_shows_it(self, device: Device) -> None:
        made = registry(device, floats("mask", keyed=True), ints("at", 3, "tokens"), ints("ids"))
        assert made.measure({"mask": None, "at": [[1, 2]] * 3, "ids": None}) == {"tokens": 2}
        assert made.measure({"mask": None, "at": None, "ids": np.ones(5)}) == {"tokens": 5}
        assert made.measure({"mask": torch.ones(4)}) == {"tokens": 4}
        assert made.measure({"ids": torch.tensor(3), "at": ([], [], [])}) == {"tokens": 0}

    def test_no_size_is_refused_with_the_fields_that_could_show_it(self, device: Device) -> None:
        made = registry(device, ints("ids"), dims=[Dim("tokens", field="num_tokens")])
        with pytest.raises(LoadError, match=r"loading decode.*dim 'tokens'.*'num_tokens' or 'ids'"):
            made.measure({"ids": None})


class TestAdoption:
    @pytest.mark.parametrize("kind", ["tensor", "numpy", "list"])
    def test_an_adopted_tensor_is_written_in_place(self, device: Device, kind: str) -> None:
        own = torch.full((8,), 99, device=device.torch_device)
        made = registry(device, ints("ids"), adopt={"ids": own})
        view = made.load(as_kind({"ids": torch.tensor([1, 2])}, kind, device), tokens(2, 4)).batch
        assert view["ids"].data_ptr() == own.data_ptr()
        assert own.tolist() == [1, 2, -1, -1, 99, 99, 99, 99]

    def test_a_batch_may_hand_in_the_adopted_tensor_itself(self, device: Device) -> None:
        own = torch.arange(8, device=device.torch_device)
        made = registry(device, ints("ids"), adopt={"ids": own})
        made.load({"ids": own[:3]}, tokens(3, 4))
        assert own.tolist() == [0, 1, 2, -1, 4, 5, 6, 7]

    @pytest.mark.parametrize(
        ("name", "tensor", "words"),
        [
            ("idz", torch.zeros(8, dtype=torch.int64), "'idz', which is no slot.*ids"),
            ("ids", torch.zeros(8, dtype=torch.int32), "'ids'.*torch.int32 on cpu.*torch.int64 on cpu"),
            ("ids", torch.zeros(8, dtype=torch.int64, device="meta"), "'ids'.*on meta.*on cpu"),
            ("ids", torch.zeros(7, 3, dtype=torch.int64), r"'ids'.*\(7, 3\) does not hold \(8, 3\)"),
            ("ids", torch.zeros(8, 4, dtype=torch.int64), r"'ids'.*\(8, 4\) does not hold \(8, 3\)"),
            ("ids", torch.zeros(24, dtype=torch.int64), r"'ids'.*\(24,\) does not hold \(8, 3\)"),
        ],
    )
    def test_one_that_does_not_fit_is_refused(self, name: str, tensor: torch.Tensor, words: str) -> None:
        with pytest.raises(DeclarationError, match=words):
            registry(EmulatedDevice(), ints("ids", "tokens", 3), adopt={name: tensor})

    def test_one_made_under_inference_mode_is_refused(self) -> None:
        with torch.inference_mode():
            tensor = torch.zeros(8, dtype=torch.int64)
        with pytest.raises(DeclarationError, match=r"'ids'.*inference mode.*inference_mode\(False\)"):
            registry(EmulatedDevice(), ints("ids"), adopt={"ids": tensor})


class TestDeclaration:
    def test_a_graph_needs_declared_buffers(self) -> None:
        device = EmulatedDevice()
        made = Registry(device, [ints("ids")], {"tokens": Dim("tokens")}, owner="decode")
        with pytest.raises(DeclarationError, match=r"loading decode.*declare\(pool"):
            made.load({"ids": [1]}, tokens(1))
        pool = BufferPool(device)
        made.declare(pool, "tokens", 8)
        with pytest.raises(DeclarationError, match=r"sealed. Call seal\(\)"):
            made.load({"ids": [1]}, tokens(1))

    def test_buffers_are_declared_once(self) -> None:
        made = registry(EmulatedDevice(), ints("ids"))
        with pytest.raises(DeclarationError, match="decode are declared already"):
            made.declare(BufferPool(EmulatedDevice()), "tokens", 16)

    def test_dims_are_checked(self) -> None:
        device, dims = EmulatedDevice(), {"tokens": Dim("tokens")}
        with pytest.raises(DeclarationError, match="unknown dim 'pages'"):
            Registry(device, [ints("table", "tokens", "pages")], dims)
        made = Registry(device, [ints("table", "tokens", "pages")], dims | {"pages": Dim("pages")})
        with pytest.raises(DeclarationError, match=r"unknown dim 'pages'.*Dim\('pages', limit="):
            made.declare(BufferPool(device), "tokens", 8)

    def test_two_slots_of_one_name_are_refused(self) -> None:
        with pytest.raises(DeclarationError, match="two slots have the name 'ids'"):
            registry(EmulatedDevice(), ints("ids"), ints("ids", source="other"))


@pytest.mark.parametrize(
    "bad", [{"rows": [1, 2]}, {"rows": None}, {"wide": np.ones((1, 3))}, {"rows": [0.5]}, {"at": [[1]]}, {"n": None}]
)
def test_a_refused_batch_leaves_the_buffers_as_they_were(device: Device, bad: dict[str, Any]) -> None:
    slots = [ints("ids"), floats("hidden", "tokens", WIDE), floats("mask", "tokens", WIDE, absent=0.0)]
    slots += [ints("at", place="host"), ints("rows"), floats("wide", "tokens", WIDE)]
    made = registry(device, *slots, ints("n", compute=lambda batch, extent: batch["n"]))
    wide = np.ones((2, WIDE))
    good = {"ids": [1, 2], "hidden": wide, "at": [5, 6], "mask": wide, "rows": [3, 4], "wide": wide, "n": [7, 8]}
    view = made.load(good, tokens(2, 4)).batch
    before = {name: value.clone() for name, value in view.items()}
    refused = {"ids": [9], "hidden": -wide[:1], "at": [9], "mask": None, "rows": [9], "wide": -wide[:1], "n": [9]} | bad
    with pytest.raises(LoadError):
        made.load(refused, tokens(1, 4))
    assert all(torch.equal(view[name], value) for name, value in before.items())
    made.load(good, tokens(2, 4))
    assert all(torch.equal(view[name], value) for name, value in before.items())


def test_grad_mode_and_gradients_are_left_as_they_are(device: Device) -> None:
    made = registry(device, floats("x", "tokens", WIDE))
    x = torch.ones(2, WIDE, device=device.torch_device, requires_grad=True)
    view = made.load({"x": x}, tokens(2, 4)).batch["x"]
    assert torch.is_grad_enabled()
    assert not view.requires_grad
    assert x.requires_grad
