"""The server byte by byte: curl, raw events, and everything that a client can get wrong."""

from __future__ import annotations

import ast
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.engine.llm import LLM
from phonograph.engine.requests.request import SamplingParams
from phonograph.server.http.failures import ApiError
from phonograph.server.http.neutral_fields import without_neutral
from phonograph.server.openai import requests
from phonograph.server.openai.request_validation import check_message_fields, check_tool_fields
from phonograph.server.openai.requests import (
    ONLY_NEUTRAL,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from server.conftest import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def expected(offline: LLM, prompt: str) -> str:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return offline.generate(prompt, params)[0].text


def events(data: bytes) -> list[Any]:
    """What a strict reader of server-sent events makes of a body."""
    assert data.endswith(b"data: [DONE]\n\n")
    found = data.split(b"\n\n")
    assert found.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in found)
    return [json.loads(event[6:]) for event in found[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error body, after a look at its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    assert len(found["message"]) > 10
    return found


# -- what works -------------------------------------------------------------------------------------------------------


def test_curl(tiny_server: Server, offline: LLM) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"prompt": "abc", **GREEDY})
    command = [
        curl,
        "--silent",
        "--fail",
        "-H",
        "Content-Type: application/json",
        "--data",
        body,
        tiny_server.url + TEXT,
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert found["choices"][0]["text"] == expected(offline, "abc")


def test_raw_events(tiny_server: Server, offline: LLM) -> None:
    body = {"prompt": "abc", **GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    response = tiny_server.post(TEXT, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    found = events(response.content)
    assert len({event["id"] for event in found}) == 1
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == expected(offline, "abc")
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert all(event["usage"] is None for event in found[:-1])
    assert found[-1]["usage"]["completion_tokens"] == 12


def test_a_socket_and_nothing_else(tiny_server: Server, offline: LLM) -> None:
    body = json.dumps({"prompt": "abc", **GREEDY}).encode()
    host, port = tiny_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        for start in range(0, len(body), 7):
            sock.sendall(body[start : start + 7])
        head, _, rest = sock.recv(65536).partition(b"\r\n\r\n")
        while not rest:
            rest = sock.recv(65536)
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert json.loads(rest)["choices"][0]["text"] == expected(offline, "abc")


def test_text_goes_to_tokens_and_back(tiny_server: Server) -> None:
    text = "grüße 🎉 <|end|>"
    tokens = tiny_server.tokens(text)
    assert tokens[-1] == 257
    assert tiny_server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    chat = tiny_server.post("/tokenize", {"messages": HELLO}).json()
    assert chat["count"] == len(chat["tokens"])
    rendered = tiny_server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert rendered == "<|start|>user hello<|end|><|start|>assistant "


def test_tools_reach_the_template_and_so_do_the_arguments_of_earlier_calls(tiny_server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokens = tiny_server.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
    rendered = tiny_server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert '"name": "now"' in rendered
    assert 'calls {"zone": "UTC"}' in rendered
    answer = tiny_server.post(CHAT, {"messages": HELLO, "tools": tools, **GREEDY})
    assert answer.json()["usage"]["prompt_tokens"] > len("<|start|>hello")


def test_the_document_says_what_there_is(tiny_server: Server) -> None:
    document = tiny_server.get("/openapi.json").json()
    assert {TEXT, CHAT, "/v1/models", "/tokenize", "/detokenize", "/health"} <= set(document["paths"])
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]


def test_no_text_is_in_the_log(tiny_server: Server) -> None:
    assert tiny_server.post(TEXT, {"prompt": "a secret of mine", **GREEDY}).status_code == 200
    assert any("12 output tokens" in line for line in tiny_server.lines)
    assert not any("secret" in line for line in tiny_server.lines)


# -- what does not ----------------------------------------------------------------------------------------------------

BAD_BODIES: list[tuple[str, bytes, str]] = [
    (TEXT, b"", "it is empty"),
    (TEXT, b"{", "truncated"),
    (TEXT, b"{'prompt': 'x'}", "not valid JSON"),
    (TEXT, b'{"prompt": "x", "temperature": NaN}', "NaN and Infinity are not JSON numbers"),
    (TEXT, b'{"prompt": "x", "temperature": -Infinity}', "NaN and Infinity are not JSON numbers"),
    (TEXT, b'{"prompt": "\xff\xfe"}', "not UTF-8"),
    (TEXT, b'\xef\xbb\xbf{"prompt": "x"}', "not valid JSON"),
    (TEXT, b'{"prompt": "\\ud800"}', "not valid JSON"),
    (
        TEXT,
        b'{"prompt": "x", "metadata": {"a": ' + b"[" * 90000 + b"]" * 90000 + b"}}",
        "90,002 levels of nesting; at most 64",
    ),
    (TEXT, b"[1, 2]", "expected `object`, got `array`"),
]


@pytest.mark.parametrize(("path", "body", "says"), BAD_BODIES, ids=[str(body[:24]) for _, body, _ in BAD_BODIES])
def test_a_body_that_is_no_json_object(tiny_server: Server, path: str, body: bytes, says: str) -> None:
    assert says in error_of(httpx.post(tiny_server.url + path, content=body, headers=JSON, timeout=60), 400)["message"]


def calling(**changes: object) -> dict[str, object]:
    """A message of an assistant that called a function."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


NOW = {"type": "function", "function": {"name": "now", "parameters": {}}}

MISFITS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (TEXT, {}, "`prompt` is missing", "prompt"),
    (CHAT, {}, "`messages` is missing", "messages"),
    (TEXT, {"prompt": 5}, "expected `str | array`, got `int`", "prompt"),
    (TEXT, {"prompt": []}, "length >= 1", "prompt"),
    (TEXT, {"prompt": ""}, "the prompt is empty", "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "mixes texts", "prompt"),
    (TEXT, {"prompt": [[1], []]}, "length >= 1", "prompt[1]"),
    (TEXT, {"prompt": [99999]}, "token 99999 is not in the vocabulary of 258", "prompt"),
    (TEXT, {"prompt": [-1]}, ">= 0", "prompt[0]"),
    (TEXT, {"prompt": "x" * 600}, "600 tokens; a context of 512 has room for 511", "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "a context of 512", "messages"),
    (CHAT, {"messages": []}, "length >= 1", "messages"),
    (CHAT, {"messages": "hello"}, "expected `array`, got `str`", "messages"),
    (
        CHAT,
        {"messages": [{"role": "boss", "content": "x"}]},
        "has the role 'boss'; expected one of system",
        "messages[0]",
    ),
    (CHAT, {"messages": [{"role": "user"}]}, "has no content", "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content of type int", "messages[0]"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "expected text parts alone",
        "messages[0]",
    ),
    *(
        (
            path,
            {"messages": [{"role": role, "content": [{"type": "text", "text": "x"}, part]}]},
            f"has a part of type '{part['type']}'; the model reads text only",
            "messages[0]",
        )
        for path, role in ((CHAT, "user"), (CHAT, "system"), ("/tokenize", "user"))
        for part in (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "file", "file": {"file_id": "a"}},
            {"type": "refusal", "refusal": "no"},
        )
    ),
    (CHAT, {"messages": [5]}, "expected `object`, got `int`", "messages[0]"),
    (TEXT, {"prompt": "x", "temperature": "hot"}, "expected `float | null`, got `str`", "temperature"),
    (TEXT, {"prompt": "x", "temperature": -1}, ">= 0", "temperature"),
    (TEXT, {"prompt": "x", "top_p": 0}, "> 0", "top_p"),
    (TEXT, {"prompt": "x", "max_tokens": -5}, ">= 0", "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 1.5}, "got `float`", "max_tokens"),
    (TEXT, {"prompt": "x", "n": 0}, ">= 1", "n"),
    (TEXT, {"prompt": "x", "n": 10**30}, "<= 128", "n"),
    (TEXT, {"prompt": ["x"] * 128, "n": 128}, "16384 sequences; expected 1 to 308", "n"),
    (TEXT, {"prompt": ["x"] * 309}, "309 prompts; at most 308", "prompt"),
    (TEXT, {"prompt": "x", "seed": -(2**63) - 1}, "`seed`", "seed"),
    (CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}, "another name", "max_completion_tokens"),
    *(
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": kind, "json_schema": {"name": "a", "schema": {}}}},
            "which follows no schema",
            "response_format.json_schema",
        )
        for kind in ("text", "json_object")
    ),
    *(
        (CHAT, {"messages": [{**HELLO[0], name: value}]}, "unknown field", f"messages[0].{name}")
        for name, value in (("name", "me"), ("refusal", "no"), ("function_call", {"name": "f"}), ("audio", {"id": "a"}))
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"a": 1}}]}]},
        "no effect here",
        "messages[0].content[0].cache_control",
    ),
    *(
        (path, {"messages": [{"role": role, "content": "x", name: value}]}, "only messages of", f"messages[0].{name}")
        for path in (CHAT, "/tokenize")
        for role, name, value in (
            ("user", "tool_calls", [{"id": "a"}]),
            ("user", "tool_call_id", "a"),
            ("system", "tool_call_id", "a"),
            ("assistant", "tool_call_id", "a"),
            ("tool", "tool_calls", [{"id": "a"}]),
        )
    ),
    (CHAT, {"messages": [*HELLO, calling(index=0)]}, "no effect here", "messages[1].tool_calls[0].index"),
    (
        "/tokenize",
        {"messages": [calling(function={"name": "f", "argument": "{}"})]},
        "did you mean `messages[0].tool_calls[0].function.arguments`?",
        "messages[0].tool_calls[0].function.argument",
    ),
    *(
        (TEXT, {"prompt": "x", "guided_json": schema}, f"`{name}` has the number", "guided_json")
        for name, schema in (
            ("const", {"const": 9007199254740993}),
            ("const", {"const": {"a": [12345678901234567890123]}}),
            ("enum", {"properties": {"a": {"enum": [1, -9007199254740993]}}}),
            ("minimum", {"type": "integer", "minimum": 2**53}),
            ("maximum", {"anyOf": [{"type": "integer", "maximum": 2**63}]}),
            ("exclusiveMaximum", '{"type": "integer", "exclusiveMaximum": 12345678901234567890123}'),
        )
    ),
    (TEXT, {"prompt": "x", "presence_penalty": 3}, "<= 2", "presence_penalty"),
    (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "expected `int`, got `str`", "logit_bias"),
    (TEXT, {"prompt": "x", "logit_bias": {"99999": 1}}, "not in the vocabulary", "logit_bias"),
    (TEXT, {"prompt": "x", "stop": [""]}, "length >= 1", "stop[0]"),
    (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "17 texts; at most 16", "stop"),
    (TEXT, {"prompt": "x", "stream": "yes"}, "expected `bool | null`", "stream"),
    (TEXT, {"prompt": "x", "stream_options": {}}, "`stream_options` needs `stream`", "stream_options"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 0, "stream": True}, "a stream has no place", "prompt_logprobs"),
    (TEXT, {"prompt": "x", "min_tokens": 17}, "max_tokens 16", "min_tokens"),
    (TEXT, {"prompt": "x", "truncate_prompt_tokens": 0}, "nothing of the prompt", "truncate_prompt_tokens"),
    (TEXT, {"prompt": "x", "allowed_token_ids": [99999]}, "not in the vocabulary", "allowed_token_ids"),
    (TEXT, {"prompt": "x", "allowed_token_ids": []}, "length >= 1", "allowed_token_ids"),
    (TEXT, {"prompt": "x", "bad_words": [""]}, "length >= 1", "bad_words[0]"),
    (TEXT, {"prompt": "x", "bad_words": ["a"] * 129}, "129 texts; at most 128", "bad_words"),
    (TEXT, {"prompt": "x", "bad_words": ["a", "b" * 257]}, "257 characters", "bad_words[1]"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 21}, "<= 20", "prompt_logprobs"),
    (TEXT, {"prompt": "x", "best_of": 3}, "let it be `n`", "best_of"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "`suffix` can't be served", "suffix"),
    (TEXT, {"prompt": "x", "temprature": 1}, "did you mean `temperature`", "temprature"),
    (TEXT, {"prompt": "x", "guided_regex": "[a"}, "unclosed character class", "guided_regex"),
    (TEXT, {"prompt": "x", "guided_regex": "a", "guided_json": {}}, "one grammar", "guided_regex"),
    (TEXT, {"prompt": "x", "guided_choice": []}, "at least one", "guided_choice"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "json_object or json_schema", "response_format"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "`schema`", "response_format"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "needs `logprobs`", "top_logprobs"),
    *(
        (path, {**body, "return_tokens_as_token_ids": True}, "needs `logprobs`", "return_tokens_as_token_ids")
        for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"}))
    ),
    *(
        (TEXT, {"prompt": "x", name: 1}, "expected `bool | null`", name)
        for name in ("skip_special_tokens", "include_stop_str_in_output", "return_token_ids")
    ),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "`tools[0]` must be", "tools[0]"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "needs `tools`", "tool_choice"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"jsn": {}}}, "did you mean", "structured_outputs.jsn"),
    (
        TEXT,
        {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}},
        "one grammar",
        "structured_outputs.choice",
    ),
    (TEXT, {"prompt": "x", "structured_outputs": {"choice": "a"}}, "a list of texts", "structured_outputs.choice"),
    (TEXT, {"prompt": "x", "structured_outputs": {"regex": ["a"]}}, "a text", "structured_outputs.regex"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "most"}, "invalid enum value", "reasoning_effort"),
    (
        CHAT,
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "asks for a new one",
        "continue_final_message",
    ),
    (
        CHAT,
        {"messages": HELLO, "tools": [NOW], "tool_choice": "required", "guided_regex": "a"},
        "one grammar",
        "guided_regex",
    ),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"think": 1}}, "does not read 'think'", "chat_template_kwargs"),
    (
        CHAT,
        {"messages": [*HELLO, {"role": "user", "content": "x", "contents": "y"}]},
        "did you mean `messages[1].content`?",
        "messages[1].contents",
    ),
    ("/tokenize", {"messages": [{**HELLO[0], "weight": 0}]}, "no effect here", "messages[0].weight"),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_object", "schema": {"type": "object"}}},
        "unknown field `response_format.schema`",
        "response_format.schema",
    ),
    (
        CHAT,
        {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "stricte": True}},
        },
        "did you mean `response_format.json_schema.strict`?",
        "response_format.json_schema.stricte",
    ),
    (TEXT, {"prompt": "x", "guided_regex": r"[^\s\S]"}, "no text follows it", "guided_regex"),
    (TEXT, {"prompt": "x", "guided_json": False}, "Unsatisfiable", "guided_json"),
    *(
        (
            TEXT,
            {"prompt": "x", "guided_json": schema},
            "followed: `oneOf` is not supported; write `anyOf`",
            "guided_json",
        )
        for schema in ({"oneOf": [{"const": 1}, {"const": 2}]}, {"items": {"oneOf": [{"const": 1}, {"const": 2}]}})
    ),
    (TEXT, {"prompt": "x", "guided_grammar": 'start: a\na: "x" a'}, "following the grammar", "guided_grammar"),
    *(
        (TEXT, {"prompt": "x", name: value}, f"`{name}` is not supported: ", name)
        for name, value in (
            ("top_a", 0.2),
            ("typical_p", 0.9),
            ("top_a", False),
            ("top_a", "0"),
            ("top_a", [0] * 100),
            ("spaces_between_special_tokens", 1),
            ("length_penalty", 1.01),
            ("use_beam_search", True),
            ("reasoning_effort", "high"),
        )
    ),
    (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, "`tools` in its place", "functions"),
    (TEXT, {"prompt": "x", "top_a": 0, "temprature": None}, "did you mean `temperature`", "temprature"),
    (TEXT, {"prompt": "x", "top_a": 0, "temperature": "hot"}, "got `str`", "temperature"),
    (TEXT, {"prompt": "x", "top_a": 0, "top_p": 0}, "> 0", "top_p"),
    ("/tokenize", {"prompt": "x", "min_tokens": 0}, "unknown field", "min_tokens"),
    (
        CHAT,
        {"messages": HELLO, "stream": True, "stream_options": {"include_usages": True}},
        "did you mean `stream_options.include_usage`?",
        "stream_options.include_usages",
    ),
    (
        TEXT,
        {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stat": True}},
        "did you mean `stream_options.continuous_usage_stats`?",
        "stream_options.continuous_usage_stat",
    ),
    ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "unknown field", "skip_special_tokens"),
    *(
        (
            "/tokenize",
            {"prompt": "x", name: value},
            "would have no effect: no chat template is applied to a prompt",
            name,
        )
        for name, value in (
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("chat_template_kwargs", {"think": 1}),
            ("add_generation_prompt", True),
            ("add_generation_prompt", False),
        )
    ),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "the chat template adds them", "add_special_tokens"),
    ("/tokenize", {}, "either `prompt` or `messages`", "prompt"),
    ("/tokenize", {"prompt": "x", "messages": HELLO}, "either `prompt` or `messages`", "prompt"),
    ("/detokenize", {"tokens": ["a"]}, "got `str`", "tokens[0]"),
    ("/detokenize", {"tokens": [99999999]}, "not in the vocabulary", "tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 10**30}, "at most 9223372036854775807", "max_tokens"),
    (TEXT, {"prompt": "x", "top_k": 10**30}, "at most 9223372036854775807", "top_k"),
]


@pytest.mark.parametrize(("path", "body", "says", "param"), MISFITS, ids=lambda value: str(value)[:48])
def test_a_body_that_does_not_fit(
    tiny_server: Server, path: str, body: dict[str, Any], says: str, param: str | None
) -> None:
    error = error_of(tiny_server.post(path, body), 400)
    assert says in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_messages_may_have_what_openai_documents_and_what_is_null(tiny_server: Server) -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "unknown": None,
    }
    body = {"messages": [*HELLO, answer, *HELLO], **GREEDY, "max_completion_tokens": GREEDY["max_tokens"], "seed": -1}
    assert tiny_server.post(CHAT, body).status_code == 200
    shape = {"name": "a", "description": "b", "schema": {"type": "boolean"}, "strict": True}
    body["response_format"] = {"type": "json_schema", "json_schema": shape}
    assert tiny_server.post(CHAT, body).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_follows_a_schema_is_no_call(tiny_server: Server, is_streamed: bool) -> None:
    call = {"name": "now", "arguments": {"zone": "UTC"}}
    schema = {"name": "a", "schema": {"const": call}}
    body = {
        "messages": HELLO,
        "max_tokens": 100,
        "tools": [{"type": "function", "function": {"name": "now", "parameters": {}}}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "stream": is_streamed,
        "logit_bias": dict.fromkeys(tiny_server.tokens(" \n\r\t"), -100),
    }
    said = tiny_server.post(CHAT, body)
    assert said.status_code == 200
    assert "tools: an output that follows a grammar has no tool calls" in said.headers["x-phonograph-note"]
    choices = [event["choices"][0] for event in events(said.content)] if is_streamed else said.json()["choices"]
    messages = [choice["delta" if is_streamed else "message"] for choice in choices]
    assert json.loads("".join(message.get("content", "") for message in messages)) == call
    assert choices[-1]["finish_reason"] == "stop"
    assert not any("tool_calls" in message for message in messages)


@pytest.mark.parametrize("text", ["a\x7fb", "\x7f", "\u0080\u2028"])
def test_a_choice_may_have_any_character(tiny_server: Server, text: str) -> None:
    said = tiny_server.post(TEXT, {"prompt": "x", "guided_choice": [text], "max_tokens": 20})
    assert said.json()["choices"][0]["text"] == text


def test_seeds_below_0_are_seeds(tiny_server: Server) -> None:
    def drawn(seed: int) -> str:
        body = {"prompt": "x", "seed": seed, "temperature": 1, "max_tokens": 20, "ignore_eos": True}
        found: str = tiny_server.post(TEXT, body).json()["choices"][0]["text"]
        return found

    assert drawn(-1) == drawn(-1)
    assert len({drawn(seed) for seed in (-(2**63), -2, -1, 0, 1)}) == 5


def test_where_files_lie_is_told_to_no_client(tiny_server: Server, tiny_model: Path) -> None:
    said = error_of(tiny_server.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"think": 1}}), 400)
    assert str(tiny_model.parent) not in said["message"]


@pytest.mark.parametrize("since", ["abc", "-1", "", "1.5"])
def test_figures_since_no_number(tiny_server: Server, since: str) -> None:
    assert error_of(tiny_server.get(f"/status.json?since={since}"), 400)["param"] == "since"


def test_what_is_not_there(tiny_server: Server) -> None:
    assert error_of(tiny_server.get("/v2/anything"), 404)["code"] == "unknown_route"
    assert error_of(tiny_server.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    assert error_of(tiny_server.post(TEXT, {"prompt": "x", "model": "gpt-4"}), 404)["param"] == "model"
    wrong = tiny_server.get(TEXT)
    assert error_of(wrong, 405)["message"] == "this route takes POST."
    assert wrong.headers["allow"] == "POST"


def test_a_body_that_is_too_large(tiny_server: Server) -> None:
    said = httpx.post(tiny_server.url + TEXT, content=b"x" * 200_001, headers=JSON, timeout=60)
    assert "has 200,001 bytes; at most 200,000" in error_of(said, 413)["message"]

    def endless() -> Any:
        for _ in range(1000):
            yield b"x" * 1000

    # Its length is not announced, so the server finds out while it reads.
    said = httpx.post(tiny_server.url + TEXT, content=endless(), headers=JSON, timeout=60)
    assert error_of(said, 413)["code"] == "body_too_large"
    assert tiny_server.get("/health").status_code == 200


def test_fields_that_change_no_answer_are_taken(tiny_server: Server) -> None:
    plain = {"messages": HELLO, "max_tokens": 4, **GREEDY}
    quiet = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "modalities": ["text"],
    }
    assert quiet.keys() | {"include_obfuscation"} == WITHOUT_EFFECT.keys()
    texts = [tiny_server.post(CHAT, body).json()["choices"] for body in (plain, {**plain, **quiet})]
    assert texts[0] == texts[1]
    streamed = {**plain, "stream": True, "stream_options": {"include_obfuscation": True}}
    assert tiny_server.post(CHAT, streamed).status_code == 200
    tokens = [
        tiny_server.post("/tokenize", {"messages": HELLO, **further}).json()["tokens"]
        for further in ({}, {"add_special_tokens": False, "add_generation_prompt": True})
    ]
    assert tokens[0] == tokens[1]


def test_every_field_of_a_body_is_read_or_known_to_be_without_effect() -> None:
    """Where requests are made of it: that a field is within its bounds is no reading."""
    folder = Path(requests.__file__).parent
    trees = [
        ast.parse((folder / name).read_text())
        for name in ("api.py", "chat_plan.py", "output_form.py", "sampling_params.py", "request_validation.py")
    ]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    bodies = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, StreamOptions)
    for body in bodies:
        assert body.__struct_config__.forbid_unknown_fields
        unread = {field.name for field in msgspec.structs.fields(body)} - read
        assert unread <= WITHOUT_EFFECT.keys(), body
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert [name for name in WITHOUT_EFFECT if f"`{name}`" not in page] == []


def test_fields_of_others_are_taken_at_what_is_done_anyway(tiny_server: Server) -> None:
    plain = {"max_tokens": 4, **GREEDY}
    asked: tuple[tuple[str, dict[str, Any]], ...] = ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"}))
    nulls: dict[str, Any] = dict.fromkeys(ONLY_NEUTRAL)
    rounds = [nulls]
    for place in range(max(len(field.values) for field in ONLY_NEUTRAL.values())):
        rounds.append({name: field.values[place] for name, field in ONLY_NEUTRAL.items() if field.values[place:]})
    for path, body in asked:
        expected = tiny_server.post(path, {**plain, **body}).json()["choices"]
        for further in (*rounds, {"length_penalty": 1.0, "stop": ""}):
            said = tiny_server.post(path, {**further, **plain, **body})
            assert said.status_code == 200, said.text
            assert said.json()["choices"] == expected
    for further in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}, {"logprobs": False}):
        assert tiny_server.post(CHAT, {**plain, **asked[0][1], **further}).status_code == 200


def test_fields_of_others_are_known_and_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert [name for name in ONLY_NEUTRAL if f"`{name}`" not in page] == []
    assert ONLY_NEUTRAL.keys().isdisjoint(WITHOUT_EFFECT)
    both = {field.name for field in msgspec.structs.fields(ChatRequest)}
    both &= {field.name for field in msgspec.structs.fields(CompletionRequest)}
    assert ONLY_NEUTRAL.keys().isdisjoint(both), "what both bodies have is read there"


@given(
    st.dictionaries(
        st.text().filter(lambda name: name not in ONLY_NEUTRAL),
        st.none() | st.integers(-9, 9) | st.text() | st.lists(st.booleans()),
        max_size=8,
    )
)
def test_a_body_without_neutral_fields_is_otherwise_the_same(body: dict[str, Any]) -> None:
    data = msgspec.json.encode({"top_a": 0, **body, "echo": 5, "verbosity": None})
    assert json.loads(without_neutral(data, ONLY_NEUTRAL, ("echo",))) == {**body, "echo": 5}


FUNCTION = {"name": "f", "description": "d", "parameters": {}, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ({**TOOL, "cache_control": {"type": "ephemeral"}}, "tools[1].cache_control"),
        ({**TOOL, "function": {**FUNCTION, "examples": [1]}}, "tools[1].function.examples"),
    ],
)
def test_fields_of_tools_reach_the_template_or_are_refused(tool: dict[str, Any], place: str) -> None:
    check_tool_fields([TOOL, {**TOOL, "further": None}], (), shown_whole=False)
    check_tool_fields([TOOL, tool], (), shown_whole=True)
    check_tool_fields([TOOL, tool], (place.rpartition(".")[2],), shown_whole=False)
    with pytest.raises(ApiError) as found:
        check_tool_fields([TOOL, tool], (), shown_whole=False)
    assert found.value.error.param == place


RESULT = {"role": "tool", "content": "noon", "tool_call_id": "a"}


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        (calling(), None),
        (RESULT, None),
        ({**RESULT, "role": "user"}, "tool_call_id"),
        ({**calling(), "role": "user"}, "tool_calls"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, None),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "reasoning_content"),
        ({"role": "user", "content": "x", "tool_calls": [], "tool_call_id": None}, None),
    ],
)
def test_calls_results_and_thoughts_are_of_one_role(message: dict[str, Any], refused: str | None) -> None:
    if refused is None:
        check_message_fields([*HELLO, message], ())
        return
    with pytest.raises(ApiError) as found:
        check_message_fields([*HELLO, message], ())
    assert found.value.error.param == f"messages[1].{refused}"
    assert f"`messages[1].{refused}` can't be served" in found.value.error.message
