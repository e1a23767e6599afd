"""A model with sampling of its own, ends that are no special tokens, and spaces in front: offline and served alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.registry import config_from_hf
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import FinishReason, SamplingParams
from server import tiny
from server.conftest import TINY_FLAGS, Server, serving
from unit.test_text import save, sentencepiece

PROMPT = [1, 262, 260]
OWN = {"temperature": 0.7, "top_k": 1, "do_sample": True, "max_new_tokens": 3, "repetition_penalty": None}
OPEN = SamplingParams(max_tokens=12, ignore_eos=True, seed=5)
GREEDY = replace(OPEN, temperature=0.0)
RANDOM = replace(OPEN, temperature=1.0, top_k=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose end of an answer, by generation_config.json, is a token that is text elsewhere."""
    path = tmp_path_factory.mktemp("own")
    backend = sentencepiece()
    save(path, backend)
    config = {**tiny.CONFIG, "vocab_size": backend.get_vocab_size(), "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.float() for name, tensor in RandomCheckpoint(config_from_hf(config), 3).tensors()}
    save_file(weights, path / "model.safetensors")
    greedy = LLM(path, device="cpu").generate([PROMPT], GREEDY)[0]
    end = greedy.tokens[6]
    (path / "generation_config.json").write_text(json.dumps({**OWN, "eos_token_id": [2, end]}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving("--model", str(folder), *TINY_FLAGS) as found:
        yield found


def body(params: SamplingParams) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_k", "seed", "ignore_eos", "stop_token_ids")
    return {"prompt": PROMPT, **{name: getattr(params, name) for name in names}}


class TestText:
    def test_a_stop_token_is_no_text_whatever_the_vocabulary_says(self, llm: LLM) -> None:
        assert llm.tokenizer is not None
        whole = llm.generate([PROMPT], GREEDY)[0]
        end = whole.tokens[6]
        first = whole.tokens.index(end)
        assert end not in llm.tokenizer.special_ids
        assert llm.tokenizer.token_bytes(end)
        for params in (replace(GREEDY, ignore_eos=False), replace(GREEDY, stop_token_ids=(end,))):
            done = llm.generate([PROMPT], params)[0]
            assert (done.tokens, done.finish) == (whole.tokens[: first + 1], FinishReason.STOP)
            before = llm.tokenizer.decode([*PROMPT, *done.tokens[:-1]])
            assert llm.tokenizer.decode(PROMPT) + done.text == before
            assert "".join(llm.stream(PROMPT, params)) == done.text

    @pytest.mark.parametrize("params", [GREEDY, RANDOM, replace(RANDOM, ignore_eos=False)])
    def test_offline_and_served_text_are_equal(self, llm: LLM, server: Server, params: SamplingParams) -> None:
        done = llm.generate([PROMPT], params)[0]
        assert server.post("/v1/completions", body(params)).json()["choices"][0]["text"] == done.text
        assert "".join(llm.stream(PROMPT, params)) == done.text

    def test_a_space_at_the_beginning_is_text_wherever_it_is_read(self, llm: LLM, server: Server) -> None:
        assert llm.tokenizer is not None
        tokens = range(llm.checkpoint.config.vocab)
        spaces = {token: 100.0 for token in tokens if llm.tokenizer.token_bytes(token).startswith(b" ")}
        params = replace(GREEDY, logit_bias=dict(list(spaces.items())[:300]))
        done = llm.generate([PROMPT], params)[0]
        assert done.text.startswith(" ")
        asked = {**body(params), "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()}}
        assert server.post("/v1/completions", asked).json()["choices"][0]["text"] == done.text
        assert "".join(llm.stream(PROMPT, params)) == done.text


class TestSampling:
    def test_what_is_left_open_is_the_model_s_own(self, llm: LLM, server: Server) -> None:
        assert (llm.sampling.temperature, llm.sampling.top_k, llm.sampling.top_p) == (0.7, 1, None)
        done, likeliest = llm.generate([PROMPT] * 2, OPEN)[0], llm.generate([PROMPT], GREEDY)[0]
        assert done.tokens == likeliest.tokens
        assert server.post("/v1/completions", body(OPEN)).json()["choices"][0]["text"] == likeliest.text

    def test_a_neutral_value_that_is_said_counts(self, llm: LLM, server: Server) -> None:
        done, likeliest = llm.generate([PROMPT], RANDOM)[0], llm.generate([PROMPT], GREEDY)[0]
        assert done.tokens != likeliest.tokens
        assert server.post("/v1/completions", body(RANDOM)).json()["choices"][0]["text"] == done.text

    def test_it_can_be_turned_off(self, folder: Path) -> None:
        neutral = LLM(folder, device="cpu", options=EngineOptions(sampling="neutral"))
        assert neutral.sampling == SamplingParams()
        assert "neutral where a request leaves a value out" in neutral.explain()

    def test_it_is_shown(self, llm: LLM, server: Server) -> None:
        assert "temperature 0.7, top_k 1 where a request leaves it out" in llm.explain()
        assert server.get("/v1/models").json()["data"][0]["sampling"] == {
            "temperature": 0.7,
            "top_k": 1,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
