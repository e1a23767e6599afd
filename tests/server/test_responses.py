"""`/v1/responses` over HTTP, and with the `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from server.conftest import TINY_FLAGS, Server, serving
from server.test_http import error_of

pytestmark = pytest.mark.slow

PATH = "/v1/responses"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Look something up.",
    "parameters": {
        "type": "object",
        "properties": {"where": {"enum": ["here", "there"]}},
        "required": ["where"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(real_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_text_in_and_out(client: openai.OpenAI) -> None:
    done = client.responses.create(model=MODEL, input=QUESTION, temperature=0, metadata={"a": "b"})
    assert done.output_text == ANSWER
    assert done.status == "completed"
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (37, 8)
    assert done.metadata == {"a": "b"}
    again = client.responses.retrieve(done.id)
    assert again == done
    items = client.responses.input_items.list(done.id).data
    assert [item.type for item in items] == ["message"]
    client.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)


def test_a_stream_of_events(client: openai.OpenAI) -> None:
    found: list[Any] = list(client.responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == ANSWER
    last = found[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    assert client.responses.retrieve(last.response.id).output_text == ANSWER
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ANSWER


def test_instructions_and_what_came_before(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0, instructions="You are terse.")
    second = client.responses.create(
        model=MODEL, input="And of Italy?", temperature=0, previous_response_id=first.id, max_output_tokens=12
    )
    assert second.previous_response_id == first.id
    written = client.responses.create(
        model=MODEL,
        temperature=0,
        max_output_tokens=12,
        store=False,
        input=[
            {"role": "user", "content": QUESTION},
            *[item.model_dump() for item in first.output],  # type: ignore[list-item]
            {"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]},
        ],
    )
    assert written.output_text == second.output_text
    assert second.usage is not None
    assert written.usage is not None
    assert second.usage.input_tokens == written.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="it was not stored"):
        client.responses.retrieve(written.id)
    with pytest.raises(openai.NotFoundError) as found:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_none")
    assert found.value.param == "previous_response_id"


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    done = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=3)
    assert done.status == "incomplete"
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"


class Capital(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=12)
    size: int = pydantic.Field(ge=1, le=9)


def test_structured_output(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    done = client.responses.parse(model=MODEL, input=QUESTION, temperature=0, text_format=Capital)
    assert isinstance(done.output_parsed, Capital)
    plain = client.responses.create(
        model=MODEL, input=QUESTION, temperature=0, text={"format": {"type": "json_object"}}, max_output_tokens=60
    )
    assert plain.output_text.startswith("{")
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, text_format=Capital) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == done.output_parsed


@pytest.mark.parametrize("by_id", [False, True])
def test_tools_there_and_back(client: openai.OpenAI, by_id: bool) -> None:
    pytest.importorskip("llguidance")
    asked: Any = {"role": "user", "content": "Where is it?"}
    done = client.responses.create(
        model=MODEL, input=[asked], tools=[LOOK], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    call: Any = done.output[0]
    assert len(done.output) == 1
    assert call.type == "function_call"
    assert json.loads(call.arguments)["where"] in ("here", "there")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "under the table"}
    given = [result] if by_id else [asked, call.model_dump(), result]
    answer = client.responses.create(
        model=MODEL,
        input=given,
        previous_response_id=done.id if by_id else None,
        tools=[LOOK],
        temperature=0,
        max_output_tokens=20,
        tool_choice="none",
    )
    assert answer.output_text


def test_a_stream_of_a_call(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    choice: Any = {"type": "function", "name": "look"}
    found: list[Any] = list(
        client.responses.create(
            model=MODEL, input="Where?", tools=[LOOK], tool_choice=choice, temperature=0, stream=True
        )
    )
    said = "".join(event.delta for event in found if event.type == "response.function_call_arguments.delta")
    assert json.loads(said)["where"] in ("here", "there")
    last = found[-1]
    assert last.type == "response.completed"
    call: Any = last.response.output[0]
    assert call.type == "function_call"
    assert call.arguments == said


def test_logprobs_of_what_is_said(client: openai.OpenAI) -> None:
    done = client.responses.create(
        model=MODEL,
        input=QUESTION,
        temperature=0,
        max_output_tokens=8,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    message: Any = done.output[0]
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert "".join(one.token for one in part.logprobs or ()) == part.text
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs or ())


def test_old_turns_are_left_out_where_all_do_not_fit(client: openai.OpenAI) -> None:
    turns: list[Any] = []
    for number in range(40):
        turns += [{"role": "user", "content": f"This is line {number} of a long story about a fox."}]
        turns += [{"role": "assistant", "content": "Go on."}]
    turns += [{"role": "user", "content": QUESTION}]
    with pytest.raises(openai.BadRequestError, match="a context of 512") as found:
        client.responses.create(model=MODEL, input=turns, temperature=0)
    assert found.value.param == "input"
    done = client.responses.create(model=MODEL, input=turns, temperature=0, truncation="auto", max_output_tokens=8)
    assert done.usage is not None
    assert 440 < done.usage.input_tokens < 512
    with pytest.raises(openai.BadRequestError, match="a context of 512"):
        client.responses.create(model=MODEL, input="word " * 600, truncation="auto")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "`input` is missing", "input"),
    ({"input": []}, "length >= 1", "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only", "input[0].content[0]"),
    ({"input": "x", "background": True}, "is not supported", "background"),
    ({"input": "x", "conversation": "conv_1"}, "previous_response_id", "conversation"),
    ({"input": "x", "max_tokens": 5}, "did you mean", "max_tokens"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "json_object or json_schema", "text.format"),
    ({"input": "x", "text": {"fromat": {}}}, "did you mean `text.format`", "text.fromat"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "no tools run here", "tools[0].type"),
    ({"input": "x", "tools": [{**LOOK, "strct": True}]}, "did you mean", "tools[0].strct"),
    ({"input": "x", "tool_choice": "required"}, "needs `tools`", "tool_choice"),
    ({"input": "x", "include": ["web_search_call.results"]}, "invalid enum value", "include[0]"),
    ({"input": "x", "top_logprobs": 2}, "in `include`", "top_logprobs"),
    ({"input": "x", "stream_options": {}}, "needs `stream`", "stream_options"),
    ({"input": "x", "truncation": "some"}, "invalid enum value", "truncation"),
    ({"input": "x" * 600}, "a context of 512", "input"),
    ({"input": "x", "instructions": "x" * 600}, "a context of 512", "input"),
    ({"input": [{"role": "user", "content": "x"}] * 2049}, "2,049 messages", "input"),
    ({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 20}, "entries of logprobs", "include"),
    ({"input": "x", "chat_template_kwargs": {"think": 1}}, "does not read 'think'", "chat_template_kwargs"),
]


@pytest.mark.parametrize(("body", "says", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(tiny_server: Server, body: dict[str, Any], says: str, param: str) -> None:
    error = error_of(tiny_server.post(PATH, body), 400)
    assert says in error["message"]
    assert error["param"] == param


def test_what_has_no_effect_is_noted(tiny_server: Server) -> None:
    body = {
        "input": [
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ],
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 2,
    }
    said = tiny_server.post(PATH, body)
    assert said.status_code == 200, said.text
    note = said.headers["x-phonograph-note"]
    for part in ("reasoning_effort", "reasoning.summary", "encrypted_content", "earlier reasoning"):
        assert part in note
    assert said.json()["reasoning"]["effort"] == "low"


def test_lists_of_items(tiny_server: Server) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    name = tiny_server.post(PATH, {"input": items, "max_output_tokens": 1}).json()["id"]
    path = f"{PATH}/{name}/input_items"
    newest = tiny_server.get(f"{path}?limit=2").json()
    assert ([item["content"] for item in newest["data"]], newest["has_more"]) == (["4", "3"], True)
    after = tiny_server.get(f"{path}?limit=2&order=asc&after={newest['last_id']}").json()
    assert ([item["content"] for item in after["data"]], after["has_more"]) == (["4"], False)
    assert error_of(tiny_server.get(f"{path}?limit=0"), 400)["param"] == "limit"
    assert error_of(tiny_server.get(f"{path}?after=x"), 400)["param"] == "after"
    assert error_of(tiny_server.get(f"{PATH}/{name}?stream=true"), 400)["param"] == "stream"
    assert error_of(tiny_server.get(f"{PATH}/resp_x"), 404)["code"] == "response_not_found"


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[Server]:
    keys = ("--api-key", "one", "--api-key", "two", "--response-store-bytes", "20000")
    with serving("--model", str(tiny_model), *TINY_FLAGS, *keys) as server:
        yield server


def test_a_response_is_of_the_key_that_made_it(guarded: Server) -> None:
    def ask(key: str, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, guarded.url + path, headers=headers, json=body or None, timeout=60)

    name = ask("one", "POST", PATH, input="x", max_output_tokens=2).json()["id"]
    path = f"{PATH}/{name}"
    assert ask("one", "GET", path).status_code == 200
    for method, where in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
        assert ask("two", method, where).status_code == 404
    assert ask("two", "POST", PATH, input="x", previous_response_id=name).status_code == 404
    assert ask("three", "GET", path).status_code == 401
    goes_on = ask("one", "POST", PATH, input="y", previous_response_id=name, max_output_tokens=2)
    assert goes_on.status_code == 200
    for _ in range(20):
        assert ask("two", "POST", PATH, input="x", max_output_tokens=2).status_code == 200
    assert ask("one", "GET", path).status_code == 200, "who stores a lot drives nobody else's out"
    assert ask("one", "DELETE", path).json() == {"id": name, "object": "response", "deleted": True}
    assert ask("one", "GET", path).status_code == 404


def test_nothing_is_stored_where_nothing_may_be(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), *TINY_FLAGS, "--response-store-bytes", "0") as server:
        done = server.post(PATH, {"input": "x", "max_output_tokens": 2, "store": True}).json()
        assert done["store"] is False
        assert "stores none" in error_of(server.get(f"{PATH}/{done['id']}"), 404)["message"]
