"""The engine on a tiny random model: every setting, backend and batch gives the same tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phonograph import Device, DeviceError, EmulatedDevice, PlanError, RequestError, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.executor import Executor, Launched
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.ops.queries import Queries, Span
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.text import TextReader
from phonograph.graphs.planning.settings import ask
from server import tiny

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 200, 3], [7], list(range(20, 61)), [11] * 9, list(range(100, 117))]


def make(device: Device | str = "emulated", backend: str | None = None, **options: Any) -> LLM:
    settings = {"max_seqs": 4, "max_tokens": 32, "max_len": 96, "page_size": 8, "dtype": torch.float32, **options}
    asked = [ask(f"{p}.backend", backend, origin="test") for p in ("decode", "prefill")] if backend else []
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=EngineOptions(**settings), asked=asked)


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = [done.tokens for done in llm.generate(prompts, params)]
    llm.core.scheduler.integrity()
    return found


def alone(device: Device | str) -> list[list[int]]:
    """Each prompt alone, nothing shared, nothing recorded: what everything else must equal."""
    llm = make(device, "disabled", max_seqs=1, max_tokens=64, prefix_cache=False, max_ahead=0)
    return [tokens(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def one_by_one() -> list[list[int]]:
    return alone("cpu")


@pytest.mark.parametrize("backend", ["disabled", "full", "breakable"])
def test_every_backend_gives_the_tokens_of_each_prompt_alone(device: Device, backend: str) -> None:
    llm = make(device, backend)
    assert tokens(llm) == alone(device)
    eager = sum(runner.stats.eager.total() for runner in llm.executor.runners.values())
    assert (eager == 0) == (backend != "disabled")


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5},
        {"max_seqs": 2},
        {"page_size": 4},
        {"max_ahead": 0},
        {"max_ahead": 3},
        {"prefix_cache": False},
        {"mixed": False},
        {"cache_tokens": 104},  # sequences are preempted
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["disabled", "disabled with copies", "full", "breakable"])
def test_every_scheduler_setting_gives_the_same_tokens(
    options: dict[str, Any], backend: str, one_by_one: list[list[int]]
) -> None:
    backend, _, copies = backend.partition(" ")
    llm = make(EmulatedDevice(poison=True), backend, eager_copies=bool(copies), **options)
    assert tokens(llm) == one_by_one


def test_prefix_hits_equal_cold_runs() -> None:
    llm = make("cpu")
    shared = list(range(30, 60))
    cold = tokens(llm, [[*shared, 1], [*shared, 2]])
    warm = tokens(llm, [[*shared, 1], [*shared, 2]])
    assert warm == cold
    assert llm.core.scheduler.counts.prefix_hit_tokens > 0


def test_the_recordings_are_right(device: Device) -> None:
    llm = make(device, "full")
    for runner in llm.executor.runners.values():
        report = verify(runner, batches=1)
        assert report.ok, report


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=4, ignore_eos=True)
    llm = make("cpu")
    alone = tokens(llm, [PROMPTS[0]], params)[0]
    assert tokens(llm, PROMPTS, params)[0] == alone
    other = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    assert tokens(llm, [PROMPTS[0]], other)[0] != alone


def test_sampling_on_graphs_equals_sampling_without() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.3, top_k=50, min_p=0.01, seed=9, ignore_eos=True)
    assert tokens(make("emulated", "full"), PROMPTS, params) == tokens(make("cpu"), PROMPTS, params)


def test_n_completions_differ_and_come_in_order() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=1, n=3, ignore_eos=True)
    done = make("cpu").generate([PROMPTS[0], PROMPTS[1]], params)
    assert [(d.prompt, d.index) for d in done] == [(tuple(p), i) for p in PROMPTS[:2] for i in range(3)]
    assert len({tuple(d.tokens) for d in done[:3]}) == 3


def test_a_prompt_that_is_too_long_is_refused_and_nothing_is_lost(one_by_one: list[list[int]]) -> None:
    llm = make("cpu")
    with pytest.raises(RequestError, match="96"):
        llm.generate([[1, 2], [3] * 200], GREEDY)
    assert tokens(llm) == one_by_one


@pytest.mark.parametrize("backend", ["disabled", "full"])
def test_logprobs_are_those_of_the_raw_logits(device: Device, backend: str) -> None:
    llm = make(device, backend)
    params = SamplingParams(max_tokens=6, temperature=1.2, seed=3, logprobs=3, ignore_eos=True)
    done = llm.generate(PROMPTS[:2], params)
    plain = llm.generate(PROMPTS[:2], replace(params, logprobs=None))
    assert [d.tokens for d in done] == [d.tokens for d in plain]  # to be asked changes no token
    assert not plain[0].logprobs
    for one in done:
        logits = logits_of(llm, (*one.prompt, *one.tokens))[len(one.prompt) - 1 : -1].log_softmax(-1)
        for at, told in enumerate(one.logprobs):
            assert told.token == one.tokens[at]
            assert told.logprob == pytest.approx(logits[at, told.token].item(), abs=1e-3)
            best = logits[at].topk(3)
            assert [token for token, _ in told.top] == best.indices.tolist()
            assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert len(one.logprobs) == 6
    eager = llm.executor.runners["decode"].stats.eager.total()
    assert (eager == 0) == (backend == "full")


def embedding_of(llm: LLM) -> torch.Tensor:
    assert isinstance(llm.executor.model, Decoder)
    return llm.executor.model.weights.embedding


def logits_of(llm: LLM, known: tuple[int, ...]) -> torch.Tensor:
    """Logits of every position, by one pass of the model over pages 1, 2, … of an idle engine."""
    on = llm.device.torch_device
    count, executor = len(known), llm.executor
    table = torch.arange(1, 1 + executor.tables.pages.shape[1], device=on, dtype=torch.int32)
    table = torch.stack([torch.zeros_like(table), table])
    positions = torch.arange(count, device=on)
    queries = Queries(torch.ones_like(positions), positions, table, False, (Span(1, 0, 0, count),))
    with torch.inference_mode():
        hidden = executor.model.hidden(torch.tensor(known, device=on), queries, executor.cache)
        return executor.model.logits(hidden.states)


def test_a_steady_decode_is_one_launch_and_loads_nothing(device: Device) -> None:
    llm = make(device, "full", max_len=256, max_tokens=64)
    decode = llm.executor.runners["decode"]
    llm.generate(PROMPTS[:4], SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True))
    replays, loads = decode.stats.replays.total(), decode.registry.counts.transfers
    assert replays >= 76
    assert loads <= 8 + len(decode.captured) * 8  # warm-ups, and membership changes at the beginning and the end


def test_time_on_the_device_is_told_by_phase_and_path(device: Device) -> None:
    for backend, path in (("full", "replay"), ("disabled", "eager")):
        llm = make(device, backend)
        tokens(llm)
        assert set(llm.executor.timing.seconds) == {("decode", path), ("prefill", path)}
        assert all(0 < seconds < 60 for seconds in llm.executor.timing.seconds.values())


def test_an_idle_pass_touches_nobody(device: Device) -> None:
    llm = make(device, "full")
    llm.core.heartbeat()
    readers = llm._submit([tuple(prompt) for prompt in PROMPTS], GREEDY)
    for _ in llm._run(readers):
        llm.core.heartbeat()
    assert [reader.done.tokens for reader in readers.values()] == alone(device)
    assert llm.executor.runners["idle"].stats.replays.total() > 5


def test_verify_between_two_steps_changes_no_token(device: Device) -> None:
    llm = make(device, "full")
    readers = llm._submit([tuple(prompt) for prompt in PROMPTS], GREEDY)
    for count, _ in enumerate(llm._run(readers)):
        if count == 12:
            for runner in llm.executor.runners.values():
                verify(runner, batches=1).raise_if_failed()
    assert [reader.done.tokens for reader in readers.values()] == alone(device)


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_a_request_can_be_cancelled_at_any_moment(moment: int, one_by_one: list[list[int]]) -> None:
    llm = make("cpu", max_tokens=8, max_seqs=2, max_ahead=2)
    readers = llm._submit([tuple(prompt) for prompt in PROMPTS], GREEDY)
    victim = list(readers)[moment % len(readers)]
    for step in range(2000):
        if step == moment:
            llm.core.cancel(victim.request.id)
        for sequence, new, finish in llm.core.step():
            readers[sequence].take(new, finish)
        if llm.core.is_idle:
            break
    llm.core.scheduler.integrity()
    for index, (sequence, reader) in enumerate(readers.items()):
        if sequence is not victim:
            assert reader.done.tokens == one_by_one[index]


def test_a_request_past_its_deadline_ends_and_gives_its_pages_back(one_by_one: list[list[int]]) -> None:
    llm = make("cpu")
    now = time.monotonic()
    late = Request("late", tuple(PROMPTS[0]), GREEDY, deadline=now - 1, arrival=now)
    fine = Request("fine", tuple(PROMPTS[1]), GREEDY, deadline=now + 600, arrival=now)
    (first,), (second,) = llm.core.add(late), llm.core.add(fine)
    while not llm.core.is_idle:
        llm.core.step()
    assert first.finish is FinishReason.DEADLINE
    assert second.outputs == one_by_one[1]
    llm.core.scheduler.integrity()


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_one_sequence_whose_prompt_takes_many_steps(backend: str) -> None:
    """Steps that sample nothing, from recordings that have a place for one."""
    prompt = list(range(60, 100))
    found = tokens(make(backend=backend, max_seqs=1, max_tokens=16), [prompt])
    assert found == tokens(make("cpu", max_seqs=1, max_tokens=16), [prompt])


def test_exact_sizes_serve_prompts_too() -> None:
    asked = [ask("prefill.exact", True, origin="test"), ask("prefill.buckets", (4, 7, 32), origin="test")]
    options = EngineOptions(max_seqs=4, max_tokens=32, max_len=96, page_size=8, dtype=torch.float32)
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)
    prompts = [[5, 9, 200, 3], list(range(40, 47))]
    assert [tokens(llm, [prompt]) for prompt in prompts] == [tokens(make("cpu"), [prompt]) for prompt in prompts]


def test_a_flat_list_of_token_ids_is_explained() -> None:
    llm, wrong = make("cpu"), list[Any]([[1, 2, 3], 5, None, torch.tensor([1, 2, 3])])
    for prompts in wrong:
        with pytest.raises(
            RequestError, match=r"lists of token ids each, as \[\[1, 2, 3\]\]; found (int|NoneType|Tensor)"
        ):
            llm.generate(prompts)
    ids = [[5, 9, 200, 3]]
    assert tokens(llm, [np.array(ids[0])]) == tokens(llm, ids)  # type: ignore[list-item]


def test_the_context_ends_where_the_kv_cache_does(caplog: pytest.LogCaptureFixture) -> None:
    llm = make("cpu", cache_tokens=64)
    assert (llm.limits.max_len, llm.limits.capacity) == (64, 64)
    assert "the context is 64 tokens, not 96: all that the KV cache holds" in caplog.text
    assert "context: 64 tokens (all that the KV cache holds)" in llm.explain()
    done = llm.generate([[5] * 40], replace(GREEDY, max_tokens=200))[0]
    assert (len(done.tokens), done.finish) == (24, FinishReason.LENGTH)
    with pytest.raises(RequestError, match="a context of 64, all that the KV cache holds, has room for 63"):
        llm.generate([[5] * 64])
    assert "context: 96 tokens\n" in make("cpu").explain()
    assert make("cpu", cache_tokens=1, page_size=1).limits.max_len == 2


@pytest.mark.parametrize("backend", ["disabled", "full"])
@pytest.mark.parametrize("vocab", [1, 5, 20])
def test_no_more_logprobs_are_told_than_there_are_tokens(backend: str, vocab: int) -> None:
    checkpoint = RandomCheckpoint(replace(SHAPES["tiny"], vocab=vocab))
    options = EngineOptions(max_seqs=2, max_tokens=8, max_len=32, page_size=8, dtype=torch.float32)
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    llm = LLM(checkpoint, device="emulated", options=options, asked=asked)
    done = llm.generate([[0, 0]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=20))[0]
    for one in done.logprobs:
        assert sorted(token for token, _ in one.top) == list(range(vocab))
        assert sum(np.exp([logprob for _, logprob in one.top])) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("wrong", [b"abc", bytearray(b"abc"), {5: 1, 3: 2}, {200, 3}, {"prompt": "hi"}, 7])
def test_what_is_no_prompt_is_refused(wrong: Any) -> None:
    llm = make("cpu")
    for call in (lambda: llm.generate([wrong]), lambda: llm.generate(wrong), lambda: list(llm.stream(wrong))):
        with pytest.raises(RequestError, match=rf"found {type(wrong).__name__} where a prompt belongs") as error:
            call()
        assert error.value.field == "prompt"


def test_each_prompt_may_have_parameters_of_its_own() -> None:
    llm = make("cpu")
    asked = [replace(GREEDY, max_tokens=count, n=count) for count in (1, 2)]
    done = llm.generate([[5, 9], [7, 8]], asked)
    assert [one.prompt for one in done] == [(5, 9), (7, 8), (7, 8)]
    assert [one.tokens for one in done] == [
        one.tokens
        for prompt, params in zip([[5, 9], [7, 8]], asked, strict=True)
        for one in llm.generate([prompt], params)
    ]
    with pytest.raises(RequestError, match="found 1 for 2 prompts"):
        llm.generate([[5, 9], [7, 8]], asked[:1])
    wrong: Any
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], 7):
        with pytest.raises(RequestError, match="parameters are SamplingParams"):
            llm.generate([[5, 9]], wrong)
        with pytest.raises(RequestError, match="parameters are SamplingParams"):
            list(llm.stream([5, 9], wrong))


def test_a_stop_string_that_is_a_special_token_stops_there(tmp_path: Path) -> None:
    llm = LLM(tiny.write(tmp_path / "m"), device="cpu", options=EngineOptions(max_seqs=1, max_len=64))
    first, bias = tiny.VOCAB - 2, {tiny.VOCAB - 2: 100.0}
    asked = replace(GREEDY, logit_bias=bias)
    assert llm.generate([[5, 9]], asked)[0].tokens == [first] * 12
    done = llm.generate([[5, 9]], replace(asked, stop=("no", tiny.SPECIAL[0])))[0]
    assert (done.tokens, done.finish, done.text) == ([first], FinishReason.STOP, "")


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="token 999 is not in the vocabulary of 256"):
        make("cpu").generate([[1, 999]], GREEDY)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_a_parameter_with_a_token_outside_the_vocabulary_is_refused(field: str) -> None:
    llm, inside = make("cpu"), penalised(logit_bias={255: 1.0}, stop_token_ids=(255,))
    value: Any = {256: 1.0} if field == "logit_bias" else (3, 256)
    with pytest.raises(RequestError, match=f"token 256 of {field} is not in the vocabulary of 256") as error:
        llm.generate([[1]], replace(inside, **{field: value}))
    assert error.value.field == field
    assert llm.generate([[1]], inside)[0].finish is not FinishReason.ERROR


@pytest.mark.parametrize("wrong", [1.0, True, "1", None, [1], np.float32(1), np.bool_(True), torch.tensor(0.5)])
def test_what_is_no_token_id_is_refused(wrong: Any) -> None:
    llm = make("cpu")
    for call in (lambda: llm.generate([[5, wrong]]), lambda: list(llm.stream([5, wrong]))):
        with pytest.raises(RequestError, match=r"holds whole numbers; found .*\(\w+\)") as error:
            call()
        assert error.value.field == "prompt"


def penalised(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **changes)


def test_penalties_and_bias_do_what_they_say(device: Device) -> None:
    llm = make(device, "full")
    assert tokens(llm, [PROMPTS[0]], penalised(logit_bias={7: 100.0})) == [[7] * 12]
    for changes in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        said = tokens(llm, [PROMPTS[3]], penalised(**changes))[0]
        assert len(set(said)) > len(set(tokens(llm, [PROMPTS[3]])[0])), changes
    said = tokens(llm, [PROMPTS[3]], penalised(repetition_penalty=100.0))[0]
    assert len(set(said)) == 12
    assert not set(said) & set(PROMPTS[3])
    assert llm.executor.runners["decode"].stats.eager.total() == 0  # penalties are recorded too


def test_penalties_of_one_request_are_not_anothers(one_by_one: list[list[int]]) -> None:
    llm = make("cpu")
    alone = tokens(llm, [PROMPTS[3]], penalised(presence_penalty=2.0))[0]
    sequences = {
        **llm._submit([tuple(PROMPTS[3])], penalised(presence_penalty=2.0)),
        **llm._submit([tuple(PROMPTS[0])], GREEDY),
    }
    for _ in llm._run(sequences):
        pass
    assert [reader.done.tokens for reader in sequences.values()] == [alone, one_by_one[0]]
    assert tokens(llm, [PROMPTS[3]])[0] == one_by_one[3]  # the row is neutral again


def test_penalties_survive_preemption() -> None:
    params = penalised(presence_penalty=2.0, repetition_penalty=1.5)
    assert tokens(make("cpu", cache_tokens=104), PROMPTS, params) == tokens(make("cpu"), PROMPTS, params)


@pytest.mark.faults
def test_a_request_that_raises_inside_the_model_fails_alone(one_by_one: list[list[int]]) -> None:
    llm = make("cpu")
    decode = llm.executor.runners["decode"].phase.body

    def poisoned(batch: Any) -> Any:
        if bool((llm.executor.tables.last_token[batch.rows] == victim_token).any()):
            raise ArithmeticError("this one")
        return decode(batch)

    victim_token = one_by_one[1][3]
    assert all(victim_token not in one for i, one in enumerate(one_by_one) if i != 1)
    object.__setattr__(llm.executor.runners["decode"].phase, "body", poisoned)
    done = llm.generate(PROMPTS[:4], GREEDY)
    assert done[1].finish is FinishReason.ERROR
    assert "this one" in done[1].error
    assert [d.tokens for i, d in enumerate(done) if i != 1] == [one_by_one[i] for i in (0, 2, 3)]
    llm.core.scheduler.integrity()


SPOILED = 77
"""A token whose embedding is not finite: it is in one request's prompt and in nobody else's."""
WANTS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True),
    "truncated": SamplingParams(max_tokens=12, temperature=1.0, top_k=20, top_p=0.9, seed=3, ignore_eos=True),
    "detailed": SamplingParams(max_tokens=12, seed=3, repetition_penalty=1.1, logprobs=3, ignore_eos=True),
}


def spoil(llm: LLM, token: int, value: float) -> None:
    with torch.inference_mode():
        embedding_of(llm)[token] = value


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["disabled", "full", "breakable"])
def test_logits_that_are_not_finite_fail_their_own_request_by_name(device: Device, backend: str) -> None:
    """Neighbours say what they would say without it, then and after, in the pages that it has left."""
    sound, broken, victim = make(device, backend), make(device, backend), [*range(30, 50), SPOILED, 3]
    spoil(broken, SPOILED, float("nan"))
    for params in WANTS.values():
        wanted = tokens(sound, PROMPTS[:3], params)
        assert all(SPOILED not in one for one in wanted)
        *others, failed = broken.generate([*PROMPTS[:3], victim], params)
        assert (failed.finish, failed.tokens) == (FinishReason.ERROR, [])
        assert "logits are not finite at position 22" in failed.error
        assert [done.tokens for done in others] == wanted
        broken.core.scheduler.integrity()
    alike = [victim[:20], victim[:9]]
    assert tokens(broken, alike) == tokens(sound, alike)


@pytest.mark.parametrize("max_ahead", [0, 1, 3])
def test_a_decode_that_overflows_fails_where_it_does_and_its_tokens_stand(max_ahead: int) -> None:
    llm = make("cpu", "disabled", max_ahead=max_ahead)
    said = tokens(llm, PROMPTS[:2])
    where = next(i for i, token in enumerate(said[0]) if token not in said[1] and token not in said[0][:i])
    spoil(llm, said[0][where], float("inf"))
    failed, other = llm.generate(PROMPTS[:2], GREEDY)
    assert failed.tokens == said[0][: where + 1]
    assert f"not finite at position {len(PROMPTS[0]) + where + 1}" in failed.error
    assert other.tokens == said[1]
    assert llm.core.scheduler.counts.generated_tokens == 24 + 12 + where + 1


class NothingAllowed:
    """A grammar that has come to a dead end."""

    def mask(self) -> Any:
        return np.zeros(8, dtype=np.int32)

    def accept(self, token: int) -> None:
        raise AssertionError("no token can be there")


@pytest.mark.parametrize("backend", ["disabled", "full"])
def test_a_grammar_that_allows_nothing_fails_its_own_request_by_name(backend: str, one_by_one: list[list[int]]) -> None:
    llm = make("emulated", backend)
    readers = llm._submit([tuple(PROMPTS[0]), tuple(PROMPTS[1])], GREEDY)
    stuck = next(iter(readers))
    stuck.constraint = NothingAllowed()
    for _ in llm._run(readers):
        pass
    failed, other = (reader.done for reader in readers.values())
    assert failed.finish is FinishReason.ERROR
    assert "no token is allowed at position 4" in failed.error
    assert other.tokens == one_by_one[1]


def test_the_least_and_the_greatest_penalty_fail_nobody(caplog: pytest.LogCaptureFixture) -> None:
    llm = make("cpu")
    for penalty in (2.0**-126, 1e-30, 1e30, 3.4e38):
        done = llm.generate(PROMPTS[:3], replace(GREEDY, repetition_penalty=penalty, frequency_penalty=2.0))
        assert [one.finish for one in done] == [FinishReason.LENGTH] * 3
    assert not caplog.records


def test_what_one_seed_draws_second_no_other_draws_first() -> None:
    llm = make("cpu")
    params = SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)
    first = {seed: tokens(llm, PROMPTS[:1], replace(params, seed=seed))[0] for seed in range(12)}
    three = tokens(llm, PROMPTS[:1], replace(params, seed=7, n=3))
    assert three[0] == first[7]
    assert not {tuple(one) for one in three[1:]} & {tuple(one) for one in first.values()}
    assert three == tokens(make("cpu"), PROMPTS[:1], replace(params, seed=7, n=3))
    assert first[0] != tokens(llm, PROMPTS[:1], replace(params, seed=1 << 62))[0]


def test_a_reader_that_stops_listening_gives_its_pages_back() -> None:
    llm = make("cpu")
    stream = llm._run(llm._submit([tuple(PROMPTS[2])], GREEDY))
    next(stream)
    stream.close()
    assert llm.core.is_idle
    llm.core.scheduler.integrity()


def test_a_pass_for_nobody_needs_no_graph_where_others_do() -> None:
    asked = [ask("graphs", "strict", origin="test"), ask("idle.backend", "disabled", origin="test")]
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=32, page_size=8, dtype=torch.float32)
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)
    llm.core.heartbeat()
    assert llm.executor.runners["idle"].stats.eager.total() == 1


def test_an_interrupt_ends_what_ran_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, launch = make("cpu"), Executor.launch
    wanted = tokens(llm)

    def interrupted(executor: Executor, step: Step) -> Launched:
        steps.append(step)
        if len(steps) > 3:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return launch(executor, step)

    steps: list[Step] = []
    monkeypatch.setattr(Executor, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert llm.core.is_idle
    assert tokens(llm) == wanted


@pytest.mark.parametrize("place", ["after the core took the request", "while its reader is made", "before the run"])
def test_an_interrupt_while_requests_are_submitted_leaves_none(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    llm = make("cpu")
    wanted, calls = tokens(llm), list[object]()
    owner, name, nth = {
        "after the core took the request": (Scheduler, "add", 3),
        "while its reader is made": (TextReader, "__init__", 4),
        "before the run": (LLM, "_submit", 1),
    }[place]
    original = getattr(owner, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        done = original(*args, **options)
        calls.append(done)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, replace(GREEDY, n=2))
    monkeypatch.undo()
    assert llm.core.is_idle
    llm.core.scheduler.integrity()
    assert tokens(llm) == wanted


def test_a_second_caller_is_refused_and_the_first_loses_nothing() -> None:
    llm = make("cpu")
    wanted = llm.generate([PROMPTS[0]], GREEDY)[0].tokens
    stream = llm.stream(PROMPTS[0], GREEDY)
    with llm._alone():
        with pytest.raises(RequestError, match="generating already"):
            next(stream)
        with pytest.raises(RequestError, match="use AsyncLLM"):
            llm.generate([PROMPTS[0]], GREEDY)
    assert llm.generate([PROMPTS[0]], GREEDY)[0].tokens == wanted


def test_a_top_k_beyond_every_vocabulary_cuts_nothing() -> None:
    llm = make("cpu")
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    wanted = tokens(llm, params=params)
    assert tokens(llm, params=replace(params, top_k=3_000_000_000)) == wanted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_seqs": 10**15}, r"allocating a KV cache of 96,[0,]+ tokens: .*\. Lower cache_tokens, or max_seqs if"),
        (
            {"max_seqs": 10**15, "cache_tokens": 96},
            r"allocating request tables for 1,.* sequences: .*\. Lower max_seqs",
        ),
        ({"cache_tokens": 10**18}, r"allocating a KV cache of 1,.* tokens: .*\. Lower cache_tokens"),
    ],
    ids=str,
)
def test_what_memory_has_no_room_for_is_told_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        make("cpu", **options)


def test_wide_tables_that_memory_has_no_room_for_are_told_by_name() -> None:
    tables = make("cpu").executor.tables
    tables.sizes = replace(tables.sizes, max_seqs=10**15)
    with pytest.raises(DeviceError, match=r"allocating penalty tables for 1,.* sequences: .*\. Lower max_seqs"):
        _ = tables["counts"]
    with pytest.raises(DeviceError, match="allocating grammar masks for 1,"):
        _ = tables["allowed"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_len": 0}, "max_len must be a whole number of at least 1, found 0"),
        ({"page_size": True}, "page_size must be a whole number of at least 1, found True"),
        ({"cache_tokens": -1}, "cache_tokens must be a whole number of at least 1"),
        ({"attention": "foo"}, "attention is one of reference, cpu, triton, flashinfer; found 'foo'"),
        ({"kernels": "foo"}, "kernels is one of reference"),
        ({"dtype": "float16"}, "dtype is one of torch.float32, torch.bfloat16, torch.float16; found 'float16'"),
    ],
    ids=str,
)
def test_options_that_can_not_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        EngineOptions(**options)
