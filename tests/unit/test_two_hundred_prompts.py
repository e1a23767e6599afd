"""Two hundred prompts, every drafter and every backend: first and second turns say what plain decoding says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_head import write_random_head

from drafted import DRAWN, GREEDY, PENALISED
from phonograph import SamplingParams
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.checkpoints.mtp import MtpCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.draft_head import DraftHead
from phonograph.engine.models.mtp import MtpModules
from phonograph.engine.passes.drafting import Drafting
from phonograph.engine.passes.eagle import eagle
from phonograph.engine.passes.mtp import mtp
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.ngram_eagle import ngram_eagle
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence as Seq
from random_modules import written
from speculation import MAX_LEN, Tokens, check, plain_llm, speculating

pytestmark = pytest.mark.slow

TARGET, DEPTH, NEW_TOKENS = SHAPES["tiny"], 3, 9
EVERY = (
    GREEDY,
    DRAWN,
    PENALISED,
    replace(GREEDY, frequency_penalty=0.7, logprobs=2),
    replace(DRAWN, seed=9, min_p=0.1),
)
DRAFTERS: dict[str, Callable[[DraftHead, MtpModules], Drafting]] = {
    "ngram": lambda head, modules: ngram(DEPTH),
    "eagle": lambda head, modules: eagle(head, DEPTH),
    "ngram+eagle": lambda head, modules: ngram_eagle(head, DEPTH),
    "mtp": lambda head, modules: mtp(modules, DEPTH),
}


def prompts() -> list[Tokens]:
    """Of every length up to 40, every third of few different tokens, so that something can be looked up."""
    numbers = random.Random(5)
    return [
        tuple(numbers.randrange(3, 8 if place % 3 == 0 else TARGET.vocab) for _ in range(1 + place % 40))
        for place in range(200)
    ]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    folder: Path = tmp_path_factory.mktemp("head")
    write_random_head(folder, TARGET, 100, torch.float32)
    return DraftCheckpoint.open(folder, TARGET).load(drafted_for(plain_llm().executor.model), MAX_LEN + 16)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> MtpModules:
    folder: Path = tmp_path_factory.mktemp("modules")
    model = drafted_for(plain_llm().executor.model)
    return MtpCheckpoint.open(written(folder), TARGET).load(model, MAX_LEN + 16, DEPTH)


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise", "disabled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_said_is_what_plain_decoding_says(
    name: str, backend: str, head: DraftHead, modules: MtpModules
) -> None:
    core = speculating(DRAFTERS[name](head, modules), backend, max_seqs=16, max_tokens=96, num_pages=200)
    turns = [
        (prompt, replace(EVERY[place % len(EVERY)], max_tokens=NEW_TOKENS)) for place, prompt in enumerate(prompts())
    ]

    def said(requests: Sequence[tuple[Tokens, SamplingParams]]) -> list[Seq]:
        found = [one for number, asked in enumerate(requests) for one in core.add(Request(f"{number}", *asked))]
        while not core.is_idle:
            core.step()
        return found

    for start in range(0, 200, 40):  # second turns come while the pages of the first are cached
        first = said(turns[start : start + 40])
        check(first)
        hits = core.scheduler.counts.prefix_hit_tokens
        check(said([((*one.request.prompt, *one.outputs, 9, 8), one.request.params) for one in first[-8:]]))
        assert core.scheduler.counts.prefix_hit_tokens > hits
    assert core.speculation.counts.rounds > 0
    if backend != "disabled":
        assert all(runner.stats.eager.total() == 0 for runner in core.executor.runners.values())
