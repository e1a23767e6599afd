"""What an answer shows besides text: special tokens, its end, token ids, counts; and routes that say who answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import phonograph
from server import tiny
from server.conftest import TINY_FLAGS, Server, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
START, END = 256, 257
A = ord("A") - ord("!")
"""The alphabet of bytes begins with an exclamation mark."""


def always(*tokens: int) -> dict[str, Any]:
    """Fields that let a tiny model say nothing but these."""
    return {"temperature": 0, "logit_bias": {str(token): 100 for token in tokens}}


def answer(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "abc"}
    found = server.post(path, {**body, **fields})
    assert found.status_code == 200, found.text
    whole: dict[str, Any] = found.json()
    return whole


def events(server: Server, path: str, **fields: Any) -> list[Any]:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "abc"}
    found = server.post(path, {**body, **fields, "stream": True})
    assert found.status_code == 200, found.text
    return [json.loads(line[6:]) for line in found.text.split("\n\n") if line and line != "data: [DONE]"]


def text_of(choice: dict[str, Any]) -> str:
    for place in ("message", "delta"):
        if place in choice:
            return choice[place].get("content") or ""
    return str(choice["text"])


def both_ways(server: Server, path: str, **fields: Any) -> str:
    """The text of an answer, which is the same in pieces."""
    whole = text_of(answer(server, path, **fields)["choices"][0])
    pieces = "".join(text_of(event["choices"][0]) for event in events(server, path, **fields) if event["choices"])
    assert pieces == whole
    return whole


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_special_tokens_are_text_where_they_are_not_skipped(tiny_server: Server, path: str) -> None:
    said = {**always(START), "max_tokens": 3}
    assert both_ways(tiny_server, path, **said) == ""
    assert both_ways(tiny_server, path, **said, skip_special_tokens=True) == ""
    assert both_ways(tiny_server, path, **said, skip_special_tokens=False) == "<|start|>" * 3


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_ends_an_answer_is_text_where_it_is_asked_for(tiny_server: Server, path: str) -> None:
    ends = {**always(END), "max_tokens": 5}
    assert both_ways(tiny_server, path, **ends, skip_special_tokens=False) == ""
    assert both_ways(tiny_server, path, **ends, include_stop_str_in_output=True) == "", "it is special"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert both_ways(tiny_server, path, **ends, **shown) == "<|end|>"
    assert both_ways(tiny_server, path, **ends, skip_special_tokens=False, ignore_eos=True) == "<|end|>" * 5
    letters = {**always(A), "max_tokens": 5}
    for stop in ({"stop": "AA"}, {"stop": ["never", "AA"]}):
        assert both_ways(tiny_server, path, **letters, **stop) == ""
        assert both_ways(tiny_server, path, **letters, **stop, include_stop_str_in_output=True) == "AA"
    by_id = {**letters, "stop_token_ids": [A]}
    assert both_ways(tiny_server, path, **by_id) == ""
    assert both_ways(tiny_server, path, **by_id, include_stop_str_in_output=True) == "A"


def test_a_stop_string_that_is_a_special_token_is_shown_too(tiny_server: Server) -> None:
    body = {**always(START), "max_tokens": 3, "stop": "<|start|>"}
    assert both_ways(tiny_server, TEXT, **body) == ""
    assert both_ways(tiny_server, TEXT, **body, include_stop_str_in_output=True) == "<|start|>"
    done = answer(tiny_server, TEXT, **body, include_stop_str_in_output=True)
    assert (done["choices"][0]["finish_reason"], done["usage"]["completion_tokens"]) == ("stop", 1)


def test_special_tokens_that_are_text_have_logprobs(tiny_server: Server) -> None:
    body = {**always(START), "max_tokens": 2}
    for skip, names in ((True, []), (False, ["<|start|>"] * 2)):
        text = answer(tiny_server, TEXT, **body, logprobs=0, skip_special_tokens=skip)["choices"][0]["logprobs"]
        chat = answer(tiny_server, CHAT, **body, logprobs=True, skip_special_tokens=skip)["choices"][0]["logprobs"]
        assert text["tokens"] == [one["token"] for one in chat["content"]] == names
        assert text["text_offset"] == [9 * place for place in range(len(names))]


def test_token_ids_as_vllm_shows_them(tiny_server: Server) -> None:
    fields = {**always(A), "max_tokens": 3, "return_token_ids": True, "n": 2}
    text = answer(tiny_server, TEXT, **{**fields, "prompt": ["abc", "de"]})
    assert [choice["token_ids"] for choice in text["choices"]] == [[A] * 3] * 4
    prompts = [tiny_server.tokens(prompt) for prompt in ("abc", "abc", "de", "de")]
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == prompts
    chat = answer(tiny_server, CHAT, **fields)
    assert [choice["token_ids"] for choice in chat["choices"]] == [[A] * 3] * 2
    rendered = tiny_server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert chat["prompt_token_ids"] == rendered
    assert "prompt_token_ids" not in chat["choices"][0]
    plain = answer(tiny_server, CHAT, **{**fields, "return_token_ids": False})
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in plain


def test_token_ids_in_a_stream_add_up(tiny_server: Server) -> None:
    fields = {**always(START), "max_tokens": 4, "return_token_ids": True, "n": 2}
    chat = events(tiny_server, CHAT, **fields)
    assert "prompt_token_ids" in chat[0]
    assert not any("prompt_token_ids" in event for event in chat[1:])
    text = events(tiny_server, TEXT, **fields)
    for found in (chat, text):
        ids: dict[int, list[int]] = {0: [], 1: []}
        for event in found:
            for choice in event["choices"]:
                ids[choice["index"]] += choice.get("token_ids", [])
        assert ids == {0: [START] * 4, 1: [START] * 4}, "tokens without text have events of their own"
    told = [choice["index"] for event in text for choice in event["choices"] if "prompt_token_ids" in choice]
    assert sorted(told) == [0, 1]


def test_logprobs_call_tokens_by_their_ids(tiny_server: Server) -> None:
    fields = {**always(A), "max_tokens": 2, "return_tokens_as_token_ids": True}
    text = answer(tiny_server, TEXT, **fields, logprobs=2)["choices"][0]["logprobs"]
    assert text["tokens"] == [f"token_id:{A}"] * 2
    assert all(name.startswith("token_id:") for top in text["top_logprobs"] for name in top)
    chat = answer(tiny_server, CHAT, **fields, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in chat] == [(f"token_id:{A}", [ord("A")])] * 2
    assert chat[0]["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("include", [True, False])
def test_counts_in_every_event(tiny_server: Server, path: str, include: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include}
    found = events(tiny_server, path, **always(A), max_tokens=6, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 6)
    assert bool(found[-1]["choices"]) is not include
    assert len({event["usage"]["prompt_tokens"] for event in found}) == 1


def test_spaces_between_special_tokens_change_nothing(tiny_server: Server) -> None:
    said = {**always(START), "max_tokens": 2, "skip_special_tokens": False}
    found = {both_ways(tiny_server, TEXT, **said, spaces_between_special_tokens=given) for given in (True, False)}
    assert found == {"<|start|><|start|>"}


def test_who_answers(tiny_server: Server) -> None:
    assert tiny_server.get("/version").json() == {"version": phonograph.__version__}
    health = tiny_server.get("/health").json()
    assert tiny_server.get("/ping").json() == tiny_server.post("/ping", {}).json() == health
    (card,) = tiny_server.get("/v1/models").json()["data"]
    assert (card["root"], card["parent"], card["object"], card["owned_by"]) == ("tiny", None, "model", "phonograph")


def test_the_tokenizer_in_the_words_of_its_configuration(tiny_server: Server) -> None:
    assert tiny_server.get("/tokenizer_info").json() == {
        "bos_token": None,
        "eos_token": "<|end|>",
        "pad_token": None,
        "unk_token": None,
        "additional_special_tokens": ["<|start|>"],
        "model_max_length": tiny.CONTEXT,
        "vocab_size": tiny.VOCAB,
        "chat_template": tiny.TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def test_without_a_tokenizer_there_is_none_to_tell_of() -> None:
    with serving("--shape", "tiny", *TINY_FLAGS, "--api-key", "secret") as server:
        assert server.get("/ping").status_code == 200, "needs no key, as /health"
        assert server.get("/tokenizer_info").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/tokenizer_info", headers=key, timeout=60).status_code == 404
