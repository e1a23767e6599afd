"""Runners that share buffers, against a model in numpy: nothing of another batch shows, whatever came before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import BufferPool, Dim, EmulatedDevice, Extent, LoadError, Pad, Reason, Slot
from phonograph.graphs.inputs.registry import LoadMode, Registry
from phonograph.graphs.inputs.slot import collect_dims
from phonograph.graphs.phases.phase import sample_from
from runners import make_runner

Array = np.ndarray[Any, Any]
DIMS = (Dim("tokens"), Dim("pairs", per="tokens", times=2), Dim("pages", limit=3))
LARGEST = 5
KINDS = ("tensor", "strided", "numpy", "list", "buffer", "none")
# Few names and dtypes, so that registries meet in the same memory.
NAMES = ("a", "b", "c")
DTYPES = (torch.int64, torch.float32, torch.bool)


@dataclass
class Party:
    """A registry and its slots."""

    slots: list[Slot]
    registry: Registry


def from_positions(batch: Any, extent: Extent) -> list[int] | None:
    """Computed from sizes alone: the used rows, counted down from the padded size."""
    return [extent.padded["tokens"] - index for index in range(extent.used["tokens"])] if extent.for_graph else None


@st.composite
def one_slot(draw: st.DrawFn, name: str) -> Slot:
    if name == "c" and draw(st.booleans()):
        return Slot("c", ("tokens",), torch.int64, pad=Pad.fill(-7), compute=from_positions, keyed=draw(st.booleans()))
    dims = draw(st.lists(st.sampled_from(["tokens", "pairs", "pages"]), unique=True, min_size=1, max_size=2))
    wide = draw(st.sampled_from([(), (), (80,)]))
    unread = draw(st.integers(0, 3)) == 0
    optional = draw(st.sampled_from(["", "absent", "keyed"]))
    return Slot(
        name,
        (*dims, *wide),
        draw(st.sampled_from(DTYPES)),
        pad=Pad.unread(because="drawn") if unread else Pad.fill(draw(st.integers(0, 1))),
        valid=(0, 1) if unread else None,
        absent=draw(st.integers(0, 1)) if optional == "absent" else None,
        keyed=optional == "keyed",
        place=draw(st.sampled_from(["device", "device", "host"])),
        shared=draw(st.integers(0, 5)) > 0,
    )


@st.composite
def parties(draw: st.DrawFn) -> list[list[Slot]]:
    ids = Slot("ids", ("tokens",), torch.int64, pad=Pad.fill(-1))  # shows how many tokens there are
    sets = [[ids, *[draw(one_slot(name)) for name in NAMES if draw(st.integers(0, 3))]] for _ in range(3)]
    return [draw(st.permutations(slots)) for slots in sets]


def numbers(slot: Slot, used: dict[str, int], seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 2, slot.sizes(used))


def given_as(slot: Slot, value: Array, kind: str, buffers: list[torch.Tensor]) -> tuple[Any, Array]:
    """The value as the batch has it, and what it is: for a piece of a buffer, what that holds right now."""
    tensor = torch.from_numpy(value).to(slot.dtype)
    if kind == "buffer":
        fits = [one for one in buffers if one.dtype == slot.dtype and one.numel() >= max(1, value.size)]
        if fits and value.size:
            piece = fits[-1].reshape(-1)[: value.size].view(value.shape)
            return piece, piece.clone().numpy()
    if kind == "list" and value.size:
        return tensor.tolist(), value
    if kind == "numpy":
        return tensor.numpy(), value
    if kind == "strided" and value.size:
        return tensor.repeat_interleave(2, -1)[..., ::2], value
    return tensor, value


def model(slot: Slot, value: Array | None, extent: Extent, mode: LoadMode) -> Array | None:
    """What the padded view of a slot holds after a load."""
    graph = mode is LoadMode.GRAPH
    shape = slot.sizes(extent.padded)
    if slot.keyed and value is None:
        return None
    if slot.compute is not None and graph:
        value = np.array([extent.padded["tokens"] - index for index in range(extent.used["tokens"])])
    if value is None:
        assert slot.absent is not None
        value = np.full(slot.sizes(extent.used), slot.absent)
    whole = np.full(shape, slot.filler)
    whole[tuple(slice(0, size) for size in value.shape)] = value
    return whole


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_element_is_what_the_batch_and_the_declaration_say(data: st.DataObject) -> None:
    device = EmulatedDevice()
    pool = BufferPool(device)
    sets = data.draw(parties())
    late = data.draw(st.integers(2, 3))  # the third may be declared after the seal
    made = []
    for number, slots in enumerate(sets):
        if number == late:
            pool.seal()
        registry = Registry(device, slots, collect_dims(slots, DIMS), owner=f"runner {number}")
        registry.declare(pool, "tokens", LARGEST)
        made.append(Party(slots, registry))
    pool.seal()
    buffers: list[torch.Tensor] = []
    for _ in range(data.draw(st.integers(1, 6))):
        party = data.draw(st.sampled_from(made))
        buffers += one_load(data, party, buffers)


def one_load(data: st.DataObject, party: Party, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Load a drawn batch, and compare every element; returns the views, which later batches may hand in."""
    mode = data.draw(st.sampled_from(list(LoadMode)))
    bucket = data.draw(st.integers(1, LARGEST))
    tokens, pages = data.draw(st.integers(1, bucket)), data.draw(st.integers(0, 3))
    sizes = {"tokens": tokens, "pairs": 2 * tokens, "pages": pages}
    batch: dict[str, Any] = {}
    values: dict[str, Array | None] = {}
    for slot in party.slots:
        needed = slot.name == "ids" or (slot.compute is not None and mode is not LoadMode.GRAPH)
        kinds = KINDS if slot.optional and not needed else KINDS[:-1]
        kind = data.draw(st.sampled_from(kinds))
        drawn = numbers(slot, sizes, data.draw(st.integers(0, 99)))
        batch[slot.name], values[slot.name] = (None, None) if kind == "none" else given_as(slot, drawn, kind, buffers)
    if data.draw(st.integers(0, 4)) == 0:
        refuse(party, batch, mode, bucket)
    used = party.registry.measure(batch)
    padded = {"tokens": bucket, "pairs": 2 * bucket, "pages": 3} if mode is LoadMode.GRAPH else used
    extent = Extent(used, {name: padded[name] for name in used})
    view = party.registry.load(batch, extent, mode=mode)
    for slot in party.slots:
        compare(slot, view.batch[slot.name], model(slot, values[slot.name], extent, mode), (batch, extent, mode))
    if mode is LoadMode.GRAPH:
        live = party.registry.live(batch, extent).batch
        unpadded = Extent(used, used)
        for slot in party.slots:
            wanted = model(slot, values[slot.name], extent, mode)
            if wanted is not None:
                wanted = wanted[tuple(slice(0, size) for size in slot.sizes(unpadded.used))]
            compare(slot, live[slot.name], wanted, (batch, extent, "live"))
    return [one for one in view.batch.values() if isinstance(one, torch.Tensor) and one.is_contiguous()]


def compare(slot: Slot, found: Any, wanted: Array | None, said: object) -> None:
    if wanted is None:
        assert found is None, f"{slot} {said}"
        return
    assert found.dtype == slot.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found, torch.from_numpy(wanted).to(slot.dtype)), f"{slot} {said}"


def refuse(party: Party, batch: dict[str, Any], mode: LoadMode, bucket: int) -> None:
    """A batch that is refused is without effect: later comparisons would find it."""
    used = party.registry.measure(batch)
    wrong = batch | {"ids": ["no number"] * used["tokens"]}
    padded = {"tokens": bucket, "pairs": 2 * bucket, "pages": 3} if mode is LoadMode.GRAPH else used
    before = party.registry.counts.transfers
    with pytest.raises(LoadError):
        party.registry.load(wrong, Extent(used, {name: padded[name] for name in used}), mode=mode)
    assert party.registry.counts.transfers == before


# -- runners ------------------------------------------------------------------------------------------------------

RUNNER_SLOTS = [
    Slot("x", ("tokens", 3), torch.float32),
    Slot("at", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, 6)),
    Slot("bias", ("tokens",), torch.float32, absent=0.25),
    Slot("mask", ("tokens", "pages"), torch.float32, keyed=True),
    Slot("wide", ("pages", 80), torch.float32, absent=2.0),
    Slot("count", (1,), torch.int64, compute=lambda batch, extent: [extent.used["tokens"]]),
]
TABLE = torch.linspace(-1, 1, 7)


def forward(batch: dict[str, Any], scale: float) -> dict[str, torch.Tensor]:
    """Reads every input; says nothing of None but for the keyed one."""
    x = batch["x"] * scale + TABLE[batch["at"]][:, None] + batch["bias"][:, None]
    if batch["mask"] is not None:
        x = x * (1 + batch["mask"].sum(1))[:, None]
    return {"x": x + batch["wide"].sum(), "count": batch["count"] + 0}


def reference(batch: dict[str, Any], scale: float) -> dict[str, torch.Tensor]:
    count = batch["x"].shape[0]
    pages = 3 if batch["mask"] is None else batch["mask"].shape[1]  # which a batch without them all has
    filled = batch | {
        "bias": torch.full((count,), 0.25) if batch["bias"] is None else batch["bias"],
        "wide": torch.full((pages, 80), 2.0) if batch["wide"] is None else batch["wide"],
        "count": torch.tensor([count]),
    }
    return forward(filled, scale)


def two_runners(second_first: bool) -> list[Any]:
    """Of one pool, declared in either order."""
    device, pool = EmulatedDevice(poison=True), BufferPool(EmulatedDevice())
    made = {
        scale: make_runner(
            lambda batch, scale=scale: forward(batch, scale),
            device,
            name=f"runner{scale}",
            pool=pool,
            slots=RUNNER_SLOTS,
            bucketed="tokens",
            dims=[Dim("pages", limit=3)],
            sizes=sizes,
            sample=sample_from(RUNNER_SLOTS, device.torch_device),
            capture=False,
        )
        for scale, sizes in sorted({2.0: (1, 4, 8), 3.0: (2, 5)}.items(), reverse=second_first)
    }
    for runner in made.values():
        assert not runner.capture(lambda *_: None).failures
    return [made[2.0], made[3.0]]


ORDERS = {order: two_runners(order) for order in (False, True)}
CALLS = st.tuples(
    st.integers(0, 1),  # which runner
    st.integers(1, 10),  # tokens
    st.integers(0, 3),  # pages
    st.integers(0, 99),  # seed
    st.sets(st.sampled_from(["bias", "mask", "wide"])),  # absent
    st.booleans(),  # from the host
    st.booleans(),  # and once more
)


@settings(deadline=None, max_examples=60)
@given(st.booleans(), st.lists(CALLS, min_size=1, max_size=8))
def test_interleaved_runners_equal_the_reference_replayed_repeated_or_eager(order: bool, calls: list[Any]) -> None:
    runners = ORDERS[order]
    for which, tokens, pages, seed, absent, on_host, again in calls:
        random = torch.Generator().manual_seed(seed)
        batch: dict[str, Any] = {
            "x": torch.randn(tokens, 3, generator=random),
            "at": torch.randint(0, 7, (tokens,), generator=random),
            "bias": torch.randn(tokens, generator=random),
            "mask": torch.rand(tokens, pages, generator=random),
            "wide": torch.full((pages, 80), 7.0 + seed),
        } | dict.fromkeys(absent)
        wanted = reference(batch, (2.0, 3.0)[which])
        handed = {k: v.numpy() if on_host and v is not None else v for k, v in batch.items()}
        found = [runners[which].run(handed)]
        if again and runners[which].can_repeat:
            assert not runners[1 - which].can_repeat
            found.append(runners[which].repeat())
        for one in found:
            for name, tensor in wanted.items():
                torch.testing.assert_close(one[name], tensor)
    assert set(runners[0].stats.eager) | set(runners[1].stats.eager) <= {Reason.TOO_LARGE}
