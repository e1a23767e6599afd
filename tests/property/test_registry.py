"""Any load of any slots equals copying and padding by hand, over whatever was in the buffers before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.devices import Device, open_device
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import LoadMode, Registry, View
from phonograph.graphs.inputs.slot import Pad, Slot, collect_dims
from registries import spoil

DIMS = (Dim("tokens"), Dim("seqs", per="tokens", times=2), Dim("pages", limit=3))
LARGEST = 5
DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16, torch.bfloat16)
KINDS = ("tensor", "strided", "numpy", "list", "none")
DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Step:
    """One load: how much is used and padded, in which mode, from which seed, and each slot's kind of value."""

    extent: Extent
    mode: LoadMode
    seed: int
    kinds: tuple[str, ...]
    without: frozenset[str]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int | str, ...]:
    names = draw(st.lists(st.sampled_from(["tokens", "seqs", "pages"]), unique=True, max_size=2))
    fixed = draw(st.lists(st.sampled_from([1, 3, 150]), max_size=1))
    return tuple(draw(st.permutations([*names, *fixed])))


@st.composite
def slot_lists(draw: st.DrawFn) -> list[Slot]:
    slots = []
    for index in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        unread = draw(st.integers(0, 5)) == 0
        slots.append(
            Slot(
                f"s{index}",
                draw(shapes()),
                dtype,
                pad=Pad.unread(because="drawn") if unread else Pad.fill(draw(st.integers(0, 1))),
                valid=(0, 1) if unread else None,
                absent=draw(st.sampled_from([None, None, 0, 1])),
                place=draw(st.sampled_from(["device", "device", "host"])),
            )
        )
    return slots


@st.composite
def steps(draw: st.DrawFn, slots: list[Slot]) -> Step:
    bucket = draw(st.integers(1, LARGEST))
    mode = draw(st.sampled_from(list(LoadMode)))
    padded = {"tokens": bucket, "seqs": 2 * bucket, "pages": 3}
    used = {name: draw(st.integers(0, size)) for name, size in padded.items()}
    names = [slot.name for slot in slots]
    return Step(
        Extent(used, padded if mode is LoadMode.GRAPH else used),
        mode,
        draw(st.integers(0, 1000)),
        tuple(draw(st.sampled_from(KINDS if slot.optional else KINDS[:-1])) for slot in slots),
        draw(st.frozensets(st.sampled_from(names), max_size=1)),
    )


def values_of(slots: list[Slot], step: Step) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step.seed)
    return {s.name: torch.randint(0, 2, s.sizes(step.extent.used), generator=random).to(s.dtype) for s in slots}


def given_as(slot: Slot, value: torch.Tensor, kind: str, device: Device) -> Any:
    if kind == "none":
        return None
    if kind == "list" and value.numel():  # a list without elements can't tell its inner axes
        return value.tolist()
    if kind == "numpy":
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    placed = value if slot.place == "host" else value.to(device.torch_device)
    if kind == "strided" and placed.dim():
        return placed.repeat_interleave(2, -1)[..., ::2]
    return placed


def padded_by_hand(slot: Slot, value: torch.Tensor, extent: Extent) -> torch.Tensor:
    whole = torch.full(slot.sizes(extent.padded), slot.filler).to(slot.dtype)
    whole[tuple(slice(0, size) for size in value.shape)] = value
    return whole


def check(slots: list[Slot], step: Step, values: dict[str, torch.Tensor], batch: dict[str, Any], view: View) -> None:
    for slot, kind in zip(slots, step.kinds, strict=True):
        found = view.batch[slot.name]
        if slot.name in step.without:
            assert found is batch[slot.name]
        else:
            value = values[slot.name]
            wanted = padded_by_hand(
                slot, torch.full_like(value, slot.absent or 0) if kind == "none" else value, step.extent
            )
            assert found.dtype == slot.dtype
            assert torch.equal(found.cpu(), wanted), f"{slot} {step}"


def spoiled(view: View, slots: list[Slot]) -> None:
    """Garbage in everything that the last load wrote."""
    for slot in slots:
        if isinstance(view.batch[slot.name], torch.Tensor):
            spoil(view.batch[slot.name])


@pytest.mark.parametrize("name", DEVICES)
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_load_equals_copying_and_padding_by_hand(name: str, data: st.DataObject) -> None:
    device = open_device(name)
    slots = data.draw(slot_lists())
    registry = Registry(device, slots, collect_dims(slots, DIMS), owner="drawn")
    pool = BufferPool(device)
    registry.declare(pool, "tokens", LARGEST)
    pool.seal()
    addresses: dict[tuple[int, ...], list[int]] = {}
    for step in data.draw(st.lists(steps(slots), min_size=1, max_size=4)):
        values = values_of(slots, step)
        batch = {
            slot.name: given_as(slot, values[slot.name], kind, device)
            for slot, kind in zip(slots, step.kinds, strict=True)
        }
        before = dict(batch)
        view = registry.load(batch, step.extent, mode=step.mode, without=step.without)
        check(slots, step, values, batch, view)
        assert all(batch[field] is value for field, value in before.items())
        if step.mode is LoadMode.GRAPH:
            loaded = [s.name for s in slots if s.name not in step.without]
            key = (step.extent.padded["tokens"], *map(int, (s.name in step.without for s in slots)))
            found = [view.batch[field].data_ptr() for field in loaded]
            assert addresses.setdefault(key, found) == found
        spoiled(view, slots)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_two_registries_over_one_pool_stay_right_in_any_order(data: st.DataObject) -> None:
    device = open_device("emulated")
    pool = BufferPool(device)
    sets = [data.draw(slot_lists()), data.draw(slot_lists())]
    registries = [Registry(device, slots, collect_dims(slots, DIMS)) for slots in sets]
    for registry in registries:
        registry.declare(pool, "tokens", LARGEST)
    pool.seal()
    for which in data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=6)):
        slots = sets[which]
        step = data.draw(steps(slots))
        values = values_of(slots, step)
        batch = {
            slot.name: given_as(slot, values[slot.name], kind, device)
            for slot, kind in zip(slots, step.kinds, strict=True)
        }
        view = registries[which].load(batch, step.extent, mode=step.mode, without=step.without)
        check(slots, step, values, batch, view)
