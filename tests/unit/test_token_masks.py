"""Tokens that may or may not come: min_tokens, allowed_token_ids and bad words, exact while the engine runs ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph import RequestError
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import FinishReason, GrammarSpec, Request, SamplingParams
from phonograph.engine.requests.token_masks import BadWords, TokenMasks, packed
from phonograph.engine.text import StopStrings, TextReader, Tokenizer
from phonograph.engine.text.bad_words import with_bad_words
from phonograph.graphs.planning.settings import ask
from server import tiny

PROMPT = [5, 9, 200, 3]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


def make(device: str = "cpu", backend: str | None = None, **options: Any) -> LLM:
    settings = {"max_seqs": 4, "max_tokens": 32, "max_len": 96, "page_size": 8, "dtype": torch.float32, **options}
    asked = [ask(f"{p}.backend", backend, origin="test") for p in ("decode", "prefill")] if backend else []
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=EngineOptions(**settings), asked=asked)


@pytest.fixture(scope="module", params=[("cpu", None), ("emulated", "full")], ids=str)
def llm(request: pytest.FixtureRequest) -> LLM:
    return make(*request.param)


def generated(llm: LLM, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    (done,) = llm.generate([prompt], SamplingParams(**{**GREEDY, **params}))
    assert done.finish is not FinishReason.ERROR, done.error
    return done.tokens


def bits(words: Any, vocab: int) -> list[bool]:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab].astype(bool).tolist()


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_packed_bits_are_read_back(allowed: list[bool]) -> None:
    assert bits(packed(np.array(allowed)), len(allowed)) == allowed


@given(
    st.integers(2, 130).flatmap(
        lambda vocab: st.tuples(
            st.just(vocab),
            st.none() | st.sets(st.integers(0, vocab - 1), min_size=1),
            st.sets(st.integers(0, vocab - 1), max_size=4),
            st.sets(st.integers(0, vocab - 1), max_size=4),
            st.integers(0, 5),
        )
    )
)
def test_masks_are_what_the_fields_say(drawn: tuple[int, set[int] | None, set[int], set[int], int]) -> None:
    vocab, allowed, bad, stops, least = drawn
    params = SamplingParams(
        max_tokens=9,
        min_tokens=least,
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_token_ids=tuple((token,) for token in bad),
        stop_token_ids=tuple(stops),
    )
    masks = TokenMasks.of(Request("r", (1, 2, 3), params), vocab, (vocab - 1, 10**6))
    if masks is None:
        assert allowed is None
        assert not bad
        assert not least
        return
    late = {token for token in range(vocab) if (allowed is None or token in allowed) and token not in bad}
    early = late - stops - {vocab - 1} if least else late
    assert {token for token, may in enumerate(bits(masks.late, vocab)) if may} == late
    assert {token for token, may in enumerate(bits(masks.early, vocab)) if may} == early
    assert masks.least_length == (3 + least if least else 0)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_bad_words_are_those_of_the_rule(words: list[tuple[int, ...]], said: list[int]) -> None:
    constraint = BadWords(words, 40, None)
    for place in range(len(said) + 1):
        past = said[:place]
        wanted = [True] * 40
        for word in words:  # as vLLM has it
            count = len(word) - 1
            if len(word) <= len(past) + 1 and past[len(past) - count :] == list(word[:count]):
                wanted[word[-1]] = False
        assert bits(constraint.mask(), 40) == wanted
        if place < len(said):
            constraint.accept(said[place])


@pytest.mark.parametrize("token", [0, 31, 32, 63])
def test_the_ends_of_words_of_bits(token: int) -> None:
    mask = BadWords([(1, token)], 64, None)
    mask.accept(1)
    assert [place for place, may in enumerate(bits(mask.mask(), 64)) if not may] == [token]


@pytest.mark.parametrize("max_ahead", [0, 1, 3])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_end_tokens_do_not_come_before_the_fewest(max_ahead: int, device: str) -> None:
    llm = make(device, max_ahead=max_ahead)
    free = generated(llm, ignore_eos=True)
    for least in range(len(free)):
        stop = free[2]  # it would end the output with the third token
        found = generated(llm, min_tokens=least, stop_token_ids=(stop,), ignore_eos=True)
        assert stop not in found[:least]
        assert len(found) >= min(least, 12)
        if least <= 2:
            assert found == free[:3]
        if found[-1] == stop:
            assert len(found) > least


def test_the_fewest_tokens_are_counted_from_the_prompt_on(llm: LLM) -> None:
    """With every token an end, an output has just one more than the fewest."""
    every = tuple(range(64))
    allowed = (*range(64), 100, 101)
    for least in (0, 1, 5):
        found = generated(
            llm, min_tokens=least, stop_token_ids=every, allowed_token_ids=allowed, temperature=1.0, seed=4
        )
        assert all(token in (100, 101) for token in found[:least])
        assert all(token in (100, 101) for token in found[:-1])


def test_sequences_of_a_batch_have_masks_of_their_own(llm: LLM) -> None:
    prompts = [[5, 9, 200, 3], [7], list(range(20, 50))]
    alone = [generated(llm, prompt, ignore_eos=True) for prompt in prompts]
    core, params = llm.core, {**GREEDY, "ignore_eos": True}
    masked = SamplingParams(**params, allowed_token_ids=tuple(range(50, 60)))
    kinds = [SamplingParams(**params), masked, SamplingParams(**params, bad_token_ids=((alone[2][0],),))]
    sequences = [
        core.add(Request(f"batch {place}", tuple(prompt), kind))[0]
        for place, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    while not core.is_idle:
        core.step()
    assert sequences[0].outputs == alone[0]
    assert set(sequences[1].outputs) <= set(range(50, 60))
    assert alone[2][0] not in sequences[2].outputs
    # The next owner of a row finds nothing of the last one's.
    assert [generated(llm, prompt, ignore_eos=True) for prompt in prompts] == alone


@pytest.mark.parametrize("depth", [1, 3])
def test_masks_hold_among_rounds(depth: int) -> None:
    """Each token of a round is masked by its own position."""
    allowed = (70, 71, 72, 73)  # few, so that drafts are right now and then
    prompts = [[5, 9, 200, 3], [7], list(range(20, 50))]
    plain, rounds = make(), make(speculate="ngram", speculate_depth=depth)
    kinds: list[dict[str, Any]] = [
        {"ignore_eos": True, "allowed_token_ids": allowed},
        {"stop_token_ids": (70, 71), "allowed_token_ids": allowed, "min_tokens": 17},
        {"ignore_eos": True, "allowed_token_ids": allowed, "bad_token_ids": ((70,), (71, 72))},
    ]
    for kind in kinds:
        params = SamplingParams(temperature=0.0, max_tokens=40, **kind)
        wanted = [done.tokens for done in plain.generate(prompts, params)]
        assert [done.tokens for done in rounds.generate(prompts, params)] == wanted


def test_masks_hold_after_a_preemption() -> None:
    allowed = tuple(range(70, 90))
    params = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True, allowed_token_ids=allowed, min_tokens=20)
    prompts = [list(range(start, start + 4)) for start in (0, 30, 60)]
    wanted = [make(max_len=160).generate([prompt], params)[0].tokens for prompt in prompts]
    llm = make(max_len=160, cache_tokens=200)
    assert [done.tokens for done in llm.generate(prompts, params)] == wanted
    assert llm.core.scheduler.counts.preemptions > 0
    assert {token for tokens in wanted for token in tokens} <= set(allowed)


def test_a_row_of_tokens_does_not_come(llm: LLM) -> None:
    free = generated(llm, ignore_eos=True)
    for count in (1, 2, 3):
        word = tuple(free[3 : 3 + count])
        found = generated(llm, bad_token_ids=(word,), ignore_eos=True)
        first = next(place for place in range(len(free)) if tuple(free[place : place + count]) == word)
        assert found[: first + count - 1] == free[: first + count - 1]
        assert not any(tuple(found[place : place + count]) == word for place in range(len(found)))


def test_what_runs_ahead() -> None:
    assert Request("r", (1,), SamplingParams(allowed_token_ids=(1,), min_tokens=2)).run_ahead
    assert Request("r", (1,), SamplingParams(bad_token_ids=((1,), (2,)))).run_ahead
    assert not Request("r", (1,), SamplingParams(bad_token_ids=((1,), (2, 3)))).run_ahead


def test_a_grammar_and_bad_words_hold_together(tiny_folder: Any) -> None:
    llm = LLM(tiny_folder, device="cpu", options=EngineOptions(max_seqs=2))
    grammar = GrammarSpec("regex", "[ab]{6}")
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, grammar=grammar, bad_words=("bb", "ab"))
    for done in llm.generate(["x", "y", "z"], params):
        assert done.text in ("aaaaaa", "baaaaa")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.write(tmp_path_factory.mktemp("masks") / "tiny")


def test_stop_strings_do_not_count_before_the_fewest(tiny_folder: Any) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder)
    for least, text in ((0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (5, "abab"), (6, "ababab")):
        reader = TextReader(tokenizer, StopStrings(["ab"]), min_tokens=least)
        found, hit = "", False
        for token in tokenizer.encode("ababab"):
            read = reader.take([token], is_last=False)
            found, hit = found + read.text, hit or read.is_stopped
            if hit:
                break
        found += "" if hit else reader.take([], is_last=True).text
        assert (found, hit) == (text, least < 6)


def test_a_stop_string_may_begin_before_the_fewest(tiny_folder: Any) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder)
    reader = TextReader(tokenizer, StopStrings(["aab"]), min_tokens=2)
    read = reader.take(tokenizer.encode("xaab"), is_last=True)
    assert (read.text, read.is_stopped) == ("x", True)


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=2),
    st.integers(0, 12),
)
def test_stop_strings_after_a_number_of_characters(text: str, stops: list[str], least: int) -> None:
    search, found, hit = StopStrings(stops), "", None
    for place, char in enumerate(text):
        more, hit = search.add(char, counts=place >= least)
        found += more
        if hit is not None:
            break
    ends = [
        (end, max(s for s in stops if text[:end].endswith(s) and len(s) == size))
        for end in range(least + 1, len(text) + 1)
        if (size := max((len(s) for s in stops if text[:end].endswith(s)), default=0))
    ]
    if ends:
        end, stop = ends[0]
        assert hit is not None
        assert len(hit) == len(stop)
        assert found == text[: end - len(stop)]
    else:
        assert hit is None
        assert found + search.flush() == text


def test_bad_words_are_spelled_as_words_begin_and_go_on() -> None:
    words = {"he": (1,), " he": (2,), "two tokens": (3, 4), " two tokens": (5, 4), "odd": (6,), " odd": (7, 8)}

    class Spelled:
        def encode(self, text: str, *, add_special: bool) -> list[int]:
            assert not add_special
            return list(words[text])

    params = with_bad_words(SamplingParams(bad_words=(" he", "two tokens", "odd")), Spelled())  # type: ignore[arg-type]
    assert params.bad_token_ids == ((1,), (2,), (3, 4), (5, 4), (6,))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_token_ids": ((),)}, "bad_token_ids"),
        ({"bad_token_ids": (3,)}, "bad_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_wrong_values_are_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**params)
    assert error.value.field == field


@pytest.mark.parametrize("params", [{"allowed_token_ids": (3, 10**6)}, {"bad_token_ids": ((3, 10**6),)}])
def test_tokens_outside_the_vocabulary_are_refused(params: dict[str, Any], llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"1000000 of .* is not in the vocabulary"):
        llm.generate([PROMPT], SamplingParams(**params))


def test_masks_that_allow_nothing_fail_by_name(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, allowed_token_ids=(3,), bad_token_ids=((3,),))
    (done,) = llm.generate([PROMPT], params)
    assert done.finish is FinishReason.ERROR
    assert "no token is allowed at position 4" in done.error
    (sequence,) = llm.core.add(Request("nothing", tuple(PROMPT), params))
    while not llm.core.is_idle:
        llm.core.step()
    assert sequence.error_field == "allowed_token_ids", "the request is at fault, not the model"
