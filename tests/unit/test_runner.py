"""The runner: what it decides, what it serves, and what it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from phonograph import (
    Axis,
    BufferPool,
    CoverageError,
    DeclarationError,
    Device,
    Dim,
    Extent,
    LoadError,
    Pad,
    Phase,
    PhasePlan,
    Reason,
    Replay,
    RunEagerly,
    Runner,
    RunnerOptions,
    Sample,
    ShapeKey,
    Slot,
    current,
    graph_break,
    verify,
)
from phonograph.graphs.phases.decisions import ReplayCounts
from phonograph.graphs.phases.phase import sample_from
from phonograph.graphs.progress import silent
from runners import WIDTH, equal, make_runner, phase_plan, rows, sample_x, x_slot


def double(batch: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = batch["x"] * 2
    return result


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("num_seqs", [0, 1, 2, 3, 5, 8])
def test_replay_equals_eager_for_every_size(device: Device, backend: str, num_seqs: int) -> None:
    runner = make_runner(double, device, backend=backend)
    x = rows(device, num_seqs)
    equal(runner.run({"x": x}), x * 2)
    assert runner.stats.replays.total() == 1
    assert runner.stats.eager.total() == 0


def test_decide_is_pure_and_names_the_recording(device: Device) -> None:
    runner = make_runner(double, device)
    assert runner.decide({"x": rows(device, 3)}) == Replay(ShapeKey("decode", "seqs", 4))
    assert runner.stats.replays.total() == 0


def test_decide_refuses_what_run_refuses_to_measure(device: Device) -> None:
    pair = Slot("pair", ("pairs",), torch.float32)
    dims = [Dim("pairs", per="seqs", times=2)]
    runner = make_runner(double, device, slots=[x_slot(), pair], dims=dims, capture=False)
    batch = {"x": rows(device, 3), "pair": torch.ones(5)}
    for ask in (runner.decide, runner.run):
        with pytest.raises(LoadError, match="5 pairs and 3 seqs"):
            ask(batch)


def test_a_batch_that_is_too_large_runs_eagerly_and_is_counted(device: Device) -> None:
    runner = make_runner(double, device)
    x = rows(device, 9)
    equal(runner.run({"x": x}), x * 2)
    assert runner.stats.eager == {Reason.TOO_LARGE: 1}
    assert "9 seqs" in runner.stats.details[Reason.TOO_LARGE]


def test_over_padding_needs_both_ratio_and_rows(device: Device) -> None:
    def decide(size: int, used: int) -> object:
        phase = Phase("prefill", (x_slot(),), "seqs", double, sample_x(device))
        runner = Runner(phase, device, phase_plan(size))
        runner.capture(silent)
        return runner.decide({"x": rows(device, used)})

    assert isinstance(decide(512, 255), RunEagerly)  # 2.01 times, 257 rows wasted
    assert isinstance(decide(512, 256), Replay)  # 2 times
    assert isinstance(decide(257, 1), Replay)  # 257 times, but 256 rows wasted
    refused = decide(258, 1)
    assert isinstance(refused, RunEagerly)
    assert refused.reason is Reason.OVER_PADDED


def test_exact_sizes_serve_only_themselves(device: Device) -> None:
    runner = make_runner(double, device, exact=True)
    assert isinstance(runner.decide({"x": rows(device, 4)}), Replay)
    refused = runner.decide({"x": rows(device, 3)})
    assert isinstance(refused, RunEagerly)
    assert refused.reason is Reason.NOT_CAPTURED


def test_before_capture_everything_is_eager_with_the_reason(device: Device) -> None:
    runner = make_runner(double, device, capture=False)
    equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * 2)
    assert runner.stats.eager == {Reason.NOT_CAPTURED: 1}


def test_disabled_goes_through_registry_and_counters(device: Device) -> None:
    runner = make_runner(double, device, backend="disabled")
    equal(runner.run({"x": rows(device, 3).cpu().numpy()}), rows(device, 3) * 2)
    assert runner.stats.eager == {Reason.DISABLED: 1}
    assert runner.registry.counts.transfers == 1


def test_a_phase_without_buckets_is_refused(device: Device) -> None:
    phase = Phase("decode", (x_slot(),), "seqs", double, sample_x(device))
    with pytest.raises(DeclarationError, match="neither buckets nor a limit"):
        Runner(phase, device, PhasePlan(backend="full"))


def test_a_limit_generates_buckets_closed_at_the_top(device: Device) -> None:
    phase = Phase("decode", (x_slot(),), "seqs", double, sample_x(device))
    runner = Runner(phase, device, PhasePlan(backend="full", limit=100))
    assert runner.buckets is not None
    assert runner.buckets.largest == 100


def test_outputs_are_the_callers_own_unless_a_view_is_asked_for(device: Device) -> None:
    first, second = rows(device, 4, seed=1), rows(device, 4, seed=2)
    own = make_runner(double, device)
    kept = own.run({"x": first})
    own.run({"x": second})
    equal(kept, first * 2)
    view = make_runner(double, device, options=RunnerOptions(outputs="view"))
    lent = view.run({"x": first})
    view.run({"x": second})
    equal(lent, second * 2)


def test_all_buckets_write_their_outputs_to_one_buffer(device: Device) -> None:
    runner = make_runner(double, device, options=RunnerOptions(outputs="view"))
    addresses = {runner.run({"x": rows(device, n)}).data_ptr() for n in (2, 4, 8)}
    assert len(addresses) == 1


def test_every_kind_of_output_is_trimmed_along_its_own_axis(device: Device) -> None:
    def body(batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        return {"rows": x, "columns": x.T, "sum": x.sum(0), "scalar": x.sum(), "none": None, "pair": (x[:, 0], [x])}

    # The buckets equal WIDTH once: an axis of size 4 is fixed, unless it follows the bucket.
    runner = make_runner(body, device, sizes=(2, 4))
    x = rows(device, 3)
    found = runner.run({"x": x})
    assert runner.stats.replays.total() == 1
    equal(found["rows"], x)
    equal(found["columns"], x.T)
    assert found["sum"].shape == (WIDTH,)
    assert found["scalar"].shape == ()
    assert found["none"] is None
    equal(found["pair"][0], x[:, 0])
    equal(found["pair"][1][0], x)


def test_one_bucket_of_the_size_of_a_fixed_axis_trims_only_what_follows_it(device: Device) -> None:
    fixed = torch.arange(WIDTH, device=device.torch_device).float()
    runner = make_runner(lambda batch: (batch["x"], fixed + batch["x"].sum() * 0), device, sizes=(WIDTH,))
    found, constant = runner.run({"x": rows(device, 2)})
    assert found.shape == (2, WIDTH)
    equal(constant, fixed)


def test_the_eager_path_lets_go_of_its_buffers(device: Device) -> None:
    runner = make_runner(lambda batch: batch["x"], device, backend="disabled")
    first = runner.run({"x": rows(device, 3, seed=1)})
    runner.run({"x": rows(device, 3, seed=2)})
    equal(first, rows(device, 3, seed=1))


@pytest.mark.parametrize("copies", [True, False])
def test_eager_with_and_without_copies_agree(device: Device, copies: bool) -> None:
    runner = make_runner(double, device, backend="disabled", options=RunnerOptions(eager_copies=copies))
    equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * 2)
    assert runner.registry.counts.grouped == (1 if copies else 0)


def test_tail_runs_eagerly_on_the_live_batch(device: Device) -> None:
    """The captured body knows tokens only; how many requests they make is the tail's business."""

    def tail(hidden: torch.Tensor, batch: SimpleNamespace) -> torch.Tensor:
        ends = torch.tensor(batch.lengths, device=hidden.device).cumsum(0) - 1
        return hidden[ends] + batch.x[ends]

    def sample(extent: Extent, seed: int) -> SimpleNamespace:
        return SimpleNamespace(lengths=[extent.used["tokens"]], **sample_x(device, "tokens")(extent, seed))

    runner = make_runner(
        lambda batch: batch.x * 2, device, slots=[x_slot("tokens")], bucketed="tokens", sample=sample, tail=tail
    )
    for lengths in ([3], [1, 2], [1, 1, 1, 2]):
        x = rows(device, sum(lengths))
        ends = torch.tensor(lengths).cumsum(0) - 1
        equal(runner.run(SimpleNamespace(x=x, lengths=lengths)), x.cpu()[ends] * 3)
    assert runner.stats.replays.total() == 3


def test_a_captured_tail_is_part_of_the_recording(device: Device) -> None:
    runner = make_runner(double, device, tail=lambda hidden, batch: hidden.sum(1), tail_captured=True)
    x = rows(device, 3)
    equal(runner.run({"x": x}), (x * 2).sum(1))


def test_host_plan_runs_between_load_and_replay_with_the_padded_view(device: Device) -> None:
    scratch = torch.zeros(1, device=device.torch_device)
    seen: list[tuple[int, int]] = []

    def host_plan(batch: dict[str, Any], extent: Extent) -> None:
        seen.append((extent.used["seqs"], batch["x"].shape[0]))
        scratch.fill_(float(extent.used["seqs"]))

    runner = make_runner(lambda batch: batch["x"] * scratch, device, host_plan=host_plan)
    seen.clear()
    x = rows(device, 3)
    equal(runner.run({"x": x}), x * 3)
    assert seen == [(3, 4)]


def test_admission_rules_are_asked_and_counted(device: Device) -> None:
    lost = RunEagerly(Reason.FEATURE_NOT_CAPTURED, "rank 1 has no graph")
    runner = make_runner(double, device, admission=[lambda batch, key: lost if key.size == 4 else None])
    runner.run({"x": rows(device, 2)})
    runner.run({"x": rows(device, 3)})
    assert runner.stats.eager == {Reason.FEATURE_NOT_CAPTURED: 1}
    assert runner.stats.replays.total() == 1


def lora_axis(**given: Any) -> Axis:
    def value_of(batch: dict[str, Any]) -> str:
        return "on" if batch.get("lora") else "off"

    return Axis("lora", ("off", "on"), of=value_of, apply=lambda batch, value: batch | {"lora": value == "on"}, **given)


def test_values_of_an_axis_have_recordings_of_their_own(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        scale: torch.Tensor = batch["x"] * (3 if batch["lora"] else 2)
        return scale

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {**sample_x(device)(extent, seed), "lora": False}

    runner = make_runner(body, device, sample=sample, axes=[lora_axis()])
    x = rows(device, 3)
    equal(runner.run({"x": x, "lora": False}), x * 2)
    equal(runner.run({"x": x, "lora": True}), x * 3)
    assert {str(key) for key in runner.stats.replays} == {"decode[seqs=4]", "decode[seqs=4, lora=on]"}


def test_a_value_that_is_not_recorded_is_eager_with_its_reason(device: Device) -> None:
    runner = make_runner(double, device, axes=[lora_axis(unrecorded=frozenset({"on"}))])
    runner.run({"x": rows(device, 3), "lora": True})
    assert runner.stats.eager == {Reason.FEATURE_NOT_CAPTURED: 1}


def test_presence_of_a_keyed_slot_is_part_of_the_key(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        scaled: torch.Tensor = batch["x"] if batch["mask"] is None else batch["x"] * batch["mask"][:, None]
        return scaled

    mask = Slot("mask", ("seqs",), torch.float32, keyed=True)

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        batch = sample_x(device)(extent, seed)
        return {**batch, "mask": torch.ones(extent.used["seqs"], device=device.torch_device)}

    runner = make_runner(body, device, slots=[x_slot(), mask], sample=sample)
    assert len(runner.captured) == 6
    x, half = rows(device, 3), torch.full((3,), 0.5, device=device.torch_device)
    equal(runner.run({"x": x, "mask": half}), x * 0.5)
    equal(runner.run({"x": x, "mask": None}), x)
    assert {key.absent for key in runner.stats.replays} == {frozenset(), frozenset({"mask"})}


def test_an_absent_input_acts_as_its_neutral_value(device: Device) -> None:
    mask = Slot("mask", ("seqs",), torch.float32, absent=1.0)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        scaled: torch.Tensor = batch["x"] if batch["mask"] is None else batch["x"] * batch["mask"][:, None]
        return scaled

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {**sample_x(device)(extent, seed), "mask": torch.zeros(extent.used["seqs"], device=device.torch_device)}

    runner = make_runner(body, device, slots=[x_slot(), mask], sample=sample)
    x = rows(device, 3)
    equal(runner.run({"x": x, "mask": torch.zeros(3, device=device.torch_device)}), x * 0)
    equal(runner.run({"x": x, "mask": None}), x)
    assert runner.stats.replays.total() == 2


def test_an_absent_input_is_neutral_in_used_rows_and_padding_in_the_others(device: Device) -> None:
    """A body that counts rows by their mask counts the same in a replay as eagerly."""
    slots = [x_slot(), Slot("mask", ("seqs",), torch.float32, absent=1.0)]
    sample = sample_from(slots, device.torch_device)
    runner = make_runner(
        lambda batch: batch["mask"].sum()[None] + 0 * batch["x"].sum(), device, slots=slots, sample=sample
    )
    for count in (3, 5, 9):
        equal(runner.run({"x": rows(device, count), "mask": None}), torch.tensor([float(count)]))
    assert (runner.stats.replays.total(), runner.stats.eager.total()) == (2, 1)
    assert verify(runner).ok


@pytest.mark.parametrize("copies", [True, False])
def test_a_replay_and_the_eager_path_see_the_same_in_place_of_an_absent_input(device: Device, copies: bool) -> None:
    """The body does not ask for None, neither in a graph nor in a gap: a recording can't see it either."""
    slots = [x_slot(), Slot("mask", ("seqs", "cells"), torch.float32, absent=0.5)]
    gap_means: list[float] = []

    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        if serving:
            gap_means.append(current().batch["mask"].mean().item())
        return x + 1

    def body(batch: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = gap(batch["x"]) * batch["mask"].mean(1)[:, None]
        return result

    serving = False
    runner = make_runner(
        body,
        device,
        slots=slots,
        backend="breakable",
        dims=[Dim("cells", limit=3)],
        sample=sample_from(slots, device.torch_device),
        options=RunnerOptions(eager_copies=copies),
    )
    serving = True
    for count in (3, 9, 8, 10):
        x = rows(device, count)
        equal(runner.run({"x": x, "mask": torch.ones(count, 2, device=device.torch_device)})[:, :0], x[:, :0])
        equal(runner.run({"x": x, "mask": None}), (x + 1) * 0.5)
    assert gap_means[1::2] == [0.5] * 4
    assert (runner.stats.replays.total(), runner.stats.eager.total()) == (4, 4)


def test_what_is_passed_beside_the_batch_reaches_the_body_as_a_view(device: Device) -> None:
    hidden = Slot("hidden", ("seqs", WIDTH), torch.float32, source="proxy.hidden")

    def sample(extent: Extent, seed: int) -> Sample:
        batch = sample_x(device)(extent, seed)
        return Sample(batch, {"proxy": SimpleNamespace(hidden=batch["x"])})

    def body(batch: dict[str, Any], proxy: SimpleNamespace) -> torch.Tensor:
        result: torch.Tensor = batch["x"] + proxy.hidden
        return result

    runner = make_runner(body, device, slots=[x_slot(), hidden], sample=sample)
    x, h = rows(device, 3, 1), rows(device, 3, 2)
    equal(runner.run({"x": x}, proxy=SimpleNamespace(hidden=h)), x + h)
    assert runner.stats.replays.total() == 1


def test_several_dims(device: Device) -> None:
    """Pages have a limit, tokens follow the sequences."""
    table = Slot("table", ("seqs", "pages"), torch.int64, pad=Pad.fill(0), valid=(0, 9))
    drafts = Slot("drafts", ("drafted",), torch.float32)

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {
            "table": torch.ones(
                extent.used["seqs"], extent.used["pages"], dtype=torch.int64, device=device.torch_device
            ),
            "drafts": torch.ones(extent.used["drafted"], device=device.torch_device),
        }

    def body(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return batch["table"].sum(1), batch["drafts"] * 2

    runner = make_runner(
        body,
        device,
        slots=[table, drafts],
        sample=sample,
        dims=[Dim("pages", limit=5), Dim("drafted", per="seqs", times=3)],
    )
    pages = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device.torch_device)
    sums, doubled = runner.run({"table": pages, "drafts": torch.arange(9.0, device=device.torch_device)})
    equal(sums, torch.tensor([3, 7, 11]))
    equal(doubled, torch.arange(9.0) * 2)


def test_interleaved_phases_over_shared_buffers_and_memory_stay_right(device: Device) -> None:
    pool, memory = BufferPool(device), device.new_pool()
    runners = []
    for name, factor in (("decode", 2), ("prefill", 3)):
        phase = Phase(name, (x_slot(),), "seqs", lambda batch, f=factor: (batch["x"] * f).relu() + f, sample_x(device))
        runners.append(Runner(phase, device, phase_plan(2, 8), pool=pool, memory=memory))
    for runner in runners:
        runner.capture(silent)
    assert pool.report().bytes_saved > 0
    for step in range(6):
        x = rows(device, step + 1, seed=step)
        for runner, factor in zip(runners, (2, 3), strict=True):
            equal(runner.run({"x": x}), (x * factor).relu() + factor)


def test_grad_is_off_on_every_path_whatever_the_caller_does(device: Device) -> None:
    weight = torch.ones(WIDTH, device=device.torch_device, requires_grad=True)
    runner = make_runner(lambda batch: batch["x"] * weight, device)
    for count in (3, 9):
        with torch.enable_grad():
            assert not runner.run({"x": rows(device, count)}).requires_grad


def test_capture_and_run_under_inference_mode(device: Device) -> None:
    runner = make_runner(double, device, capture=False)
    with torch.inference_mode():
        runner.capture(silent)
        x = rows(device, 3)
        equal(runner.run({"x": x}), x * 2)
    outside = rows(device, 4)
    equal(runner.run({"x": outside}), outside * 2)
    assert runner.stats.eager.total() == 0


def test_strict_makes_an_eager_call_an_error(device: Device) -> None:
    runner = make_runner(double, device, options=RunnerOptions(strict=True))
    with pytest.raises(CoverageError, match="9 seqs"):
        runner.run({"x": rows(device, 9)})


def test_strict_makes_a_failed_capture_an_error(device: Device) -> None:
    with pytest.raises(CoverageError, match="3 of 3 recordings failed"):
        make_runner(lambda batch: batch["x"][batch["x"] > 0], device, options=RunnerOptions(strict=True))


def test_debug_runs_the_body_in_the_place_of_every_replay(device: Device) -> None:
    seen = Mock()

    def body(batch: dict[str, Any]) -> torch.Tensor:
        seen(batch["x"].shape[0])
        return double(batch)

    runner = make_runner(body, device, options=RunnerOptions(debug=True))
    seen.reset_mock()
    x = rows(device, 3)
    equal(runner.run({"x": x}), x * 2)
    seen.assert_called_once_with(4)  # the padded view, as a replay would
    assert not runner.stats.replays
    assert runner.stats.eager == {Reason.DEBUG: 1}


def test_release_goes_back_to_eager_and_capture_works_again(device: Device) -> None:
    runner = make_runner(double, device)
    runner.release()
    x = rows(device, 3)
    equal(runner.run({"x": x}), x * 2)
    assert runner.stats.eager == {Reason.NOT_CAPTURED: 1}
    runner.capture(silent)
    equal(runner.run({"x": x}), x * 2)
    assert runner.stats.replays.total() == 1


def test_a_bad_batch_is_refused_and_the_next_one_served(device: Device) -> None:
    runner = make_runner(double, device)
    with pytest.raises(LoadError, match=r"slot 'x'.*\(3, 4\).*\(3, 5\)"):
        runner.run({"x": torch.zeros(3, 5, device=device.torch_device)})
    equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * 2)


def test_explain_tells_recordings_counts_and_reasons(device: Device) -> None:
    runner = make_runner(double, device)
    for count in (3, 3, 9):
        runner.run({"x": rows(device, count)})
    text = runner.explain()
    assert "decode[seqs=4]" in text
    assert "25.0%" in text
    assert "2 replays, 1 eager calls" in text
    assert "1 too large: 9 seqs, the largest bucket is 8" in text


def test_an_output_over_a_limit_dim_is_trimmed_too(device: Device) -> None:
    mask = Slot("mask", ("seqs", "context"), torch.float32)

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        return {"mask": torch.ones(extent.used["seqs"], extent.used["context"], device=device.torch_device)}

    runner = make_runner(
        lambda batch: batch["mask"] * 2, device, slots=[mask], sample=sample, dims=[Dim("context", limit=16)]
    )
    given = torch.rand(3, 5, device=device.torch_device)
    equal(runner.run({"mask": given}), given * 2)
    assert verify(runner).ok
    large = torch.rand(3, 17, device=device.torch_device)
    equal(runner.run({"mask": large}), large * 2)
    assert runner.stats.eager == {Reason.TOO_LARGE: 1}
    assert "17 context" in runner.stats.details[Reason.TOO_LARGE]


@pytest.mark.parametrize("body", [lambda b: b["x"].reshape(-1), lambda b: b["x"].repeat(2, 1)])
def test_an_output_axis_that_changes_and_is_no_dim_is_refused(device: Device, body: Any) -> None:
    runner = make_runner(body, device)
    assert runner.report is not None
    assert "changes with the batch and is not a dim" in str(runner.report.failures[0].error)
    equal(runner.run({"x": rows(device, 3)}), body({"x": rows(device, 3)}))
    exact = make_runner(body, device, exact=True).report
    assert exact is not None
    assert not exact.failures


def test_a_dim_per_another_must_keep_the_ratio(device: Device) -> None:
    drafts = Slot("drafts", ("drafted",), torch.float32)

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        drafted = torch.ones(extent.used["drafted"], device=device.torch_device)
        return {**sample_x(device)(extent, seed), "drafts": drafted}

    runner = make_runner(
        lambda batch: batch["drafts"],
        device,
        slots=[x_slot(), drafts],
        sample=sample,
        dims=[Dim("drafted", per="seqs")],
    )
    with pytest.raises(LoadError, match="2 drafted and 3 seqs"):
        runner.run({"x": rows(device, 3), "drafts": torch.ones(2, device=device.torch_device)})


def test_what_an_eager_call_returns_is_the_callers_own(device: Device) -> None:
    total = torch.zeros(WIDTH, device=device.torch_device)
    runner = make_runner(lambda batch: total.add_(batch["x"].sum(0)), device, backend="disabled")
    first = runner.run({"x": torch.ones(3, WIDTH, device=device.torch_device)})
    runner.run({"x": torch.ones(3, WIDTH, device=device.torch_device)})
    equal(first, torch.full((WIDTH,), 3.0))


def test_buffers_in_use_are_not_loaded_again(device: Device) -> None:
    """A gap that calls a runner of the same pool would change what the next graph reads."""
    pool = BufferPool(device)
    inner = make_runner(double, device, pool=pool, name="draft", capture=False)
    outer = make_runner(double, device, pool=pool, capture=False, tail=lambda out, batch: inner.run({"x": out}))
    outer.capture(silent)
    inner.capture(silent)
    with pytest.raises(LoadError, match="in use by another call"):
        outer.run({"x": rows(device, 3)})
    equal(inner.run({"x": rows(device, 3)}), rows(device, 3) * 2)


USES: dict[str, Callable[[Runner], object]] = {
    "capturing": lambda runner: runner.capture(silent),
    "verifying": verify,
    "releasing": lambda runner: runner.release(),
    "repeating": lambda runner: runner.repeat(),
}


class TestBuffersInUse:
    """Whatever loads buffers or frees graphs is refused while another call's load means something."""

    @pytest.mark.parametrize("doing", USES)
    @pytest.mark.parametrize("itself", [True, False])
    def test_from_a_gap(self, device: Device, doing: str, itself: bool) -> None:
        pool = BufferPool(device)
        refused: list[str] = []

        @graph_break
        def gap(x: torch.Tensor) -> torch.Tensor:
            if serving:
                with pytest.raises(LoadError, match=f"^{doing} .*in use by another call") as caught:
                    USES[doing](outer if itself else other)
                refused.append(str(caught.value))
            return x + 1

        serving = False
        other = make_runner(double, device, pool=pool, name="draft", capture=False)
        outer = make_runner(
            lambda batch: gap(batch["x"]) * batch["x"], device, pool=pool, backend="breakable", capture=False
        )
        outer.capture(silent)
        other.capture(silent)
        serving = True
        x = rows(device, 3)
        equal(outer.run({"x": x}), (x + 1) * x)
        assert len(refused) == 1
        equal(other.run({"x": x}), x * 2)
        assert other.stats.eager == {}

    @pytest.mark.parametrize("doing", ["capturing", "verifying"])
    def test_a_call_from_another_thread_is_refused_meanwhile(self, device: Device, doing: str) -> None:
        pool = BufferPool(device)
        refused = Mock()
        x = rows(device, 3)

        def from_a_thread() -> None:
            for runner in (first, second):
                try:
                    runner.run({"x": x})
                except LoadError as error:
                    refused(str(error))

        def body(batch: dict[str, Any]) -> torch.Tensor:
            if watching:
                thread = threading.Thread(target=from_a_thread)
                thread.start()
                thread.join()
            return double(batch)

        watching = False
        first = make_runner(double, device, pool=pool, name="draft", capture=False)
        second = make_runner(body, device, pool=pool, capture=False)
        for runner in (first, second):
            runner.capture(silent)
        watching = True
        USES[doing](second)
        watching = False
        refused.assert_called()
        assert all("in use by another call" in call.args[0] for call in refused.call_args_list)
        equal(second.run({"x": rows(device, 3)}), rows(device, 3) * 2)

    def test_several_runners_of_one_pool_are_warmed_together(self, device: Device) -> None:
        pool = BufferPool(device)
        first, second = (make_runner(double, device, pool=pool, name=name, capture=False) for name in "ab")
        with first.warmed(silent) as record_first, second.warmed(silent) as record_second:
            record_first()
            record_second()
        for runner in (first, second):
            equal(runner.run({"x": rows(device, 3)}), rows(device, 3) * 2)
            assert runner.stats.eager == {}

    def test_what_fails_does_not_keep_them(self, device: Device) -> None:
        pool = BufferPool(device)

        def body(batch: dict[str, Any]) -> torch.Tensor:
            raise KeyboardInterrupt

        runner = make_runner(body, device, pool=pool, capture=False)
        with pytest.raises(KeyboardInterrupt):
            runner.capture(silent)
        assert not pool.in_use.locked()


def test_state_that_only_small_buckets_write_is_restored_too(device: Device) -> None:
    steps = torch.zeros(1, device=device.torch_device)

    def body(batch: dict[str, Any]) -> torch.Tensor:
        if batch["x"].shape[0] < 8:
            steps.add_(1)
        result: torch.Tensor = batch["x"] * 2
        return result

    make_runner(body, device)
    equal(steps, torch.zeros(1))


def test_counts_of_a_recording_go_on_when_it_is_made_again(device: Device) -> None:
    runner, key = make_runner(double, device), ShapeKey("decode", "seqs", 4)
    runner.run({"x": rows(device, 3)})
    runner.capture(silent)
    runner.run({"x": rows(device, 4)})
    assert runner.stats.replays == {key: 2}
    assert runner.stats.recordings[key] == ReplayCounts(2, 7)
    assert runner.stats.recordings[key].padding(4) == 1 / 8
    runner.stats.clear()
    assert runner.stats.replays == {}
    runner.run({"x": rows(device, 3)})
    assert runner.stats.recordings[key] == ReplayCounts(1, 3)


class TestRepeat:
    """A body that advances its own state can be replayed again without a load."""

    def counting(self, device: Device, **options: Any) -> tuple[Runner, torch.Tensor]:
        total = torch.zeros(8, WIDTH, device=device.torch_device)

        def add(batch: dict[str, Any]) -> torch.Tensor:
            count = batch["x"].shape[0]
            total[:count] += batch["x"]
            return total[:count] * 1

        return make_runner(add, device, **options), total

    def test_it_replays_what_the_buffers_hold_and_counts_it(self, device: Device) -> None:
        runner, _ = self.counting(device)
        x = rows(device, 3)
        equal(runner.run({"x": x}), x)
        transfers = runner.registry.counts
        before = (transfers.transfers, transfers.plain, transfers.grouped)
        equal(runner.repeat(), 2 * x)
        equal(runner.repeat(), 3 * x)
        assert before == (transfers.transfers, transfers.plain, transfers.grouped)
        assert runner.stats.replays.total() == 3

    def test_nothing_can_be_repeated_before_the_first_run(self, device: Device) -> None:
        runner, _ = self.counting(device)
        assert not runner.can_repeat
        with pytest.raises(LoadError, match="can_repeat"):
            runner.repeat()

    def test_another_load_of_the_pool_ends_it(self, device: Device) -> None:
        pool = BufferPool(device)
        first, _ = self.counting(device, pool=pool)
        second, _ = self.counting(device, pool=pool)
        x = rows(device, 3)
        first.run({"x": x})
        assert first.can_repeat
        second.run({"x": x})
        assert not first.can_repeat
        assert second.can_repeat

    def test_a_load_of_other_buffers_does_not_end_it(self, device: Device) -> None:
        pool = BufferPool(device)
        first, _ = self.counting(device, pool=pool)
        other = make_runner(
            lambda batch: batch["y"] * 2,
            device,
            pool=pool,
            slots=[Slot("y", ("seqs", WIDTH), torch.float32, shared=False)],
            sample=lambda extent, seed: {"y": sample_x(device)(extent, seed)["x"]},
        )
        x = rows(device, 3)
        first.run({"x": x})
        equal(other.run({"y": x}), 2 * x)
        assert first.can_repeat
        equal(first.repeat(), 2 * x)

    def test_an_eager_run_ends_it(self, device: Device) -> None:
        runner, _ = self.counting(device)
        runner.run({"x": rows(device, 3)})
        runner.release()
        assert not runner.can_repeat
        runner.capture(silent)
        runner.run({"x": rows(device, 3)})
        runner._eager(RunEagerly(Reason.DISABLED, "test"), {"x": rows(device, 2)}, {}, {"seqs": 2})
        assert not runner.can_repeat

    def test_verify_leaves_it(self, device: Device) -> None:
        runner, _ = self.counting(device)
        x = rows(device, 3)
        runner.run({"x": x})
        verify(runner, batches=1)
        assert runner.can_repeat
        equal(runner.repeat(), 2 * x)

    def test_what_ran_last_is_told(self, device: Device) -> None:
        runner, _ = self.counting(device)
        runner.run({"x": rows(device, 3)})
        assert isinstance(runner.last, Replay)
        runner.release()
        runner.run({"x": rows(device, 3)})
        assert isinstance(runner.last, RunEagerly)


def test_a_dim_of_the_same_size_as_the_only_bucket_is_not_mistaken_for_it(device: Device) -> None:
    def body(batch: dict[str, Any]) -> torch.Tensor:
        return batch["x"] * 2

    slots = [x_slot("tokens"), Slot("ends", ("sampled",), torch.int64, pad=Pad.fill(0), valid=(0, 0))]

    def sample(extent: Extent, seed: int) -> dict[str, Any]:
        made = sample_x(device, "tokens")(extent, seed)
        return {**made, "ends": [0] * extent.used["sampled"]}

    runner = make_runner(
        body, device, sizes=(8,), slots=slots, bucketed="tokens", sample=sample, dims=[Dim("sampled", limit=8)]
    )
    x = rows(device, 7)
    equal(runner.run({"x": x, "ends": [0]}), x * 2)
