"""A server that gives hidden states: SGLang's field, the last token's state, and who is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from phonograph import LLM, EngineOptions, SamplingParams
from server.conftest import TINY_FLAGS, Server, serving

pytestmark = pytest.mark.slow

PROMPT = [1, 5, 9, 7]
BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    flags = ("--enable-return-hidden-states", "--speculate", "ngram")
    with serving("--model", str(tiny_model), *TINY_FLAGS, *flags) as found:
        yield found


@pytest.mark.parametrize("implementation", ["native", "hf"])
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_they_are_those_of_transformers(tiny_model: Path, tmp_path: Path, implementation: Any, speculate: Any) -> None:
    """After the last norm, which is where transformers' own list of them ends."""
    tiny_model = Path(shutil.copytree(tiny_model, tmp_path / "tiny"))
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    options = EngineOptions(
        max_seqs=2, max_len=64, page_size=8, dtype=torch.float32, return_hidden_states=True,
        model_impl=implementation, speculate=speculate,
    )  # fmt: skip
    llm = LLM(tiny_model, device="cpu", options=options)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, return_hidden_states="all")
    for done in llm.generate([PROMPT, list(range(3, 40))], params):
        known = torch.tensor([[*done.prompt, *done.tokens[:-1]]])
        with torch.inference_mode():
            wanted = model(known, output_hidden_states=True).hidden_states[-1][0]
        assert done.hidden_states is not None
        np.testing.assert_allclose(done.hidden_states, wanted.numpy(), atol=2e-4, rtol=1e-3)


def test_a_choice_has_what_its_last_token_was_picked_from(server: Server, tiny_model: Path) -> None:
    options = EngineOptions(max_seqs=2, max_len=64, dtype=torch.float32, return_hidden_states=True)
    llm = LLM(tiny_model, device="cpu", options=options)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, return_hidden_states="last")
    [wanted] = llm.generate([PROMPT], params)
    assert wanted.hidden_states is not None
    found = server.post("/v1/completions", {**BODY, "return_hidden_states": True}).json()["choices"][0]
    np.testing.assert_allclose(found["hidden_states"], wanted.hidden_states[-1], atol=1e-4)
    stopped = {**BODY, "return_hidden_states": True, "max_tokens": 3}
    found = server.post("/v1/completions", stopped).json()["choices"][0]
    np.testing.assert_allclose(found["hidden_states"], wanted.hidden_states[2], atol=1e-4)


def test_chats_have_it_too(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "n": 2, "return_hidden_states": True}
    for choice in server.post("/v1/chat/completions", body).json()["choices"]:
        assert np.isfinite(choice["hidden_states"]).all()
    choice = server.post("/v1/chat/completions", {**body, "return_hidden_states": False}).json()["choices"][0]
    assert "hidden_states" not in choice


def test_what_can_t_be_served_is_refused(server: Server, tiny_server: Server) -> None:
    for one, changes, said in (
        (server, {"stream": True}, "a stream has no place for them"),
        (tiny_server, {}, "Start it with --return-hidden-states"),
    ):
        answer = one.post("/v1/completions", {**BODY, "return_hidden_states": True, **changes})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert said in error["message"]
        assert error["param"] == "return_hidden_states"
