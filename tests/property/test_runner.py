"""Any sequence of batches through a runner equals eager."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import (
    Axis,
    Dim,
    EmulatedDevice,
    Extent,
    Pad,
    Reason,
    Replay,
    RunEagerly,
    RunnerOptions,
    ShapeKey,
    Slot,
    break_graph,
    current,
    graph_break,
)
from phonograph.graphs.progress import silent
from runners import make_runner, sample_x, x_slot

SLOTS = [
    Slot("x", ("seqs", 3), torch.float32),
    Slot("table", (2, "seqs"), torch.int64, pad=Pad.fill(0), valid=(0, 6)),
    Slot("bias", ("seqs",), torch.float32, absent=0.0),
]
WEIGHT = torch.linspace(-1, 1, 7)


@graph_break
def share(x: torch.Tensor) -> torch.Tensor:
    return x / (current().batch["x"].shape[0] + 1)


def body(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    picked = WEIGHT[batch["table"]].sum(0)
    x = batch["x"].softmax(-1) * picked[:, None]
    break_graph()
    if batch["bias"] is not None:
        x = x + batch["bias"][:, None]
    return {"x": share(x), "picked": picked}


def eager(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    picked = WEIGHT[batch["table"]].sum(0)
    x = batch["x"].softmax(-1) * picked[:, None]
    if batch["bias"] is not None:
        x = x + batch["bias"][:, None]
    return {"x": x / (batch["x"].shape[0] + 1), "picked": picked}


def sample(extent: Extent, seed: int) -> dict[str, Any]:
    return make_batch(extent.used["seqs"], seed, bias=True)


def make_batch(count: int, seed: int, bias: bool) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(count, 3, generator=random),
        "table": torch.randint(0, 7, (2, count), generator=random),
        "bias": torch.randn(count, generator=random) if bias else None,
    }


RUNNERS = {
    backend: make_runner(
        body, EmulatedDevice(poison=True), sizes=(1, 3, 8), backend=backend, slots=SLOTS, sample=sample, options=options
    )
    for backend, options in (
        ("breakable", RunnerOptions()),
        ("disabled", RunnerOptions(eager_copies=False)),
    )
}
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(RUNNERS)), st.integers(0, 10), st.integers(0, 99), st.booleans(), st.booleans())
)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_any_sequence_of_batches_equals_eager(steps: list[tuple[str, int, int, bool, bool]]) -> None:
    kept = []
    for backend, count, seed, bias, on_host in steps:
        batch = make_batch(count, seed, bias)
        given_batch = {k: v.numpy() if on_host and v is not None else v for k, v in batch.items()}
        kept.append((RUNNERS[backend].run(given_batch), eager(batch)))
    for found, wanted in kept:
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor)


@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_every_call_is_a_replay_or_has_a_reason(steps: list[tuple[str, int, int, bool, bool]]) -> None:
    before = {name: (r.stats.replays.total(), r.stats.eager.total()) for name, r in RUNNERS.items()}
    for backend, count, seed, bias, _ in steps:
        RUNNERS[backend].run(make_batch(count, seed, bias))
    for name, runner in RUNNERS.items():
        calls = sum(1 for step in steps if step[0] == name)
        replays, eager_calls = before[name]
        assert runner.stats.replays.total() - replays + runner.stats.eager.total() - eager_calls == calls
        if name == "breakable":
            large = sum(1 for step in steps if step[0] == name and step[1] > 8)
            assert runner.stats.eager.total() - eager_calls == large


DEVICE = EmulatedDevice()


def rich_body(batch: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = batch["x"] * 2
    if batch["mask"] is not None:
        result = result * batch["mask"][:, None]
    return result + batch["pages"].sum()


def rich_sample(extent: Extent, seed: int) -> dict[str, Any]:
    seqs = extent.used["seqs"]
    pages = torch.zeros(extent.used["pages"], dtype=torch.int64)
    return {**sample_x(DEVICE)(extent, seed), "mask": torch.ones(seqs), "pages": pages, "lora": 0, "odd": False}


def refuse_odd(batch: dict[str, Any], key: ShapeKey) -> RunEagerly | None:
    return RunEagerly(Reason.FEATURE_NOT_CAPTURED, "odd") if batch["odd"] else None


LORA = ("none", "lora", "never")

# Every kind of batch that a runner tells apart: sizes, a limited dim, presence, an axis, admission, padding.
RICH = make_runner(
    rich_body,
    DEVICE,
    sizes=(2, 4, 32),
    slots=[
        x_slot(),
        Slot("mask", ("seqs",), torch.float32, keyed=True),
        Slot("pages", ("pages",), torch.int64, pad=Pad.fill(0)),
    ],
    dims=[Dim("pages", limit=3)],
    sample=rich_sample,
    admission=[refuse_odd],
    axes=[
        Axis(
            "lora",
            LORA,
            of=lambda batch: LORA[batch["lora"]],
            apply=lambda batch, value: batch | {"lora": LORA.index(value)},
            unrecorded=frozenset({"never"}),
        ),
    ],
    capture=False,
)
RICH.plan = dataclasses.replace(RICH.plan, max_padding_rows=20)
RICH.capture(silent)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 34), st.integers(0, 5), st.booleans(), st.integers(0, 2), st.integers(0, 3))
def test_decide_says_what_run_does(seqs: int, pages: int, masked: bool, lora: int, odd: int) -> None:
    batch: dict[str, Any] = {
        "x": torch.ones(seqs, 4),
        "mask": torch.ones(seqs) if masked else None,
        "pages": [1] * pages,
        "lora": lora,
        "odd": odd == 3,
    }
    decision = RICH.decide(batch)
    replays, eager_calls = RICH.stats.replays.copy(), RICH.stats.eager.copy()
    found = RICH.run(batch)
    torch.testing.assert_close(found, rich_body(batch | {"pages": torch.ones(pages, dtype=torch.int64)}))
    assert RICH.last == decision
    if isinstance(decision, Replay):
        assert RICH.stats.replays - replays == {decision.key: 1}
        assert RICH.stats.eager == eager_calls
    else:
        assert RICH.stats.eager - eager_calls == {decision.reason: 1}
        assert RICH.stats.replays == replays
