"""Fields of a batch that are no slots: a recording has those that it read for good, so that others run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from phonograph import Axis, Dim, EmulatedDevice, Extent, Pad, Phase, PhasePlan, Reason, Runner, Slot, graph_break
from phonograph.graphs.inputs.snapshots import snapshot
from phonograph.graphs.planning.kinds import BackendName
from phonograph.graphs.progress import silent

WIDTH = 4
X = Slot("x", ("rows", WIDTH), torch.float32)


class Mode(Enum):
    A = 1
    B = 2


@dataclass(frozen=True)
class Settings:
    scale: float
    mode: Mode = Mode.A


@dataclass
class Batch:
    x: Any
    scale: Any = 2.0
    other: Any = 0


class Row(NamedTuple):
    x: Any
    scale: Any = 2.0
    other: Any = 0


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    scale: Any = 2.0
    other: Any = 0


on_both = pytest.mark.parametrize("backend", ["full", "tc_piecewise"])
"""A recording that runs the body when it is made, and one that runs what torch.compile made of it."""


def x_of(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def runner_of(body: Callable[..., Any], sample: Callable[[torch.Tensor], Any], **options: Any) -> Runner:
    slots = options.pop("slots", (X,))
    backend = options.pop("backend", "full")
    phase = Phase(
        "decode", slots, "rows", body, lambda extent, seed: sample(x_of(extent.used["rows"], seed)), **options
    )
    runner = Runner(phase, EmulatedDevice(), PhasePlan(backend=backend, buckets=(4,)))
    report = runner.capture(silent)
    assert not report.failures, report
    return runner


def counts(runner: Runner) -> tuple[int, int]:
    return runner.stats.replays.total(), runner.stats.eager[Reason.STALE]


def multiplied(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


TABLE = torch.ones(8, WIDTH)


@on_both
@pytest.mark.parametrize(
    ("taken", "same", "other"),
    [
        (2.0, 2.0, 3.0),
        (2, 2, 2.0),
        (0.0, 0.0, -0.0),
        (None, None, 2.0),
        ("a", "a", "b"),
        (Mode.A, Mode.A, Mode.B),
        ([1, 2], [1, 2], [2, 1]),
        ({"a": [1]}, {"a": [1]}, {"a": [2]}),
        (Settings(1.0), Settings(1.0), Settings(1.0, Mode.B)),
        (np.arange(3), np.arange(3), np.arange(3) + 1),
        (TABLE, TABLE, TABLE.clone()),
        (TABLE, TABLE[:], TABLE[1:]),
        (TABLE, TABLE.view(8, WIDTH), TABLE.view(WIDTH, 8)),
        (torch.float32, torch.float32, torch.float64),
        (slice(0, 2), slice(0, 2), slice(0, 3)),
    ],
    ids=str,
)
def test_a_value_that_was_read_is_compared(taken: Any, same: Any, other: Any, backend: str) -> None:
    if backend == "tc_piecewise" and isinstance(taken, np.ndarray):
        pytest.skip("torch.compile refuses arrays that are passed on")

    def body(batch: Batch) -> torch.Tensor:
        assert batch.scale is not body
        return batch.x * 2

    runner = runner_of(body, lambda x: Batch(x, taken), backend=backend)
    for value, expected in ((same, (1, 0)), (other, (1, 1)), (same, (2, 1))):
        assert torch.equal(runner.run(Batch(x_of(3), value)), x_of(3) * 2)
        assert counts(runner) == expected
    assert "the batch's 'scale' is" in runner.explain()


KINDS = [dict, SimpleNamespace, Batch, Row, Slotted]


@on_both
@pytest.mark.parametrize("make", KINDS)
def test_of_every_kind_a_field_that_only_the_tail_reads_may_change(make: Any, backend: str) -> None:
    def field(batch: Any, name: str) -> Any:
        return batch[name] if isinstance(batch, dict) else getattr(batch, name)

    runner = runner_of(
        lambda batch: field(batch, "x") * 2,
        lambda x: make(x=x, scale=2.0, other=1),
        tail=lambda found, batch: found * field(batch, "scale"),
        backend=backend,
    )
    for scale in (2.0, 3.0):
        assert torch.equal(runner.run(make(x=x_of(3), scale=scale, other=7)), x_of(3) * 2 * scale)
    assert counts(runner) == (2, 0)


@on_both
@pytest.mark.parametrize("body", [lambda batch: batch[0] * batch[1], lambda batch: multiplied(*batch[:2])])
def test_places_of_a_tuple_are_read_as_all_of_it(body: Any, backend: str) -> None:
    runner = runner_of(body, Row, backend=backend)
    assert torch.equal(runner.run(Row(x_of(3), 2.0)), x_of(3) * 2)
    assert torch.equal(runner.run(Row(x_of(3), 3.0)), x_of(3) * 3)
    assert counts(runner) == (1, 1)


@pytest.mark.parametrize("make", KINDS)
def test_batches_of_every_kind_are_looked_at(make: Any) -> None:
    def body(batch: Any) -> torch.Tensor:
        fields = batch if isinstance(batch, dict) else SimpleNamespace(x=batch.x, scale=batch.scale)
        return fields["x"] * fields["scale"] if isinstance(fields, dict) else fields.x * fields.scale

    runner = runner_of(body, lambda x: make(x=x, scale=2.0))
    assert torch.equal(runner.run(make(x=x_of(3), scale=2.0)), x_of(3) * 2)
    assert torch.equal(runner.run(make(x=x_of(3), scale=5.0)), x_of(3) * 5)
    assert counts(runner) == (1, 1)
    assert runner.last is not None
    assert "'scale' is 5.0" in str(runner.last)


@pytest.mark.parametrize("make", KINDS)
def test_what_is_compiled_of_batches_of_every_kind_is_looked_at(make: Any) -> None:
    """A capture runs none of their Python: what is read is noted before."""

    def body(batch: Any) -> torch.Tensor:
        return batch["x"] * batch["scale"] if isinstance(batch, dict) else batch.x * batch.scale

    runner = runner_of(body, lambda x: make(x=x, scale=2.0), backend="tc_piecewise")
    for scale, other in ((2.0, 0), (5.0, 0), (2.0, 7)):
        assert torch.equal(runner.run(make(x=x_of(3), scale=scale, other=other)), x_of(3) * scale)
    assert counts(runner) == (2, 1)
    assert "'scale' is 5.0" in runner.explain()


def test_what_is_noted_before_a_compiled_capture_leaves_no_trace() -> None:
    total = torch.zeros(WIDTH)

    def body(batch: Batch) -> torch.Tensor:
        total.add_(batch.scale)
        return batch.x * batch.scale + torch.zeros_like(batch.x) * total

    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    runner = runner_of(body, lambda x: Batch(x, 2.0), backend="tc_piecewise")
    assert torch.equal(torch.rand(2), drawn)
    assert not total.any()
    runner.run(Batch(x_of(3), 2.0))
    runner.run(Batch(x_of(3), 3.0))
    assert counts(runner) == (1, 1)
    assert total.tolist() == [5.0] * WIDTH


@on_both
@pytest.mark.parametrize(
    "body",
    [
        lambda batch: batch["x"] * batch.get("scale", 1.0),
        lambda batch: batch["x"] * (2.0 if "scale" in batch and batch["scale"] == 2.0 else batch.pop("scale", 1.0)),
        lambda batch: batch["x"] * {**batch}.get("scale", 1.0),
        lambda batch: batch["x"] * dict(batch).get("scale", 1.0),
        lambda batch: batch["x"] * (batch | {}).get("scale", 1.0),
        lambda batch: batch["x"] * batch.copy().get("scale", 1.0),
        lambda batch: batch["x"] * dict(batch.items()).get("scale", 1.0),
        lambda batch: multiplied(**batch),
    ],
)
def test_every_way_to_read_a_dict_is_a_read(body: Any, backend: str) -> None:
    runner = runner_of(body, lambda x: {"x": x, "scale": 2.0}, backend=backend)
    assert torch.equal(runner.run({"x": x_of(3), "scale": 2.0}), x_of(3) * 2)
    assert torch.equal(runner.run({"x": x_of(3), "scale": 3.0}), x_of(3) * 3)
    assert torch.equal(runner.run({"x": x_of(3)}), x_of(3))
    assert counts(runner) == (1, 2)


@on_both
def test_a_field_that_the_sample_does_not_have_is_compared_if_it_was_looked_for(backend: str) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        return batch["x"] if batch.get("mask") is None else batch["x"] * batch["mask"]

    runner = runner_of(body, lambda x: {"x": x}, backend=backend)
    runner.run({"x": x_of(3)})
    runner.run({"x": x_of(3), "mask": None})
    assert counts(runner) == (2, 0)
    assert not runner.run({"x": x_of(3), "mask": torch.zeros(WIDTH)}).any()
    assert counts(runner) == (2, 1)


@on_both
def test_what_the_recording_does_not_read_may_change(backend: str) -> None:
    """A tail, a computed slot and an admission rule look at the live batch."""
    seen = list[Any]()

    def look(batch: Batch, key: Any) -> None:
        seen.append(batch.other)

    def tail(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        seen.append(batch.scale)
        return outputs

    total = Slot("total", (1,), torch.float32, compute=lambda batch, extent: [float(batch.other)])
    runner = runner_of(
        lambda batch: batch.x + batch.total,
        lambda x: Batch(x, "sample"),
        slots=(X, total),
        tail=tail,
        admission=[look],
        backend=backend,
    )
    for number in range(3):
        assert torch.equal(runner.run(Batch(x_of(3), f"call {number}", number)), x_of(3) + number)
    assert counts(runner) == (3, 0)
    assert seen[-6:] == [0, "call 0", 1, "call 1", 2, "call 2"]


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise"])
def test_what_gaps_find_in_the_live_batch_may_change(backend: str) -> None:
    from phonograph import current

    @graph_break(fake=torch.empty_like)
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * current().batch.scale

    runner = runner_of(lambda batch: scaled(batch.x + 0), lambda x: Batch(x, 2.0), backend=backend)
    for scale in (2.0, 3.0):
        assert torch.equal(runner.run(Batch(x_of(4), scale)), x_of(4) * scale)
    assert counts(runner) == (2, 0)


@on_both
def test_free_fields_and_sizes_are_not_compared(backend: str) -> None:
    table = torch.arange(8.0)

    def body(batch: Batch) -> torch.Tensor:
        return batch.x + table[: batch.scale].sum() * 0 + batch.other * 0

    dims = [Dim("rows", field="other")]
    runner = runner_of(body, lambda x: Batch(x, 8, len(x)), dims=dims, free=("scale",), backend=backend)
    for rows, scale in ((3, 8), (2, 5), (4, 1)):
        assert torch.equal(runner.run(Batch(x_of(rows), scale, rows)), x_of(rows))
    assert counts(runner) == (3, 0)


@on_both
def test_what_an_axis_decides_is_not_compared(backend: str) -> None:
    axis = Axis(
        "mode",
        ("plain", "scaled"),
        of=lambda batch: "plain" if batch.scale == 1.0 else "scaled",
        apply=lambda batch, value: replace(batch, scale=1.0 if value == "plain" else 2.0),
    )

    def body(batch: Batch) -> torch.Tensor:
        return batch.x * (batch.scale != 1.0)

    runner = runner_of(body, lambda x: Batch(x, 1.0), axes=[axis], backend=backend)
    for scale in (1.0, 2.0, 7.0):
        runner.run(Batch(x_of(3), scale))
    assert counts(runner) == (3, 0)


@on_both
def test_keyword_arguments_are_compared(backend: BackendName) -> None:
    from phonograph import Sample

    def body(batch: dict[str, Any], scale: float = 1.0) -> torch.Tensor:
        return batch["x"] * scale

    phase = Phase(
        "decode", (X,), "rows", body, lambda extent, seed: Sample({"x": x_of(extent.used["rows"])}, {"scale": 2.0})
    )
    runner = Runner(phase, EmulatedDevice(), PhasePlan(backend=backend, buckets=(4,)))
    runner.capture(silent)
    assert torch.equal(runner.run({"x": x_of(3)}, scale=2.0), x_of(3) * 2)
    assert torch.equal(runner.run({"x": x_of(3)}, scale=3.0), x_of(3) * 3)
    assert counts(runner) == (1, 1)


@on_both
def test_fields_below_one_are_compared_without_the_slots_among_them(backend: str) -> None:
    slot = Slot("lens", ("rows",), torch.int64, pad=Pad.fill(0), source="meta.lens", valid=(0, 4))

    def body(batch: Any) -> torch.Tensor:
        return batch.x * batch.meta.scale + batch.meta.lens[:, None]

    def made(x: torch.Tensor, scale: float) -> Any:
        return SimpleNamespace(x=x, meta=SimpleNamespace(lens=torch.ones(len(x), dtype=torch.int64), scale=scale))

    runner = runner_of(body, lambda x: made(x, 2.0), slots=(X, slot), backend=backend)
    assert torch.equal(runner.run(made(x_of(3), 2.0)), x_of(3) * 2 + 1)
    assert torch.equal(runner.run(made(x_of(3), 4.0)), x_of(3) * 4 + 1)
    assert counts(runner) == (1, 1)


def test_a_body_sees_the_batch_that_it_knows() -> None:
    def body(batch: Batch) -> torch.Tensor:
        assert isinstance(batch, Batch)
        assert type(batch).__name__ == "Batch"
        assert replace(batch, scale=7).scale == 7
        assert set(vars(batch)) == {"x", "scale", "other"}
        return batch.x * 2

    runner = runner_of(body, Batch)
    runner.run(Batch(x_of(3), 3.0))
    assert counts(runner) == (0, 1), "whoever asks for all fields has read all of them"


@on_both
def test_a_batch_of_slots_alone_carries_nothing(backend: str) -> None:
    runner = runner_of(lambda batch: batch["x"] * 2, lambda x: {"x": x, "id": 7}, backend=backend)
    assert [runner.carried(key) for key in runner.captured] == [{}]
    runner.run({"x": x_of(2), "id": 9})
    assert counts(runner) == (1, 0)


def test_snapshots_tell_memory_from_values() -> None:
    one = torch.ones(4)
    assert snapshot(one) == snapshot(one.view(4))
    assert snapshot(one) != snapshot(one.clone())
    assert snapshot(one) != snapshot(one[:3])
    assert snapshot(torch.device("cpu")) == snapshot(torch.device("cpu"))
    assert snapshot(Extent({"a": 1}, {"a": 1})) == snapshot(Extent({"a": 1}, {"a": 1}))
