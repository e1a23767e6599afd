"""Capture failures of every kind in one bucket of many: the others serve, that one runs eagerly and is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families as parse

from phonograph import LLM, EngineOptions, SamplingParams, VerifyError, current
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.ops.attention.gaps import GapAttention
from phonograph.engine.passes.decode import DecodeBody
from phonograph.engine.passes.prefill import PrefillBody
from phonograph.engine.process.statistics import engine_stats
from phonograph.graphs.phases.context import Stage
from phonograph.graphs.phases.decisions import Reason
from phonograph.graphs.planning.settings import ask
from phonograph.server.observe.exposition import Exposition
from phonograph.server.observe.metrics import Metrics

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 200], [7] * 6, [40, 41, 42, 43], [11] * 14]
BUCKETS = {"decode": (1, 2, 4), "prefill": (4, 8, 16)}
BODIES: dict[str, Any] = {"decode": DecodeBody, "prefill": PrefillBody}


def opened(backend: str = "full", *, guard: str = "refuse", verify: Any = "fast") -> LLM:
    options = EngineOptions(
        max_seqs=4, max_tokens=16, max_len=64, page_size=4, cache_tokens=128, dtype=torch.float32, verify=verify
    )
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in BUCKETS]
    asked += [ask(f"{phase}.buckets", sizes, origin="test") for phase, sizes in BUCKETS.items()]
    asked.append(ask("guard", guard, origin="test"))
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)


def answers(llm: LLM) -> list[list[int]]:
    """Batches of every bucket of both passes."""
    found = [llm.generate(prompts, GREEDY) for prompts in ([[33] * 7], *(PROMPTS[:count] for count in (1, 2, 4)))]
    assert [one.error for group in found for one in group] == [""] * 8
    return [one.tokens for group in found for one in group]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return answers(opened())


@dataclass(frozen=True)
class Failure:
    """What goes wrong in a body, and a part of the sentence that names it."""

    happen: Callable[[torch.Tensor], object]
    said: str


def raise_(error: BaseException) -> Any:
    raise error


class OddError(Exception):
    """One that says nothing, and that no library knows."""


GONE = "Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.00 GiB\nmore"
FAILURES = {
    "exception": Failure(lambda rows: raise_(ZeroDivisionError("planted")), "ZeroDivisionError: planted"),
    "says nothing": Failure(lambda rows: raise_(OddError()), "OddError: no message"),
    "out of memory": Failure(
        lambda rows: raise_(torch.OutOfMemoryError(GONE)), "OutOfMemoryError: Tried to allocate 20.00 MiB"
    ),
    "host out of memory": Failure(lambda rows: raise_(MemoryError()), "MemoryError: no message"),
    "driver": Failure(lambda rows: raise_(RuntimeError("CUDA error: operation not permitted")), "CUDA error"),
    "assertion": Failure(lambda rows: raise_(AssertionError("library")), "AssertionError: library"),
    "host read": Failure(lambda rows: int(rows[0]), "reads the device from the host"),
    "list": Failure(lambda rows: rows.tolist(), "the host"),
    "shape by values": Failure(lambda rows: rows.nonzero(), "has a shape that depends on device values"),
    "host constant": Failure(lambda rows: rows + torch.tensor([3, 4])[: len(rows)].sum(), "host"),
    "timeout": Failure(lambda rows: raise_(TimeoutError("no answer in 30 s")), "TimeoutError: no answer in 30 s"),
}
RECORDED = (Stage.WARMING, Stage.CAPTURING)


def plant(
    monkeypatch: pytest.MonkeyPatch, phase: str, size: int, happen: Callable[[torch.Tensor], object], *stages: Stage
) -> None:
    """Let the body of one size do something more, in these stages."""
    body = BODIES[phase].__call__

    def planted(self: Any, batch: Any) -> Any:
        if len(batch.rows) == size and current().stage in stages:
            happen(batch.rows)
        return body(self, batch)

    monkeypatch.setattr(BODIES[phase], "__call__", planted)


def exposed(llm: LLM) -> dict[tuple[str, str, str], float]:
    """What /metrics says, by metric, phase and reason."""
    metrics = Metrics()
    metrics.take(engine_stats(llm.core), incarnation=0)
    text = Exposition(metrics, "tiny", lambda: {"version": "1"}).text().decode()
    samples = [sample for family in parse(text) for sample in family.samples]
    return {(one.name, one.labels.get("phase", ""), one.labels.get("reason", "")): one.value for one in samples}


def check(llm: LLM, right: list[list[int]], phase: str, sizes: set[int], said: str) -> None:
    """The others serve, these run eagerly with the right results, and everybody is told."""
    runner, other = llm.executor.runners[phase], "prefill" if phase == "decode" else "decode"
    report = runner.report
    assert report is not None
    failed = {row.key for row in report.failures}
    assert {key.size for key in failed} == sizes
    assert {key.size for key in runner.captured} == set(BUCKETS[phase]) - sizes
    assert len(llm.executor.runners[other].captured) == len(llm.executor.runners[other].selection.keys)  # type: ignore[union-attr]
    assert answers(llm) == right
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: runner.stats.eager.total()}
    assert runner.stats.eager.total() > 0
    assert (runner.stats.replays.total() > 0) == (sizes != set(BUCKETS[phase]))
    assert llm.executor.runners[other].stats.eager.total() == 0
    explained = llm.explain()
    for key in failed:
        (line,) = [line for line in explained.splitlines() if line.startswith(f"  {key} stays eager: ")]
        assert said in line
    assert f"{runner.stats.eager.total()} capture failed: the capture of {phase}[" in explained
    (stated,) = [line for line in llm.executor.coverage_lines() if line.startswith(f"coverage of {phase}")]
    assert "run eagerly, capture failed: the capture of" in stated
    shown = exposed(llm)
    assert shown["phonograph:graph_capture_failures", phase, ""] == len(failed)
    assert shown["phonograph:graph_capture_failures", other, ""] == 0
    assert shown["phonograph:eager_steps_total", phase, "capture failed"] == runner.stats.eager.total()
    assert 0 < shown["phonograph:graph_coverage", phase, ""] < 1 or sizes == set(BUCKETS[phase])
    assert shown["phonograph:graph_coverage", other, ""] == 1


@pytest.mark.parametrize("name", FAILURES)
def test_one_bucket_fails_in_warm_up_and_the_others_serve(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    plant(monkeypatch, "decode", 2, FAILURES[name].happen, *RECORDED)
    with caplog.at_level(logging.WARNING, "phonograph"):
        llm = opened()
    assert FAILURES[name].said in caplog.text, "it is logged"
    check(llm, right, "decode", {2}, FAILURES[name].said)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("full", "exception"), ("full", "host read"), ("breakable", "out of memory"), ("breakable", "driver")],
)
def test_one_bucket_fails_in_capture_alone(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    plant(monkeypatch, "prefill", 8, FAILURES[name].happen, Stage.CAPTURING)
    check(opened(backend), right, "prefill", {8}, FAILURES[name].said)


@pytest.mark.parametrize(("phase", "size"), [("decode", 1), ("decode", 4), ("prefill", 4), ("prefill", 16)])
def test_the_smallest_and_the_largest_bucket_may_fail_too(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch, phase: str, size: int
) -> None:
    plant(monkeypatch, phase, size, FAILURES["out of memory"].happen, *RECORDED)
    check(opened(), right, phase, {size}, FAILURES["out of memory"].said)


@pytest.mark.parametrize("stages", [RECORDED, (Stage.CAPTURING,)])
@pytest.mark.parametrize("number", [1, 2])
def test_a_gap_that_times_out_fails_its_bucket(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch, stages: tuple[Stage, ...], number: int
) -> None:
    """The n-th gap: in the first, a graph before it is recorded already; in the second, a gap has run."""
    prepared, met = GapAttention.prepared, [0]

    def timed_out(self: Any, cache: Any, rows: torch.Tensor, *rest: Any) -> Any:
        if len(rows) == 8 and current().stage in stages:
            met[0] += 1
            if met[0] % 2 == number % 2:
                raise TimeoutError("no answer in 30 s")
        return prepared(self, cache, rows, *rest)

    monkeypatch.setattr(GapAttention, "prepared", timed_out)
    check(opened("breakable"), right, "prefill", {8}, "TimeoutError: no answer in 30 s")


@pytest.mark.faults
def test_a_gap_that_times_out_in_service_fails_its_step_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened("breakable")
    wanted, prepared, left = llm.generate(PROMPTS[:1], GREEDY), GapAttention.prepared, [1]

    def timed_out(self: Any, *given: Any) -> Any:
        if current().stage is Stage.REPLAYING and left and left.pop():
            raise TimeoutError("no answer in 30 s")
        return prepared(self, *given)

    monkeypatch.setattr(GapAttention, "prepared", timed_out)
    assert [one.tokens for one in llm.generate(PROMPTS[:1], GREEDY)] == [one.tokens for one in wanted]


def test_the_guard_refuses_a_product_and_the_others_serve(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one size freezes, others of its product may freeze too: all of them are refused, and no other product."""
    numbers = iter(range(10**6))

    def frozen(rows: torch.Tensor) -> None:
        torch.add(rows, next(numbers))

    plant(monkeypatch, "prefill", 4, frozen, Stage.WARMING)
    llm = opened()
    check(llm, right, "prefill", {4, 8, 16}, "")
    assert "test_capture_failures.py:" in llm.explain()
    assert len(llm.executor.runners["decode"].captured) == 9


def test_reported_alone_all_of_it_is_recorded(right: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(10**6))
    plant(monkeypatch, "prefill", 4, lambda rows: torch.add(rows, next(numbers)), Stage.WARMING)
    llm = opened(guard="report")
    assert len(llm.executor.runners["prefill"].captured) == 3
    assert "recorded all the same: prefill[tokens=4]" in llm.explain()
    assert answers(llm) == right


def test_a_bucket_that_fails_eagerly_too_is_no_reason_not_to_start(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What its batches cost can't be measured; those of other sizes are served."""
    plant(monkeypatch, "decode", 2, FAILURES["out of memory"].happen, *Stage)
    llm = opened()
    (gap, *_) = llm.executor.coverage["decode"].gaps
    assert (gap.first, gap.last, gap.reason, gap.cost) == (2, 2, Reason.CAPTURE_FAILED, None)
    assert "2 seqs of decode fail eagerly too (OutOfMemoryError: Tried to allocate" in caplog.text
    assert [one.tokens for one in llm.generate(PROMPTS[:1], GREEDY)] == right[1:2]
    assert [one.tokens for one in llm.generate(PROMPTS, GREEDY)] == right[4:]


def test_a_replay_that_verify_finds_wrong_in_one_bucket_refuses_to_start_and_names_it(
    right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    body: Any = PrefillBody.__call__

    def planted(self: Any, batch: Any) -> Any:
        found = body(self, batch)
        return found + 1 if len(batch.rows) == 16 and current().stage is Stage.CAPTURING else found

    monkeypatch.setattr(PrefillBody, "__call__", planted)
    with pytest.raises(VerifyError, match=r"does not start") as raised:
        opened()
    assert "prefill[tokens=16]" in str(raised.value)
    assert "prefill[tokens=8]" not in str(raised.value)


def test_two_passes_may_fail_in_different_buckets(right: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "decode", 4, FAILURES["exception"].happen, *RECORDED)
    plant(monkeypatch, "prefill", 8, FAILURES["out of memory"].happen, Stage.CAPTURING)
    llm = opened()
    assert answers(llm) == right
    shown = exposed(llm)
    for phase, count in {"decode": 3, "prefill": 1}.items():
        assert shown["phonograph:graph_capture_failures", phase, ""] == count
        assert shown["phonograph:eager_steps_total", phase, "capture failed"] > 0
        assert llm.executor.runners[phase].stats.replays.total() > 0


def test_all_buckets_failing_serves_eagerly(right: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    body = DecodeBody.__call__

    def planted(self: Any, batch: Any) -> Any:
        if current().stage in RECORDED:
            raise ZeroDivisionError("planted")
        return body(self, batch)

    monkeypatch.setattr(DecodeBody, "__call__", planted)
    llm = opened()
    assert answers(llm) == right
    assert not llm.executor.runners["decode"].captured
    assert exposed(llm)["phonograph:graph_coverage", "decode", ""] == 0
