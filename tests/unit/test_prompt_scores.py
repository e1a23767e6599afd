"""Scores of prompts: log-probabilities as `transformers` has them, whatever the chunks, batches and pages are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import reference_model

from phonograph import RequestError
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.completion import Completion
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.step import Sampled
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.graphs.planning.settings import ask

pytest.importorskip("transformers")

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=5, temperature=0.0)
LONG = [(7 * place + place * place) % 251 for place in range(90)]
PROMPTS = [[5, 9, 200, 3], [7], LONG, [11] * 9, LONG[:17], LONG[:40]]
MAX_LEN = 96


def make(device: str = "cpu", backend: str | None = None, **options: Any) -> LLM:
    settings = {"max_seqs": 4, "max_tokens": 32, "max_len": MAX_LEN, "page_size": 8, "dtype": torch.float32, **options}
    asked = [ask(f"{p}.backend", backend, origin="test") for p in ("decode", "prefill")] if backend else []
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=EngineOptions(**settings), asked=asked)


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model(RandomCheckpoint(SHAPES["tiny"]))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def expect_scores(done: Completion, reference: Any, num_top: int = 5) -> None:
    """The scores of a prompt are those of the reference's logits in float32."""
    ids = torch.tensor([done.prompt])
    with torch.inference_mode():
        logprobs = reference(ids).logits[0].float().log_softmax(-1)
    assert len(done.prompt_logprobs) == len(done.prompt) - 1
    for place, one in enumerate(done.prompt_logprobs):
        row, token = logprobs[place], done.prompt[place + 1]
        assert one.token == token
        assert one.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert len(one.top) == num_top
        for alternative, logprob in one.top:
            assert logprob == pytest.approx(row[alternative].item(), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        higher = int((row > row[token] + 1e-4).sum()), int((row > row[token] - 1e-4).sum())
        assert higher[0] + 1 <= one.rank <= higher[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 5},
        {"max_seqs": 1},
        {"page_size": 4},
        {"max_ahead": 0},
        {"max_ahead": 3},
        {"prefix_cache": False},
        {"mixed": False},
        {"cache_tokens": 104},
        {"max_tokens": 96},
        {"speculate": "ngram", "speculate_depth": 3},
    ],
    ids=str,
)
def test_scores_are_those_of_transformers(options: dict[str, Any], reference: Any) -> None:
    llm = make(**options)
    for done in llm.generate(PROMPTS, SCORED):
        assert (done.finish, done.tokens) == (FinishReason.LENGTH, [])
        expect_scores(done, reference)
    llm.core.scheduler.integrity()


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_scores_come_from_graphs_where_there_are_some(backend: str, reference: Any) -> None:
    llm = make("emulated", backend)
    for done in llm.generate(PROMPTS[:4], SCORED):
        expect_scores(done, reference)
    assert sum(runner.stats.eager.total() for runner in llm.executor.runners.values()) == 0


def test_a_cached_prefix_is_computed_anew(llm: LLM, reference: Any) -> None:
    plain = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    (before,) = llm.generate([LONG], plain)
    hits = llm.core.scheduler.counts.prefix_hit_tokens
    for _ in range(2):
        (scored,) = llm.generate([LONG], SCORED)
        expect_scores(scored, reference)
    assert llm.core.scheduler.counts.prefix_hit_tokens == hits
    (after,) = llm.generate([LONG], plain)
    assert after.tokens == before.tokens
    assert llm.core.scheduler.counts.prefix_hit_tokens > hits, "what scoring computed is shared"


def test_scores_and_outputs_together(llm: LLM, reference: Any) -> None:
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
    wanted = [(done.tokens, done.logprobs) for done in llm.generate(PROMPTS, plain)]
    both = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=5)
    found = llm.generate(PROMPTS, both)
    for done, (tokens, logprobs) in zip(found, wanted, strict=True):
        expect_scores(done, reference)
        assert done.tokens == tokens
        assert [one.logprob for one in done.logprobs] == pytest.approx([one.logprob for one in logprobs], abs=1e-4)


def test_scores_are_whole_after_a_preemption(reference: Any) -> None:
    params = SamplingParams(max_tokens=140, temperature=0.0, ignore_eos=True, prompt_logprobs=5)
    llm = make(max_len=160, cache_tokens=200, max_tokens=16)
    found = llm.generate([LONG[:4], LONG[:30], LONG[:20]], params)
    assert llm.core.scheduler.counts.preemptions > 0
    for done in found:
        expect_scores(done, reference)
    again = make(max_len=160).generate([LONG[:4], LONG[:30], LONG[:20]], params)
    assert [done.tokens for done in found] == [done.tokens for done in again]


@pytest.mark.faults
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}])
def test_a_step_that_raises_is_scored_one_by_one(failing: set[int], reference: Any) -> None:
    """The step as a whole raises, and so do those of some of its sequences: the others have all of their scores."""
    llm = make()
    prompts = [[41, 2, 3], [42, 5, 6, 7], [43, 9]]
    runner = llm.executor.runners["prefill"]
    run = runner.run

    def raising(batch: Any) -> Any:
        first = {int(token) for token in batch.tokens if token in (41, 42, 43)}
        if len(first) > 1 or any(41 + place in first for place in failing):
            raise RuntimeError("no")
        return run(batch)

    runner.run = raising  # type: ignore[assignment, method-assign]
    for place, done in enumerate(llm.generate(prompts, SCORED)):
        if place in failing:
            assert done.finish is FinishReason.ERROR
        else:
            expect_scores(done, reference)
    llm.core.scheduler.integrity()


@pytest.mark.parametrize("num_top", [0, 20])
def test_the_ends_of_what_is_reported(num_top: int, llm: LLM, reference: Any) -> None:
    (done,) = llm.generate([LONG[:20]], SamplingParams(max_tokens=0, prompt_logprobs=num_top))
    expect_scores(done, reference, num_top)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [5, 60])
def test_several_choices_share_the_scores(length: int, prefix_cache: bool, reference: Any) -> None:
    llm = make(prefix_cache=prefix_cache)
    params = SamplingParams(max_tokens=3, n=3, temperature=1.0, seed=3, prompt_logprobs=5, ignore_eos=True)
    found = llm.generate([LONG[:length]], params)
    plain = llm.generate([LONG[:length]], SamplingParams(max_tokens=3, n=3, temperature=1.0, seed=3, ignore_eos=True))
    assert [done.tokens for done in found] == [done.tokens for done in plain]
    for done in found:
        expect_scores(done, reference)


def test_the_last_position_of_the_context(llm: LLM, reference: Any) -> None:
    prompt = [(13 * place) % 250 for place in range(MAX_LEN)]
    (done,) = llm.generate([prompt], SCORED)
    expect_scores(done, reference)
    with pytest.raises(RequestError, match=f"has room for {MAX_LEN}\\."):
        llm.generate([[*prompt, 1]], SCORED)
    with pytest.raises(RequestError, match=f"has room for {MAX_LEN - 1} and an output"):
        llm.generate([prompt], SamplingParams(max_tokens=1))


def test_no_tokens_and_no_scores(llm: LLM) -> None:
    done, other = llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=0))
    assert (done.tokens, done.text, done.finish, done.prompt_logprobs) == ([], "", FinishReason.LENGTH, [])
    assert other.finish is FinishReason.LENGTH
    llm.core.scheduler.integrity()
    assert llm.core.is_idle


def test_equally_likely_tokens_come_lowest_first(reference: Any) -> None:
    llm = make()
    head = llm.executor.model.weights.head.data  # type: ignore[attr-defined]
    with torch.inference_mode():
        head[40] = head[80]
        head[120] = head[80]
    (done,) = llm.generate([[3, 40, 80, 120, 5]], SamplingParams(max_tokens=0, prompt_logprobs=20))
    for one in done.prompt_logprobs:
        values = [(-logprob, token) for token, logprob in one.top]
        assert values == sorted(values)
    scores = {one.token: one for one in done.prompt_logprobs[:3]}
    assert {40, 80, 120} == scores.keys()
    (first,) = llm.generate([[3, 40]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert first.prompt_logprobs[0].rank >= 3, "its equals count"


def test_logits_that_are_none_fail_the_request() -> None:
    llm = make()
    with torch.inference_mode():
        llm.executor.model.weights.norm.weight[0] = float("nan")  # type: ignore[attr-defined]
    (done,) = llm.generate([[1, 2, 3]], SCORED)
    assert done.finish is FinishReason.ERROR
    assert "not finite at position 1" in done.error


def test_a_step_holds_as_many_scored_tokens_as_there_are_places() -> None:
    limits = Limits(max_seqs=4, max_tokens=512, max_len=1024, page_size=8, num_pages=600)
    scheduler = Scheduler(limits)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    plain = SamplingParams(max_tokens=4)
    for number in range(3):
        scheduler.add(Request(f"scored {number}", tuple(range(200)), params))
    scheduler.add(Request("plain", tuple(range(300, 500)), plain))
    scored, most = 0, 0
    while not scheduler.is_idle:
        step = scheduler.schedule()
        if step is None:
            break
        targets = sum(len(chunk.targets) for chunk in step.prefills)
        assert targets + len(step.sampling) <= limits.num_places
        most, scored = max(most, targets), scored + targets
        details = [(0.0, [1], [0.0], 1)] * targets
        scheduler.commit(step, Sampled([1] * len(step.sampling), scores=details))
        scheduler.integrity()
    assert scored == 3 * 199
    assert most >= limits.scored_places


def test_scores_that_are_missing_fail_by_name() -> None:
    llm = make()
    core = llm.core
    collect = core.executor.collect

    def without(launched: Any) -> Sampled:
        found = collect(launched)
        return Sampled(found.tokens, found.counts, found.logprobs)

    core.executor.collect = without  # type: ignore[method-assign]
    (done,) = llm.generate([[1, 2, 3]], SCORED)
    assert done.finish is FinishReason.ERROR
    assert "were not scored" in done.error
