"""Embeddings: hidden states of prompts, pooled by a pass of their own, against transformers and against eager."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from phonograph import LLM, EngineOptions, RequestError, SamplingParams, verify
from phonograph.cli.flags import add_engine_flags, arguments_from
from phonograph.cli.main import main
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.embed import sum_spans
from phonograph.engine.passes.registry import EMBED, StepPasses
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Sampled
from phonograph.engine.requests.vectors import normalized
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.errors import PhonographError, PlanError
from phonograph.graphs.phases.decisions import Replay
from phonograph.graphs.planning.settings import ask
from server import tiny

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [9], list(range(1, 38)), [40, 41, 42, 43, 44, 45, 46, 47]]
NOTHING = SamplingParams(max_tokens=0)
"""A request that is pooled generates nothing."""
SIZES: dict[str, Any] = {"max_seqs": 4, "max_tokens": 16, "page_size": 8, "dtype": torch.float32, "max_len": 64}


def engine(device: str = "emulated", **options: Any) -> LLM:
    asked = [ask(f"{phase}.backend", value, origin="test") for phase, value in options.pop("backends", {}).items()]
    asked += [ask(name, value, origin="test") for name, value in options.pop("asked", {}).items()]
    found = EngineOptions(**(SIZES | {"embeddings": True} | options))
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=found, asked=asked)


@pytest.fixture(scope="module")
def recorded() -> LLM:
    return engine()


@pytest.fixture(scope="module")
def eager() -> LLM:
    return engine(backends={"embed": "disabled", "prefill": "disabled", "decode": "disabled"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tiny.write(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    return found


def replays(llm: LLM) -> int:
    return sum(llm.executor.runners[EMBED.name].stats.replays.values())


# -- what it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["native", "hf"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_it_is_the_last_hidden_state_of_transformers_pooled(folder: Path, pooling: Any, implementation: Any) -> None:
    options = EngineOptions(**SIZES, embeddings=True, model_impl=implementation)
    found = LLM(folder, device="cpu", options=options).embed(PROMPTS, pooling, normalize=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.eval()
    for prompt, vector in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        expected = states.mean(0) if pooling == "mean" else states[-1]
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, expected.numpy(), atol=2e-5, rtol=1e-4)


def test_texts_are_encoded_as_prompts_are(folder: Path) -> None:
    llm = LLM(folder, device="cpu", options=EngineOptions(**SIZES, embeddings=True))
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(text) for text in ("one", "another text")]
    assert np.array_equal(llm.embed(["one", "another text"]), llm.embed(ids))
    assert np.array_equal(llm.embed("one")[0], llm.embed(ids)[0])


def test_vectors_have_length_1_unless_they_are_left_as_they_are(eager: LLM) -> None:
    plain, unit = eager.embed(PROMPTS, normalize=False), eager.embed(PROMPTS)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-6)
    zeros = np.zeros(4, dtype=np.float32)
    assert np.array_equal(normalized(zeros), zeros)


def test_no_prompts_have_no_vectors(eager: LLM) -> None:
    assert eager.embed([]).shape == (0, SHAPES["tiny"].hidden)


# -- graphs ---------------------------------------------------------------------------------------------------------


FULL = [[[3, 4, 5], [9], list(range(1, 13))], [[(7 * place) % 90 for place in range(48)]]]
"""Calls whose steps have 16 tokens each: no padding, so that products have the same sizes with graphs and without."""


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_replay_gives_what_eager_gives_bit_by_bit(eager: LLM, backend: str, pooling: Any) -> None:
    llm = engine(backends={"embed": backend}, attention="reference")
    for prompts in FULL:
        found, expected = (one.embed(prompts, pooling, normalize=False) for one in (llm, eager))
        # The eager attention goes sequence by sequence, as it does in gaps, and that of one whole graph by rows: in
        # `full`, bits are compared on the same view (the test below, and verify).
        assert np.array_equal(found, expected) if backend == "breakable" else np.allclose(found, expected, atol=1e-6)
    assert replays(llm) == (4 if pooling == "mean" else 2), "of a last token, the chunks before are plain prefills"
    assert isinstance(llm.executor.runners[EMBED.name].last, Replay)
    # Padded, they are as near as products of another size are.
    found, expected = (one.embed(PROMPTS, pooling, normalize=False) for one in (llm, eager))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_compiled_pieces_give_the_same(eager: LLM) -> None:
    llm = engine(
        backends={"embed": "tc_piecewise"}, asked={"tc_compiler": "eager", "embed.buckets": (8, 16)}, verify="all"
    )
    found = llm.embed(PROMPTS, normalize=False)
    np.testing.assert_allclose(found, eager.embed(PROMPTS, normalize=False), atol=1e-5)
    assert replays(llm)


def test_half_precision_is_near(eager: LLM) -> None:
    on = engine(dtype=torch.float16)
    off = engine(dtype=torch.float16, backends={"embed": "disabled"})
    for pooling in ("mean", "last"):
        vectors = on.embed(PROMPTS, pooling)
        np.testing.assert_allclose(vectors, off.embed(PROMPTS, pooling), atol=1e-2)
        np.testing.assert_allclose(vectors, eager.embed(PROMPTS, pooling), atol=1e-2)


def test_padding_never_leaks(recorded: LLM) -> None:
    """Every check of verify, on every recording: poison in padding, the same view, without padding, state."""
    report = verify(recorded.executor.runners[EMBED.name])
    assert report.ok, str(report)


def test_it_is_shown_as_other_passes_are(recorded: LLM) -> None:
    told = recorded.explain()
    assert "embed" in recorded.executor.coverage
    assert "embed.backend" in told
    recorded.executor.refuse_gaps()


def test_each_replay_is_what_eager_gives_on_the_same_padded_batch(eager: LLM) -> None:
    """Bit by bit: so the shadow compares them."""
    llm = engine(shadow_verify=1.0)
    found = llm.embed(PROMPTS, normalize=False)
    np.testing.assert_allclose(found, eager.embed(PROMPTS, normalize=False), atol=1e-6)
    assert llm.executor.shadow is not None
    assert llm.executor.shadow.num_checked
    assert not llm.executor.shadow.num_wrong


def test_an_engine_that_embeds_nothing_records_nothing_for_it() -> None:
    llm = engine(embeddings=False)
    assert EMBED.name not in llm.executor.runners
    assert EMBED.name not in llm.plan.phases
    with pytest.raises(RequestError, match=r"--embeddings, or EngineOptions\(embeddings=True\)"):
        llm.embed([[1, 2, 3]])
    assert llm.core.is_idle


# -- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_pool_as_the_whole(recorded: LLM, whole: LLM, length: int, pooling: Any) -> None:
    prompt = [(7 * place) % 90 + 1 for place in range(length)]
    found = recorded.embed([prompt], pooling, normalize=False)
    np.testing.assert_allclose(found, whole.embed([prompt], pooling, normalize=False), atol=1e-5)


@pytest.fixture(scope="module")
def whole() -> LLM:
    """All of a prompt in one step."""
    return engine("cpu", max_tokens=64)


def test_a_prompt_that_does_not_fit_is_refused(recorded: LLM) -> None:
    with pytest.raises(RequestError, match="Shorten the prompt"):
        recorded.embed([[1] * 65])
    with pytest.raises(RequestError, match="the prompt is empty"):
        recorded.embed([[]])
    assert recorded.core.is_idle


@pytest.mark.parametrize("wrong", ["max", "", None, 3])
def test_another_pooling_is_refused(recorded: LLM, wrong: Any) -> None:
    if wrong is None:
        with pytest.raises(RequestError, match="n, of a request that is pooled"):
            Request("a", (1,), SamplingParams(n=2, max_tokens=0), pooling="mean")
        with pytest.raises(RequestError, match="max_tokens, of a request that is pooled"):
            Request("a", (1,), SamplingParams(max_tokens=3), pooling="mean")
        return
    with pytest.raises(RequestError, match="pooling is 'mean' or 'last'"):
        recorded.embed([[1, 2]], wrong)


def test_spans_are_summed_each_alone() -> None:
    states = torch.arange(24, dtype=torch.float32).view(8, 3)
    states[5] = float("nan")
    starts, stops = torch.tensor([1, 3, 6, 0]), torch.tensor([3, 4, 8, 0])
    expected = torch.stack([states[1:3].sum(0), states[3], states[6:8].sum(0), torch.zeros(3)])
    assert torch.equal(sum_spans(states, starts, stops), expected)
    assert sum_spans(states.half(), starts, stops).dtype == torch.float32
    assert sum_spans(states, starts[:0], stops[:0]).shape == (0, 3)


# -- beside others --------------------------------------------------------------------------------------------------


def run_beside(llm: LLM, generating: list[list[int]], embedded: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """Tokens and vectors of requests that share steps, added in turn."""
    core = llm.core
    params, kept = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), list[tuple[Sequence, bool]]()
    for place in range(max(len(generating), len(embedded))):
        if place < len(generating):
            kept += [(one, False) for one in core.add(Request(f"g{place}", tuple(generating[place]), params))]
        if place < len(embedded):
            pooling: Any = ("mean", "last")[place % 2]
            kept += [
                (one, True) for one in core.add(Request(f"e{place}", tuple(embedded[place]), NOTHING, pooling=pooling))
            ]
        core.step()
    while not core.is_idle:
        core.step()
        core.scheduler.integrity()
    assert all(one.error == "" for one, _ in kept)
    return [one.outputs for one, pools in kept if not pools], [one.embedding for one, pools in kept if pools]


def test_generating_requests_beside_change_nothing(recorded: LLM) -> None:
    generating, embedded = [[3, 4, 5], [8, 9], [1] * 20], [*PROMPTS, [50] * 25, [2, 3]]
    tokens, vectors = run_beside(recorded, generating, embedded)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert tokens == [one.tokens for one in recorded.generate(generating, params)]
    for place, (prompt, vector) in enumerate(zip(embedded, vectors, strict=True)):
        alone = recorded.embed([prompt], ("mean", "last")[place % 2], normalize=False)[0]
        np.testing.assert_allclose(vector, alone, atol=1e-5)


def test_without_mixed_steps() -> None:
    llm = engine(mixed=False)
    tokens, vectors = run_beside(llm, [[3, 4, 5], [8, 9]], PROMPTS)
    assert all(len(one) == 12 for one in tokens)
    assert all(vector is not None for vector in vectors)


def test_pages_are_held_while_it_runs_and_not_shared(recorded: LLM) -> None:
    prompt = [17] * 40
    cached = recorded.core.scheduler.counts.cached_pages
    first = recorded.embed([prompt], normalize=False)
    assert recorded.core.scheduler.counts.cached_pages == cached
    recorded.generate([prompt], SamplingParams(max_tokens=2, temperature=0.0))
    counts = recorded.core.scheduler.counts
    assert counts.cached_pages > cached
    assert np.array_equal(recorded.embed([prompt], normalize=False), first), "hidden states are not in the prefix cache"
    assert recorded.core.scheduler.counts.prefix_hit_tokens == counts.prefix_hit_tokens
    assert recorded.core.scheduler.counts.prefix_lookup_tokens == counts.prefix_lookup_tokens
    recorded.core.scheduler.integrity()


def test_more_prompts_than_rows(recorded: LLM) -> None:
    prompts = [[(place * 3 + other) % 90 + 1 for other in range(place % 11 + 1)] for place in range(60)]
    together = recorded.embed(prompts, normalize=False)
    for place in (0, 7, 31, 59):
        alone = recorded.embed([prompts[place]], normalize=False)[0]
        np.testing.assert_allclose(together[place], alone, atol=1e-5)
    recorded.core.scheduler.integrity()


def test_a_preempted_prompt_is_pooled_anew() -> None:
    """Decodes take the pages of a prompt that is half computed."""
    llm = engine("cpu", cache_tokens=64, max_len=64)
    expected = engine("cpu").embed([[30] * 44], normalize=False)[0]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    core = llm.core
    core.add(Request("g", (1, 2, 3), params, priority=1))
    core.step()
    (pooled,) = core.add(Request("e", (30,) * 44, NOTHING, pooling="mean"))
    while not core.is_idle:
        core.step()
        core.scheduler.integrity()
    assert pooled.finish is FinishReason.LENGTH
    assert pooled.embedding is not None
    np.testing.assert_allclose(pooled.embedding, expected, atol=1e-5)


# -- what goes wrong ------------------------------------------------------------------------------------------------


class FailsOnce:
    """An executor whose next launches of several sequences raise, as one that runs out of memory."""

    def __init__(self, inner: Executor, culprit: int) -> None:
        self._inner = inner
        self._culprit = culprit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, step: Any) -> Any:
        chunks = step.prefills
        if step.pass_name == EMBED.name and (
            len(chunks) > 1 or any(chunk.tokens[0] == self._culprit for chunk in chunks)
        ):
            self._inner.launch(step)
            raise RuntimeError("no memory")
        return self._inner.launch(step)


@pytest.mark.faults
def test_a_step_that_raises_costs_the_culprit_alone() -> None:
    llm = engine("cpu")
    core = EngineCore(llm.core.scheduler, FailsOnce(llm.executor, culprit=66))
    good = [
        core.add(Request(f"e{place}", tuple(prompt), NOTHING, pooling="mean"))[0]
        for place, prompt in enumerate(PROMPTS)
    ]
    (bad,) = core.add(Request("bad", (66, 67), NOTHING, pooling="mean"))
    while not core.is_idle:
        core.step()
    core.scheduler.integrity()
    assert bad.finish is FinishReason.ERROR
    assert "no memory" in bad.error
    expected = engine("cpu").embed(PROMPTS, normalize=False)
    vectors = [one.embedding for one in good if one.embedding is not None]
    np.testing.assert_allclose(np.stack(vectors), expected, atol=1e-5)


def test_states_that_are_not_finite_fail_by_name() -> None:
    llm = engine("cpu")
    llm.executor.model.weights.embedding[77].fill_(float("nan"))  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="hidden states are not finite"):
        llm.embed([[5, 6], [76, 77], [7]])
    assert llm.core.is_idle
    assert np.isfinite(llm.embed([[5, 6], [7]])).all()


def test_a_step_that_brings_no_sums_is_refused() -> None:
    limits = Limits(max_seqs=2, max_tokens=16, max_len=32, page_size=8, num_pages=9)
    scheduler = Scheduler(limits, passes=StepPasses(embeds=EMBED.name))
    scheduler.add(Request("a", (1, 2, 3), NOTHING, pooling="mean"))
    step = scheduler.schedule()
    assert step is not None
    assert step.pass_name == EMBED.name
    assert step.sampling == ()
    with pytest.raises(PhonographError, match="found 0 sums of hidden states, expected 1"):
        scheduler.commit(step, Sampled([]))


# -- flags ----------------------------------------------------------------------------------------------------------


def parsed(*argv: str) -> EngineArguments:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    return arguments_from(parser.parse_args(["--shape", "tiny", *argv]))


def test_the_flag_brings_the_pass_and_its_flags() -> None:
    arguments = parsed("--embeddings", "--embed-graph-backend", "full", "--graphs", "on")
    assert arguments.options.embeddings
    assert [one.setting for one in arguments.asked.asks if one.setting.startswith(EMBED.name)] == ["embed.backend"]
    everywhere = parsed("--embeddings", "--graph-backend", "disabled").asked.asks
    assert {one.setting for one in everywhere} >= {"embed.backend", "prefill.backend"}


def test_without_it_flags_of_the_pass_are_refused() -> None:
    assert not parsed("--graph-backend", "disabled").options.embeddings
    with pytest.raises(
        PlanError, match="--embed-graph-buckets: this engine has no phase 'embed', since embeddings are off"
    ):
        parsed("--embed-graph-buckets", "8,16")
    with pytest.raises(PlanError, match="this engine has no phase 'embed', since embeddings are off"):
        parsed("--graph-backend", '{"embed": "full"}')


def test_explain_shows_the_phase(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, shown in (((), False), (("--embeddings",), True)):
        assert main(["explain", "--shape", "tiny", "--device", "emulated", *flags]) == 0
        assert ("embed.backend" in capsys.readouterr().out) is shown
