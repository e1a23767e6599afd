"""ngram+eagle: who drafts for a row, what both take in, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_head import write_random_head

from phonograph import LLM, CheckpointError, EngineOptions, PlanError, SamplingParams, verify
from phonograph.engine import checkpoints
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.speculation import choose_drafter
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.draft_head import DraftHead
from phonograph.engine.ops.layers.rounds import continued
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafter, ReadsTarget
from phonograph.engine.passes.eagle import EagleDrafter, eagle
from phonograph.engine.passes.ngram import NgramDrafter
from phonograph.engine.passes.ngram_eagle import CombinedDrafter, ngram_eagle
from phonograph.engine.requests.request import Request
from phonograph.engine.scheduling.step_width import Planned
from speculation import MAX_LEN, Driver, Says, Tokens, check, plain_llm, speculating

pytestmark = pytest.mark.slow

TARGET = SHAPES["tiny"]
DEPTH = 3
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_k=20, top_p=0.9, seed=3, ignore_eos=True)
PENALISED = replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=3)
PROMPTS = [(5, 9, 200, 3), (7,), tuple(range(20, 61)), (11,) * 9, tuple(range(100, 117)), (1, 2, 1, 2, 1)]
REQUESTS = [(prompt, (GREEDY, DRAWN, PENALISED)[number % 3]) for number, prompt in enumerate(PROMPTS * 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("head")
    write_random_head(found, TARGET, 100, torch.float32)
    return found


@pytest.fixture(scope="module")
def head(folder: Path) -> DraftHead:
    return DraftCheckpoint.open(folder, TARGET).load(drafted_for(plain_llm().executor.model), MAX_LEN + 16)


# -- who drafts -----------------------------------------------------------------------------------------------


def looked_up(known: Tokens) -> list[int]:
    """What came after the same tokens before, or nothing but -1."""
    found: list[int] = continued(torch.tensor([known]), torch.tensor([len(known) - 1]), DEPTH)[0].tolist()
    return found


class InTurn:
    """Two plain steps, then a round, and so on; or rounds alone."""

    def __init__(self, *, plain: bool) -> None:
        self.plain, self.calls, self.most = plain, 0, DEPTH + 1

    def of(self, decodes: Any, chunks: Any = ()) -> Planned:
        self.calls += 1
        return Planned(1 if self.plain and self.calls % 3 else self.most)

    def took(self, step: Any, updates: Any, probed: Any) -> None:
        self.drafts = step.tokens_per_row > 1


def drafts(core: EngineCore[Executor], *, plain: bool = False) -> Iterator[tuple[Tokens, list[int]]]:
    """All tokens of a row, and what is drafted after them, after each round of each row."""
    width = core.scheduler.width = InTurn(plain=plain)
    waiting = [Request(f"{number}", *one) for number, one in enumerate(REQUESTS)]
    column = core.executor.tables["draft"].view(-1, DEPTH)
    while waiting or not core.is_idle:
        if waiting:
            core.add(waiting.pop(0))
        for sequence, tokens, finish in core.step():
            if tokens and finish is None and width.drafts:
                yield tuple(sequence.known()), column[sequence.row].tolist()


@pytest.mark.parametrize("plain", [False, True])
def test_rows_whose_tokens_came_before_have_looked_up_drafts_and_the_others_the_head_s(
    head: DraftHead, *, plain: bool
) -> None:
    """In the same steps, whoever drafted for a row before, and with plain steps between rounds."""
    changes: dict[str, Any] = {"max_ahead": 0, "prefix_cache": False, "chunk": 7}
    by_head = dict(drafts(speculating(eagle(head, DEPTH), "disabled", **changes)))
    seen = {"looked up": 0, "head": 0, "turns": 0}
    last: dict[Tokens, str] = {}
    for known, found in drafts(speculating(ngram_eagle(head, DEPTH), "disabled", **changes), plain=plain):
        wanted = looked_up(known)
        who = "looked up" if wanted[0] >= 0 else "head"
        if who == "head" and known not in by_head:
            continue  # the head alone had several tokens accepted here at once
        assert found == (wanted if who == "looked up" else by_head[known])
        assert wanted != by_head.get(known), "the two differ, or this shows nothing"
        seen[who] += 1
        prompt = next(prompt for prompt, _ in REQUESTS[::-1] if known[: len(prompt)] == prompt)
        seen["turns"] += last.get(prompt, who) != who
        last[prompt] = who
    assert min(seen.values()) > 5, seen


# -- the output -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled", "tc_piecewise"])
def test_output_is_that_of_plain_decoding(head: DraftHead, backend: str) -> None:
    core = speculating(ngram_eagle(head, DEPTH), backend)
    driver = Driver(core)
    check(driver.run(REQUESTS))
    check(driver.run(REQUESTS[::-1]))
    assert core.speculation.counts.accepted[0] > 0
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())


@pytest.mark.parametrize("depth", [1, 5])
def test_a_scarce_cache_and_all_of_the_context(head: DraftHead, depth: int) -> None:
    core = speculating(ngram_eagle(head, depth), "disabled", num_pages=16, reserve_tokens=0, max_ahead=3)
    long = tuple(range(30, 30 + MAX_LEN - 20))
    check(Driver(core, every=1).run([*REQUESTS, (long, replace(GREEDY, max_tokens=40))]))
    assert core.scheduler.counts.preemptions > 0


def test_the_recordings_are_right(head: DraftHead) -> None:
    core = speculating(ngram_eagle(head, 2))
    for runner in core.executor.runners.values():
        assert verify(runner, batches=1).ok


class Lost(EagleDrafter):
    """A head that fails after it has taken in the round."""

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        self.keep_up(accepted)
        raise ValueError("no idea")


def raises(accepted: Accepted) -> torch.Tensor:
    raise ValueError("no idea")


FAILING: dict[str, Callable[[PassParts, DraftHead], tuple[Drafter, ReadsTarget]]] = {
    "lookup": lambda parts, head: (Says(raises), EagleDrafter(parts, head)),
    "head": lambda parts, head: (NgramDrafter(parts), Lost(parts, head)),
}


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["full", "disabled"])
@pytest.mark.parametrize("name", FAILING)
def test_where_one_of_the_two_fails_nothing_is_drafted(head: DraftHead, name: str, backend: str) -> None:
    made = ngram_eagle(head, DEPTH)
    core = speculating(replace(made, make=lambda parts: CombinedDrafter(parts, *FAILING[name](parts, head))), backend)
    check(Driver(core).run(REQUESTS[:6]))
    counts = core.speculation.counts
    assert (counts.rounds, sum(counts.drafted)) == (0, 0)
    assert counts.plain["no_draft"] > 0


# -- what is counted ------------------------------------------------------------------------------------------


def test_every_round_has_drafts_and_they_are_counted_by_place(head: DraftHead) -> None:
    """Where lookup alone would have none, the head's are there."""
    core = speculating(ngram_eagle(head, DEPTH), "disabled", max_ahead=0, prefix_cache=False)
    found = Driver(core).run([(tuple(range(3, 9)), replace(GREEDY, max_tokens=DEPTH + 2)), ((1, 2) * 6, GREEDY)])
    check(found)
    counts = core.speculation.counts
    assert counts.plain["no_draft"] == 0
    assert found[0].num_drafted >= DEPTH, "lookup alone finds nothing here"
    assert counts.tokens == sum(len(one.outputs) - 1 for one in found) == counts.rounds + sum(counts.accepted)
    assert sum(counts.drafted) == sum(one.num_drafted for one in found)


# -- who is chosen --------------------------------------------------------------------------------------------


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(
        max_seqs=4, max_tokens=64, max_len=MAX_LEN, page_size=8, dtype=torch.float32, speculate="ngram+eagle", **changes
    )


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_llm_that_drafts_by_both(folder: Path, device: str) -> None:
    llm = LLM(RandomCheckpoint(TARGET), device=device, options=options(draft=folder))
    for params in (GREEDY, DRAWN):
        found = llm.generate(PROMPTS, params)
        assert [one.tokens for one in found] == [one.tokens for one in plain_llm().generate(PROMPTS, params)]
    assert "speculation: ngram+eagle drafts 3 tokens a round" in llm.explain()
    assert llm.drafting is not None
    assert llm.drafting.weights is not None


def test_a_head_that_is_missing_or_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"'speculation-needs-a-head' conflicts with --speculate ngram\+eagle: .* none comes"
    ):
        choose_drafter(options(), RandomCheckpoint(TARGET))
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        choose_drafter(options(draft=tmp_path), RandomCheckpoint(TARGET))
    write_random_head(tmp_path, replace(TARGET, hidden=32), 100, torch.float32)
    with pytest.raises(CheckpointError, match="its hidden size is 32"):
        choose_drafter(options(draft=tmp_path), RandomCheckpoint(TARGET))


def test_the_head_that_comes_with_the_model_is_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = tmp_path / "default.gguf"
    monkeypatch.setattr(checkpoints, "_HEAD", folder)
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: True)
    monkeypatch.setattr(checkpoints, "default_model", lambda: default)
    chosen = choose_drafter(options(), replace(RandomCheckpoint(TARGET), source=str(default)))
    assert str(chosen) == "ngram+eagle"
