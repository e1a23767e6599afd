"""Recordings are verified before the first request; a failure refuses to start, with the remedy."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph import current
from phonograph.cli.main import main
from phonograph.engine.execution.startup_verification import (
    _SHARE,
    guard_recordings,
    refuse_failures,
    refuse_findings,
    verify_recordings,
)
from phonograph.engine.llm import LLM
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.interface import Hidden
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.statistics import engine_stats
from phonograph.errors import PlanError, VerifyError
from phonograph.graphs.phases.context import Stage
from phonograph.graphs.planning.settings import Asked, ask
from phonograph.graphs.progress import silent

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"max_seqs": 4, "max_tokens": 16, "max_len": 64}


def tiny(mode: Any) -> LLM:
    return EngineArguments(None, "tiny", "emulated", EngineOptions(verify=mode, **SMALL)).open()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny("fast")


def test_a_few_recordings_of_each_phase_and_product_are_checked(llm: LLM) -> None:
    assert set(llm.verified) == {"decode", "prefill"}
    assert all(report.ok for report in llm.verified.values())
    products = {check.key.values for check in llm.verified["decode"].checks}
    assert products == {key.values for key in llm.executor.runners["decode"].captured}
    assert {check.name for check in llm.verified["decode"].checks} == {"same view", "unpadded", "draws", "state"}
    assert any(check.used < check.key.size for check in llm.verified["decode"].checks)


def test_what_was_checked_is_told(llm: LLM) -> None:
    assert "verified: " in llm.explain()
    by_name = {phase.name: phase for phase in engine_stats(llm.core).phases}
    assert by_name["decode"].num_checks == len(llm.verified["decode"].checks)
    assert by_name["decode"].num_verified >= 3
    assert "0 failed" in by_name["decode"].verified
    assert by_name["idle"].verified == ""


def test_off_checks_nothing_and_all_checks_everything() -> None:
    llm = tiny("off")
    assert llm.verified == {}
    assert "verified" not in llm.explain()
    found = verify_recordings(llm.executor, "all", llm.reports, silent)
    assert set(found) == {"decode", "prefill", "idle"}
    for name, report in found.items():
        assert report.ok, report
        assert {check.key for check in report.checks} == set(llm.executor.runners[name].captured)


def test_a_share_of_the_capture_bounds_what_is_looked_at_besides_what_must_be() -> None:
    llm = EngineArguments(None, "tiny", "emulated", EngineOptions(verify="off", **SMALL | {"max_seqs": 16})).open()

    def looked_at(capture_s: float) -> tuple[set[tuple[Any, ...]], float]:
        each = capture_s / len(llm.reports)
        reports = [replace(report, seconds=each) for report in llm.reports]
        found = verify_recordings(llm.executor, "fast", reports, silent)
        assert all(report.ok for report in found.values())
        looks = {(check.key, check.used, check.name) for report in found.values() for check in report.checks}
        return looks, sum(report.seconds for report in found.values())

    assert _SHARE <= 0.045, "docs/trust.md says 4.5 %"
    looked_at(0.0)
    least, seconds = looked_at(0.0)
    assert {key.values for key, _, _ in least} == {
        key.values for name in ("decode", "prefill") for key in llm.executor.runners[name].captured
    }
    assert looked_at(seconds / 10 / _SHARE)[0] == least, "what must be looked at has taken all of it"
    assert looked_at(1000 * seconds / _SHARE)[0] > least


@pytest.mark.parametrize("mode", ["fast", "all"])
def test_padding_that_writes_a_live_page_refuses_to_start(mode: Any) -> None:
    """The page table of the null row names a page of a sequence, as if somebody had cleared it wrongly."""
    llm = tiny("off")
    llm.executor.tables.pages[0].fill_(2)
    found = verify_recordings(llm.executor, mode, llm.reports, silent)
    assert "state" in {check.name for report in found.values() for check in report.failures}
    with pytest.raises(VerifyError, match=r"does not start.*--\w+-graph-backend disabled.*--verify off") as raised:
        refuse_failures(found)
    assert "KV cache" in str(raised.value)


def test_an_engine_is_left_as_it_was(llm: LLM) -> None:
    """All but the null page, which is nobody's."""
    before = [tensor[:, 1:].clone() for tensor in llm.executor.cache.tensors]
    rows = {name: tensor.clone() for name, tensor in llm.executor.tables.live_rows(4).items()}
    verify_recordings(llm.executor, "all", llm.reports, silent)
    after = [tensor[:, 1:] for tensor in llm.executor.cache.tensors]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    assert all(torch.equal(tensor, rows[name]) for name, tensor in llm.executor.tables.live_rows(4).items())


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match="verify is one of fast, all, off"):
        EngineOptions(verify="some")  # type: ignore[arg-type]


FLAGS = ["--shape", "tiny", "--max-seqs", "2", "--max-step-tokens", "8", "--max-len", "64"]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "emulated", *FLAGS]) == 0
    shown = capsys.readouterr().out
    assert "decode[seqs=2, sampling=detailed]" in shown
    assert "FAILED" not in shown
    assert " 0 failed, in " in shown


def test_a_verification_says_how_far_it_is_and_how_many_checks_failed() -> None:
    llm, told = tiny("off"), list[tuple[str, int, int]]()
    llm.executor.tables.pages[0].fill_(2)
    found = verify_recordings(llm.executor, "all", llm.reports, lambda *step: told.append(step))
    for name, report in found.items():
        steps = [step for step in told if step[0].startswith(f"verifying {name}")]
        num_recordings = len(llm.executor.runners[name].captured)
        assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
        assert len(steps) > num_recordings, "a batch is a step too: one that fails takes many runs"
        assert {total for _, _, total in steps} == {num_recordings}
        failed = f", {len(report.failures)} failed" if report.failures else ""
        assert steps[-1] == (f"verifying {name}{failed}", num_recordings, num_recordings)
    assert any("failed" in doing for doing, done, total in told if done < total), "before the end"


def test_the_command_shows_progress_and_keeps_it_out_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "emulated", *FLAGS]) == 0
    shown = capsys.readouterr()
    for name in ("decode", "prefill", "idle"):
        assert f"verifying {name}" in shown.err
    assert "verifying" not in shown.out
    assert "[####" not in shown.out


def test_the_command_fails_where_a_pass_could_not_be_recorded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no recording has nothing to check, which is no reason to call it right."""
    hidden = Decoder.hidden

    def failing(self: Any, inputs: Any, queries: Any, *rest: Any, **named: Any) -> Hidden:
        if current().stage is Stage.CAPTURING and current().phase == "prefill":
            raise ZeroDivisionError("planted")
        return hidden(self, inputs, queries, *rest, **named)

    monkeypatch.setattr(Decoder, "hidden", failing)
    assert main(["verify", "--device", "emulated", *FLAGS]) == 1
    shown = capsys.readouterr().out
    assert re.search(
        r"^prefill: nothing is recorded, so nothing was checked: \d+ captures failed; the first: ", shown, re.M
    )
    assert "decode[seqs=2]" in shown


def test_the_command_without_checks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--verify", "off", "--device", "emulated", *FLAGS]) == 2
    assert "--verify off checks nothing" in capsys.readouterr().err


def test_the_command_fails_where_nothing_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", *FLAGS]) == 1
    assert "nothing is recorded" in capsys.readouterr().err


# -- the guard ----------------------------------------------------------------------------------------------------


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of two rows, between the largest and the smallest, takes a number that is another in every run."""
    hidden, numbers = Decoder.hidden, itertools.count()

    def drift(self: Any, inputs: Any, queries: Any, *rest: Any, **named: Any) -> Hidden:
        if current().phase == "decode" and len(queries.rows) == 2:
            torch.zeros(1).fill_(next(numbers))
        return hidden(self, inputs, queries, *rest, **named)

    monkeypatch.setattr(Decoder, "hidden", drift)


@pytest.mark.parametrize(("mode", "is_recorded"), [("fast", True), ("off", True), ("all", False)])
def test_a_start_guards_the_ends_and_with_verify_all_every_size(mode: Any, is_recorded: bool, drifting: None) -> None:
    llm = tiny(mode)
    assert bool(llm.executor.runners["decode"].captured) == is_recorded
    assert llm.executor.runners["prefill"].captured
    told = [str(found) for report in llm.reports for found in report.findings]
    assert bool(told) != is_recorded
    assert all("aten.fill_.Scalar(value=) gets" in text and "test_startup_verification.py:" in text for text in told)


def test_what_capture_has_not_looked_at_is_guarded_where_all_is_checked(drifting: None) -> None:
    llm = tiny("off")
    assert guard_recordings(llm.executor, "fast", silent) == {}
    found = guard_recordings(llm.executor, "all", silent)
    assert set(found) == {"decode", "prefill", "idle"}
    assert {finding.key.size for finding in found["decode"].findings} == {2}
    assert found["prefill"].ok
    with pytest.raises(VerifyError, match=r"does not start.*--decode-graph-backend disabled.*--graph-guard report"):
        refuse_findings(found, "refuse")


@pytest.mark.faults
def test_findings_that_are_only_to_be_reported_are_logged(drifting: None, caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny("off")
    refuse_findings(guard_recordings(llm.executor, "all", silent), "report")
    assert "recorded all the same: decode: guard: " in caplog.text


def test_nothing_is_looked_at_twice_or_where_the_guard_is_off() -> None:
    """Nodes of the emulated device are ops, and capture has compared these."""
    assert guard_recordings(tiny("all").executor, "all", silent) == {}
    unguarded = Asked((ask("guard", "off", origin="a test"),))
    llm = EngineArguments(None, "tiny", "emulated", EngineOptions(verify="off", **SMALL), unguarded).open()
    assert guard_recordings(llm.executor, "all", silent) == {}


def test_the_command_shows_what_the_guard_finds_and_fails(capsys: pytest.CaptureFixture[str], drifting: None) -> None:
    flags = ["--shape", "tiny", "--max-seqs", "4", "--max-step-tokens", "8", "--max-len", "64", "--device", "emulated"]
    assert main(["verify", *flags]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^decode: guard: \d+ shapes run on several samples, 3 that differ or fail$", shown, re.M)
    assert "decode[seqs=2]: aten.fill_.Scalar(value=) gets" in shown
    assert re.search(r"^prefill: guard: \d+ shapes run on several samples, 0 that differ or fail$", shown, re.M)
    assert " 0 failed, in " in shown
    assert main(["verify", "--verify", "fast", *flags]) == 0
    assert "guard:" not in capsys.readouterr().out


def test_a_trace_shows_findings_and_what_is_not_seen(capsys: pytest.CaptureFixture[str], drifting: None) -> None:
    assert main(["explain", "--trace", "decode", "--device", "emulated", *FLAGS]) == 0
    shown = capsys.readouterr().out
    assert "decode: found at capture: decode[seqs=2]: aten.fill_.Scalar(value=) gets" in shown
    assert main(["explain", "--trace", "prefill", "--device", "emulated", *FLAGS]) == 0
    assert re.search(
        r"^prefill: guard: \d+ shapes run on several samples, 0 that differ or fail$", capsys.readouterr().out, re.M
    )
