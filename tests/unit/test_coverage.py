"""Coverage: which admissible batches have a graph, the worst padding, what the others cost, and what strict refuses."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import Axis, CoverageError, Device, EmulatedDevice, Replay, RunEagerly
from phonograph.cli.main import main
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.statistics import engine_stats
from phonograph.engine.requests.request import FinishReason, SamplingParams
from phonograph.graphs.phases.decisions import Reason
from phonograph.graphs.planning.settings import Ask, ask
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.coverage import coverage
from runners import make_runner, rows, sample_x

pytestmark = pytest.mark.slow


def doubled(batch: dict[str, Any]) -> Any:
    return batch["x"] * 2


def runner_of(*sizes: int, device: Device | None = None, **phase: Any) -> Runner:
    return make_runner(doubled, device if device is not None else EmulatedDevice(), sizes=sizes, **phase)


def test_sizes_up_to_the_largest_bucket_are_covered_and_those_above_it_are_a_gap() -> None:
    found = coverage(runner_of(2, 8), range(1, 11))
    assert (found.num_covered, found.num_batches) == (8, 10)
    (gap,) = found.gaps
    assert (gap.first, gap.last, gap.reason) == (9, 10, Reason.TOO_LARGE)
    assert found.worst is not None
    assert (found.worst[0], found.worst[1].size, found.worst_padding) == (3, 8, 1 - 3 / 8)
    assert str(found).splitlines() == [
        "coverage of decode, seqs 1 to 10: 8 of 10 have a graph; worst padding 62%: 3 in decode[seqs=8]",
        "  9 to 10 of the plain product run eagerly, too large: 10 seqs, the largest bucket is 8",
    ]


def test_a_failed_capture_an_unrecorded_value_and_exact_sizes_are_gaps() -> None:
    def body(batch: dict[str, Any]) -> Any:
        if batch["x"].shape[0] == 4:
            raise ZeroDivisionError
        return batch["x"] * 2

    failed = coverage(make_runner(body, EmulatedDevice(), sizes=(2, 4, 8)), range(1, 9))
    assert [(gap.first, gap.last, gap.reason) for gap in failed.gaps] == [(3, 4, Reason.CAPTURE_FAILED)]
    exact = coverage(runner_of(2, 4, exact=True), range(1, 5))
    assert [(gap.first, gap.last) for gap in exact.gaps] == [(1, 1), (3, 3)]

    device = EmulatedDevice()
    axis = Axis(
        "kind", ("plain", "odd"), of=lambda batch: batch["kind"],
        apply=lambda batch, value: {**batch, "kind": value}, unrecorded=frozenset({"odd"}),
    )  # fmt: skip
    drawn = sample_x(device)
    odd = runner_of(4, device=device, axes=[axis], sample=lambda e, s: {**drawn(e, s), "kind": "plain"})
    (gap,) = coverage(odd, range(1, 5)).gaps
    assert (gap.group[0], gap.reason) == ((("kind", "odd"),), Reason.FEATURE_NOT_CAPTURED)


def test_a_phase_that_records_nothing_covers_nothing() -> None:
    found = coverage(runner_of(4, backend="disabled"), range(1, 5))
    assert (found.num_covered, found.worst) == (0, None)
    assert [gap.reason for gap in found.gaps] == [Reason.DISABLED]


@given(sizes=st.sets(st.integers(1, 12), min_size=1, max_size=4), largest=st.integers(1, 14))
@settings(max_examples=15, deadline=None)
def test_it_says_what_the_runner_decides(sizes: set[int], largest: int) -> None:
    runner = runner_of(*sorted(sizes))
    found = coverage(runner, range(1, largest + 1))
    uncovered = {used for gap in found.gaps for used in range(gap.first, gap.last + 1)}
    for used in range(1, largest + 1):
        decision = runner.decide({"x": rows(runner.device, used)})
        assert isinstance(decision, Replay) == (used not in uncovered)
        if isinstance(decision, Replay):
            assert 1 - used / decision.key.size <= found.worst_padding


def test_measuring_a_gap_leaves_state_and_counts_alone() -> None:
    device = EmulatedDevice()
    state = torch.zeros(1)

    def body(batch: dict[str, Any]) -> Any:
        state.add_(1)
        return batch["x"] + state

    runner = make_runner(body, device, sizes=(2,))
    (gap,) = coverage(runner, range(1, 4), measured=True).gaps
    assert gap.cost is not None
    assert gap.cost.size == 3
    assert gap.cost.eager > 0
    assert gap.cost.replayed == 2
    assert gap.cost.replay > 0
    assert "3 take" in str(gap)
    assert torch.equal(state, torch.zeros(1))
    assert runner.stats.replays.total() == runner.stats.eager.total() == 0


def test_the_first_eager_call_of_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = runner_of(2)
    with caplog.at_level(logging.INFO, logger="phonograph"):
        for used in (3, 4, 3):
            runner.run({"x": rows(runner.device, used)})
    told = [record for record in caplog.records if "runs eagerly" in record.message]
    assert [record.message for record in told] == ["decode runs eagerly, too large: 3 seqs, the largest bucket is 2"]
    assert told[0].levelno == logging.WARNING
    assert runner.stats.eager[Reason.TOO_LARGE] == 3


# -- the engine -------------------------------------------------------------------------------------------------


def engine(*asked: Ask) -> LLM:
    options = EngineOptions(max_seqs=4, max_tokens=16, max_len=64, page_size=8, dtype=torch.float32)
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)


STRICT = ask("graphs", "strict", origin="test")
NARROW = ask("decode.buckets", (1, 2), origin="test")
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def test_the_engine_states_coverage_in_its_log_its_stats_and_explain(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="phonograph"):
        llm = engine(NARROW)
    decode, prefill = llm.executor.coverage["decode"], llm.executor.coverage["prefill"]
    assert not prefill.gaps
    assert (prefill.sizes, decode.sizes) == (range(1, 17), range(1, 5))
    assert {(gap.first, gap.last, gap.reason) for gap in decode.gaps} == {(3, 4, Reason.TOO_LARGE)}
    assert len(decode.gaps) == decode.num_products == 3
    assert all(gap.cost is not None and gap.cost.replay > 0 for gap in decode.gaps)
    said = [record for record in caplog.records if record.message.startswith("coverage of decode")]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert str(decode) in llm.explain()
    stats = {phase.name: phase.coverage for phase in engine_stats(llm.core).phases}
    assert stats["idle"] is None
    assert stats["decode"] is not None
    assert (stats["decode"].covered, stats["decode"].batches, stats["decode"].worst_used) == (6, 12, 1)
    assert "ms eagerly" in stats["decode"].gaps[0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("decode.buckets", (1, 2)), r"decode .* those of 3 to 4: decode\.buckets=1,2 \(asked by test\)"),
        (("prefill.limit", 32), r"prefill .* those of 33 to 64: prefill\.limit=32 \(asked by test\)"),
        (("prefill.backend", "disabled"), r"prefill .* those of 1 to 64: prefill\.backend=disabled \(asked by test\)"),
    ],
)
def test_strict_refuses_what_can_have_no_graph_before_weights_are_read(
    asked: tuple[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which `explain` never reads."""
    with pytest.raises(CoverageError, match=f"strict: {said}.*take back strict"):
        LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", asked=[STRICT, ask(*asked, origin="test")])
    (phase, field), value = asked[0].split("."), asked[1]
    flags = ["--graphs", "strict", "--graph-backend", json.dumps({phase: {field: value}})]
    assert main(["explain", "--shape", "tiny", "--device", "emulated", *flags]) == 2
    assert "take back strict (asked by --graphs)" in capsys.readouterr().err


def test_strict_refuses_a_gap_at_start_up_by_name() -> None:
    with pytest.raises(CoverageError, match="strict: decode has no graph for some batches") as error:
        engine(STRICT, ask("decode.max_recordings", 3, origin="test"))
    assert "1 to 4 of sampling=sampled are refused" in str(error.value)
    llm = engine(STRICT)
    assert [one.finish for one in llm.generate([[5, 9, 3]], GREEDY)] == [FinishReason.LENGTH]


def test_strict_makes_an_eager_step_the_failure_of_its_request() -> None:
    llm = engine(STRICT)
    runner = llm.executor.runners["decode"]
    for key in runner.captured:
        runner.mistrust(key, "planted")
    (done,) = llm.generate([[5, 9, 3]], GREEDY)
    assert done.finish is FinishReason.ERROR
    assert "strict: decode has no graph for this batch" in done.error
    assert "planted" in done.error


def test_strict_fails_a_batch_of_a_wrong_recording_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    """One by one its sequences would fit another recording: so many passes a step, and nobody would know."""
    llm = engine(STRICT)
    runner = llm.executor.runners["decode"]
    for key in [key for key in runner.captured if key.size > 1]:
        runner.mistrust(key, "planted")
    done = llm.generate([[5, 9, 3], [7, 1], [4]], GREEDY)
    assert [one.finish for one in done] == [FinishReason.ERROR] * 3
    assert all("strict: decode has no graph for this batch" in one.error for one in done)
    assert "one by one" not in caplog.text
    assert "fails: strict" in caplog.text
    llm.core.scheduler.integrity()
    assert llm.core.is_idle
    (alone,) = llm.generate([[5, 9, 3]], GREEDY)
    assert alone.finish is FinishReason.LENGTH, "who fits a recording that is right is served"
    assert alone.tokens == engine().generate([[5, 9, 3]], GREEDY)[0].tokens
    assert runner.stats.eager.total() == 0
    assert "refused since then" in llm.explain()
    assert "are refused, mistrusted" in llm.explain()


def test_a_recording_that_is_given_back_is_no_longer_covered() -> None:
    llm = engine()
    runner = llm.executor.runners["decode"]
    runner.mistrust(next(key for key in runner.captured if key.size == 4 and not key.values), "planted")
    stats = {phase.name: phase.coverage for phase in engine_stats(llm.core).phases}
    assert stats["decode"] is not None
    assert "run eagerly, mistrusted" in stats["decode"].gaps[0]
    assert "mistrusted" in llm.explain()


def test_the_engines_guard_can_be_told_what_to_do() -> None:
    llm = engine(ask("guard", "off", origin="test"))
    assert {runner.options.guard for runner in llm.executor.runners.values()} == {"off"}
    assert {runner.options.guarded for runner in llm.executor.runners.values()} == {"ends"}


def test_the_engines_own_passes_raise_no_alarm_on_any_axis() -> None:
    for backend in ("full", "breakable"):
        llm = engine(*(ask(f"{name}.backend", backend, origin="test") for name in ("decode", "prefill")))
        for report in llm.reports:
            assert not report.failures, report
            assert not report.findings


def test_a_decision_names_its_reason() -> None:
    decisions = dict(runner_of(2).decisions())
    (decide,) = decisions.values()
    assert isinstance(decide(2), Replay)
    assert isinstance(decide(3), RunEagerly)
