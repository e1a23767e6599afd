"""Shadow verification: a recording that goes wrong in service is found before anybody sees what it gave."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mixed_requests import Grammars, served
from phonograph import LLM, CheckpointError, EngineOptions, PlanError, SamplingParams
from phonograph.cli.main import main
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.reproducer import Reproducer
from phonograph.engine.execution.rerun import Rerun, rerun
from phonograph.engine.execution.shadow import described_checks, shadowing_for
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.request import GrammarSpec, Request
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.graphs.phases.decisions import Reason
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.recording.backends.tc_piecewise import TcPiecewiseBackend
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust import shadow

pytestmark = pytest.mark.slow


def opened(backend: str = "full", **options: Any) -> LLM:
    usual = {"max_seqs": 4, "max_tokens": 16, "max_len": 64, "page_size": 4, "cache_tokens": 128, "max_ahead": 2}
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    asked += [ask("decode.buckets", (4,), origin="test"), ask("prefill.buckets", (8, 16), origin="test")]
    made = EngineOptions(**(usual | {"dtype": torch.float32} | options))
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=made, asked=asked)


def again(executor: Executor, path: Path) -> Rerun:
    return rerun(executor, Reproducer.read(path))


def generated(llm: LLM) -> list[list[int]]:
    return [sequence.outputs for sequence in served(llm.limits, llm.executor)[0]]


Places = list[tuple[int, int]]
"""(row, position) of the last token that each row of a step has."""
Fault = Callable[[Executor, Places], None]
Kind = tuple[int, tuple[tuple[str, str], ...]]
"""(size, axes) of a recording."""
MOST_USED: dict[str, Kind] = {"decode": (4, (("sampling", "detailed"),)), "prefill": (16, ())}
"""By pass, the recording that serves most steps here."""


def spoil(executor: Executor, phase: str, fault: Fault, *, after: int = 0, kind: Kind | None = None) -> str:
    """Let one recording do something else besides, from some replay on; returns its name."""
    runner, (size, values) = executor.runners[phase], kind or MOST_USED[phase]
    key = next(key for key in runner.captured if (key.size, key.values) == (size, values))
    recording, launch, places, count = runner.recording(key), executor.launch, Places(), 0

    def launched(step: Step) -> Any:
        rows = step.decodes.rows.tolist()
        places[:] = [(row, int(executor.tables.length[row])) for row in rows]
        places.extend((chunk.row, chunk.start + len(chunk.tokens) - 1) for chunk in step.prefills)
        return launch(step)

    def spoiled() -> None:
        nonlocal count
        recording.replay()
        count += 1
        if count > after:
            fault(executor, places)

    executor.launch = launched  # type: ignore[method-assign]
    runner._entries[key].recording = Spoiled(recording, spoiled)  # type: ignore[assignment]
    return str(key)


class Spoiled:
    """A recording whose replay is another."""

    def __init__(self, recording: Any, replay: Callable[[], None]) -> None:
        self._recording, self.replay = recording, replay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recording, name)


def other_tokens(executor: Executor, places: Places) -> None:
    executor.tables.last_token[1:] += 1


def other_lengths(executor: Executor, places: Places) -> None:
    executor.tables.length[1:] += 1


def other_keys(executor: Executor, places: Places) -> None:
    cache = executor.cache.caches[0]
    for row, position in places:
        page = int(executor.tables.pages[row, position // cache.page_size])
        cache.keys[1, page, position % cache.page_size] += 0.5


def everybodys_values(executor: Executor, places: Places) -> None:
    for cache in executor.cache.caches:
        cache.values[:, 1:] *= 1.2


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return generated(opened())


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_a_right_engine_is_found_right_at_every_step(backend: str, right: list[list[int]]) -> None:
    llm = opened(backend, shadow_verify=1.0)
    assert generated(llm) == right
    assert llm.executor.shadow is not None
    replays = sum(runner.stats.replays.total() for runner in llm.executor.runners.values())
    assert llm.executor.shadow.num_checked == replays > 20
    assert llm.executor.shadow.num_wrong == 0


def test_recordings_that_round_otherwise_are_not_shadowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcPiecewiseBackend, "is_exact", False)
    with pytest.raises(PlanError, match=r"compares bits, and what is compiled for .*decode.* rounds differently"):
        opened("tc_piecewise", shadow_verify=0.1)
    assert opened("tc_piecewise").executor.shadow is None


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("fault", [other_tokens, other_lengths, other_keys])
def test_a_wrong_recording_is_found_and_nobody_sees_it(
    fault: Fault, phase: str, after: int, right: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    llm = opened(shadow_verify=1.0)
    name = spoil(llm.executor, phase, fault, after=after)
    with caplog.at_level(logging.ERROR, "phonograph"):
        assert generated(llm) == right
    assert llm.executor.shadow is not None
    assert llm.executor.shadow.num_wrong == 1, "after that its batches run eagerly"
    assert name in caplog.text
    stats = llm.executor.runners[phase].stats
    assert stats.eager[Reason.MISTRUSTED] > 0
    assert stats.replays.total() > 0, "the others serve"
    assert name in llm.explain()
    assert generated(llm) == right


@pytest.mark.faults
def test_a_wrong_decode_is_found_and_nobody_sees_it(right: list[list[int]]) -> None:
    llm = opened(shadow_verify=1.0)
    spoil(llm.executor, "decode", other_tokens)
    assert generated(llm) == right
    assert llm.executor.runners["decode"].stats.eager[Reason.MISTRUSTED] > 0


@pytest.mark.faults
@pytest.mark.parametrize("is_spoiled", [False, True])
def test_who_is_not_in_a_wrong_step_is_computed_again_too(is_spoiled: bool) -> None:
    """A wrong replay may have written anybody's pages. One with a grammar sits out steps ahead of its own tokens."""
    llm = opened(shadow_verify=1.0)
    core = EngineCore(Scheduler(llm.limits), llm.executor, Grammars())
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    guided = dataclasses.replace(params, grammar=GrammarSpec("regex", "even"))
    (outside,) = core.add(Request("outside", (40, 41, 42), guided))
    (inside,) = core.add(Request("inside", (7, 9), params))
    hit = list[int]()

    def fault(executor: Executor, places: Places) -> None:
        if len(outside.outputs) > 4 and outside.row not in [row for row, _ in places]:
            hit.append(outside.row)
            everybodys_values(executor, places)

    for key in llm.executor.runners["decode"].captured if is_spoiled else ():
        spoil(llm.executor, "decode", fault, kind=(key.size, key.values))
    while not core.is_idle:
        core.step()
    assert bool(hit) == is_spoiled
    llm = opened()
    for one in (outside, inside):
        alone = EngineCore(Scheduler(llm.limits), llm.executor, Grammars())
        (wanted,) = alone.add(one.request)
        while not alone.is_idle:
            alone.step()
        assert one.outputs == wanted.outputs, one.request.id


def swap_rows(runner: Runner) -> None:
    """Overwrite the input buffer of a recording, as a stray kernel may."""
    assert runner._loaded is not None
    entry, used = runner._entries[runner._loaded.key], {"seqs": runner._loaded.used}
    _, steps = entry.fitted(used, runner.registry, runner.phase.without).prepared
    (rows,) = steps.used.values()
    rows.copy_(rows.flip(0))


@pytest.mark.faults
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_repeat_of_spoiled_buffers_is_found(
    share: float, right: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm, repeat, num_repeats = opened(shadow_verify=share), Runner.repeat, 0

    def spoiled(runner: Runner) -> Any:
        nonlocal num_repeats
        num_repeats += 1
        swap_rows(runner)
        return repeat(runner)

    monkeypatch.setattr(Runner, "repeat", spoiled)
    assert (generated(llm) == right) == (share == 1)
    assert num_repeats > 0, "a step that is checked is a repeat where it would be one without"
    assert ("(a repeat: the last batch was not loaded again)" in caplog.text) == (share == 1)


@pytest.mark.faults
def test_the_reproducer_of_a_repeat_is_run_as_one(tmp_path: Path) -> None:
    repeat = Runner.repeat

    def spoiled(runner: Runner) -> Any:
        swap_rows(runner)
        return repeat(runner)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Runner, "repeat", spoiled)
        generated(opened(shadow_verify=1.0, shadow_dir=tmp_path, shadow_tokens=True))
        kept = sorted(tmp_path.glob("decode-*.pt"))
        assert kept
        assert all(torch.load(one, weights_only=True)["is_repeat"] for one in kept)
        reproduced = [again(opened().executor, one) for one in kept]
        assert any(one.mismatch is not None and one.mismatch.is_repeat for one in reproduced), list(
            map(str, reproduced)
        )
    found = again(opened().executor, kept[0])
    assert found.mismatch is None
    assert "(it was a repeat, of buffers that may have been overwritten" in str(found)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("place", ["read", "run_eagerly", "parts"])
def test_a_check_without_memory_harms_nobody_and_is_said(
    place: str, error: type[Exception], right: list[list[int]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    llm = opened(shadow_verify=1.0)
    owner: Any = {"read": shadow.StatePart, "run_eagerly": shadow, "parts": Runner}[place]
    usual, count, every = getattr(owner, place), 0, 101 if place == "read" else 7

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count % every == 3:
            raise error("planted")
        return usual(*args, **named)

    monkeypatch.setattr(owner, place, failing)
    assert generated(llm) == right
    assert llm.executor.shadow is not None
    assert llm.executor.shadow.num_wrong == 0
    replays = sum(runner.stats.replays.total() for runner in llm.executor.runners.values())
    assert 0 < llm.executor.shadow.num_checked < replays, "what was not checked does not count"
    assert caplog.text.count("there is no memory for a second run") == 1
    assert "one by one" not in caplog.text


@pytest.mark.faults
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_an_eager_run_that_raises_where_the_replay_did_not_is_a_difference(
    share: float, right: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its sequences would be tried one by one, and replays that nobody looks at would serve them."""
    llm, usual, count = opened(shadow_verify=share), shadow.run_eagerly, 0

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise IndexError("index 77 is out of range")
        return usual(*args, **named)

    monkeypatch.setattr(shadow, "run_eagerly", failing)
    assert generated(llm) == right
    assert llm.executor.shadow is not None
    assert llm.executor.shadow.num_wrong == 1
    assert "the eager run raises IndexError" in caplog.text
    assert "77" not in caplog.text, "a message may hold a token"
    assert "one by one" not in caplog.text


@pytest.mark.faults
def test_a_step_that_is_repeated_by_mistake_is_found(right: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    llm = opened(shadow_verify=1.0)
    passes = llm.executor.passes
    passes["decode"] = dataclasses.replace(passes["decode"], is_steady=lambda step: True)
    assert generated(llm) == right
    assert "(a repeat: the last batch was not loaded again)" in caplog.text


def test_as_many_steps_are_repeats_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat, found = Runner.repeat, []
    for share in (0.0, 0.3, 1.0):
        llm, runners = opened(shadow_verify=share), list[Runner]()
        monkeypatch.setattr(Runner, "repeat", lambda runner, seen=runners: (seen.append(runner), repeat(runner))[1])
        generated(llm)
        found.append(len(runners))
    assert found[0] > 0
    assert len(set(found)) == 1, found


@pytest.mark.faults
@pytest.mark.parametrize("at", [6, 9, 14])
def test_a_wrong_replay_fails_nobody_whose_step_raised_before(
    at: int, right: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    llm = opened(shadow_verify=1.0)
    launch, count = llm.executor.launch, 0

    def launched(step: Step) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise RuntimeError("something else")
        return launch(step)

    def fault(executor: Executor, places: Places) -> None:
        if count > at:
            other_tokens(executor, places)

    llm.executor.launch = launched  # type: ignore[method-assign]
    for key in llm.executor.runners["decode"].captured:
        spoil(llm.executor, "decode", fault, kind=(key.size, key.values))
    assert generated(llm) == right
    assert "trying its sequences one by one" in caplog.text
    assert "is computed again" in caplog.text


def test_without_it_the_fault_reaches_the_answers(right: list[list[int]]) -> None:
    llm = opened()
    spoil(llm.executor, "decode", other_tokens)
    assert generated(llm) != right


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_reproducer_reproduces(tmp_path: Path, phase: str, with_tokens: bool) -> None:
    llm = opened(shadow_verify=1.0, shadow_dir=tmp_path / "wrong", shadow_tokens=with_tokens)
    spoil(llm.executor, phase, other_keys, after=1)
    generated(llm)
    (found,) = (tmp_path / "wrong").iterdir()
    content = torch.load(found, weights_only=True)
    assert bool(content["columns"]["last_token"].any()) == with_tokens
    assert all(bool(one.numel()) == with_tokens for one in content["cache"]), "keys of the first layer tell the tokens"
    assert (" for " in content["detail"]) == with_tokens, "and so does one number of them"
    if phase == "prefill":
        assert bool(content["batch"]["tokens"].any()) == with_tokens
    fresh = opened()
    tables = {name: tensor.clone() for name, tensor in fresh.executor.tables._tensors.items()}
    assert again(fresh.executor, found).mismatch is None, "a fresh engine is right"
    content_rows = content["rows"].tolist()
    spoil(fresh.executor, phase, lambda executor, _: other_keys(executor, [(row, 0) for row in content_rows]))
    mismatch = again(fresh.executor, found).mismatch
    assert mismatch is not None
    assert "differs by up to" in mismatch.detail
    for name, before in tables.items():
        assert torch.equal(fresh.executor.tables[name][1:], before[1:]), name


@pytest.mark.faults
def test_a_folder_holds_eight_files(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.pt").touch()
    llm = opened(shadow_verify=1.0, shadow_dir=tmp_path)
    spoil(llm.executor, "decode", other_keys)
    generated(llm)
    assert len(list(tmp_path.iterdir())) == 8


def test_what_is_no_reproducer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"no")
    for path in (tmp_path / "x.pt", tmp_path / "missing.pt"):
        with pytest.raises(CheckpointError, match=path.name):
            again(opened().executor, path)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(PlanError, match="shadow_verify"):
        EngineOptions(shadow_verify=share)


def test_a_folder_without_checks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--shadow-verify"):
        EngineOptions(shadow_dir=tmp_path)


def test_a_folder_that_is_none_is_refused_before_the_first_request(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"shadow_dir: writing to .*file/wrong failed"):
        opened(shadow_verify=0.5, shadow_dir=tmp_path / "file" / "wrong")


def test_the_trial_of_a_folder_leaves_nothing(tmp_path: Path) -> None:
    shadowing_for(EngineOptions(shadow_verify=0.5, shadow_dir=tmp_path / "wrong"))
    assert list((tmp_path / "wrong").iterdir()) == []


def test_it_is_said_where_nothing_can_be_checked(caplog: pytest.LogCaptureFixture) -> None:
    llm = opened("disabled", shadow_verify=0.5)
    assert "nothing is recorded, so --shadow-verify checks no step" in caplog.text
    assert "nothing is recorded, and --shadow-verify checks no step" in llm.checks
    assert llm.checks in llm.explain()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "before the first request a few recordings of each phase; in service no step (no --shadow-verify)"),
        ({"verify": "off"}, "before the first request no recording (--verify off); in service"),
        ({"shadow_verify": 0.001}, "in service 0.001 of the steps that are replays, no reproducers (no --shadow-dir)"),
        ({"shadow_verify": 1.0, "shadow_dir": Path("x")}, "1 of the steps that are replays, reproducers go to x"),
    ],
)
def test_the_checks_in_words(options: dict[str, Any], said: str) -> None:
    assert said in described_checks(EngineOptions(**options), is_recorded=True)


@pytest.mark.faults
def test_the_command_runs_a_reproducer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shape", "tiny", "--device", "emulated", "--max-seqs", "4", "--max-step-tokens", "16", "--max-len", "64"]
    llm = opened(shadow_verify=1.0, shadow_dir=tmp_path, page_size=16)
    spoil(llm.executor, "decode", other_keys)
    generated(llm)
    (found,) = tmp_path.iterdir()
    assert main(["verify", *flags, "--dtype", "float32", "--replay", str(found)]) == 0
    assert f"{found}: replay and eager give the same bits here" in capsys.readouterr().out
