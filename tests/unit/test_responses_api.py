"""Responses: items to messages, outputs to items and events, and the store."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as ClientResponse

from phonograph.engine.process.generation import Delta, TokenUsage
from phonograph.engine.requests.request import FinishReason
from phonograph.server.http.failures import ApiError
from phonograph.server.openai import requests
from phonograph.server.openai.answer_reader import Reading
from phonograph.server.openai.reasoning import THINK
from phonograph.server.openai.responses_api import request
from phonograph.server.openai.responses_api.conversation import messages_of, messages_of_output, with_instructions
from phonograph.server.openai.responses_api.objects import Response
from phonograph.server.openai.responses_api.request import ResponsesRequest, TextOptions
from phonograph.server.openai.responses_api.store import ResponseStore, StoredResponse
from phonograph.server.openai.responses_api.translation import ALIKE, chat_of, described, in_words_of_responses
from phonograph.server.openai.responses_api.writer import ResponsesWriter

USAGE = TokenUsage(prompt_tokens=5, output_tokens=3, cached_tokens=2)
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
READING = Reading(("now",), reasoning=THINK)


def writer(ended: list[Response] | None = None) -> ResponsesWriter:
    begun = Response(
        id="resp_abc",
        created_at=7,
        status="in_progress",
        model="tiny",
        output=[],
        **described(ResponsesRequest(input="x"), is_stored=True),
    )

    def end(response: Response) -> Response:
        if ended is not None:
            ended.append(response)
        return response

    return ResponsesWriter(begun, None, READING, end)


def events(data: bytes) -> list[Any]:
    found = []
    for written in filter(None, data.decode().split("\n\n")):
        name, _, body = written.partition("\ndata: ")
        event = json.loads(body)
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def streamed(pieces: list[str], finish: FinishReason = FinishReason.STOP) -> list[Any]:
    made = writer()
    data = b"".join(made.events([Delta(0, piece, [5])]) for piece in pieces)
    data += made.events([Delta(0, "", finish=finish)])
    return events(data + made.end(USAGE))


def whole(text: str, finish: FinishReason = FinishReason.STOP) -> Any:
    return json.loads(b"".join(writer().body([Delta(0, text, [5], finish=finish)], USAGE)))


def test_a_response_whole() -> None:
    found = whole(f"<think>hm</think>Well. {CALL}")
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    thought, message, call = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"] == [{"type": "output_text", "text": "Well. ", "annotations": [], "logprobs": []}]
    assert (call["name"], call["arguments"], call["status"]) == ("now", '{"zone": "UTC"}', "completed")
    assert len({item["id"] for item in found["output"]} | {call["call_id"]}) == 4
    assert (found["status"], found["error"], found["incomplete_details"]) == ("completed", None, None)
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 2}
    assert found["usage"]["total_tokens"] == 8
    client = ClientResponse.model_validate({**found, "usage": None})
    assert client.output_text == "Well. "


def test_an_output_that_is_cut_is_incomplete() -> None:
    found = whole("so far", FinishReason.LENGTH)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"


def test_events_come_in_the_order_of_openais() -> None:
    found = streamed(["<think>hm", "</think>We", f"ll. {CALL}"])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["output_index"] for event in found if event["type"].endswith("item.done")] == [0, 1, 2]
    assert found[-1]["response"]["output"] == whole(f"<think>hm</think>Well. {CALL}")["output"]


def test_a_stream_that_fails_says_so() -> None:
    made = writer()
    made.events([Delta(0, "a")])
    (event,) = events(made.failure(ApiError(500, "the model failed", code="model_error")))
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "the model failed"}
    assert events(writer().failure(ApiError(503, "x")))[0]["type"] == "response.created"


@given(
    st.lists(st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "a", " ", "\n", "{", "<"]), max_size=8),
    st.lists(st.integers(0, 120)),
)
def test_deltas_add_up_to_the_whole(written: list[str], places: list[int]) -> None:
    text = "".join(written)
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    found = streamed([text[start:end] for start, end in zip([0, *ends], ends, strict=False)])
    output = found[-1]["response"]["output"]
    assert output == whole(text)["output"]
    for index, item in enumerate(output):
        deltas = [event for event in found if event.get("output_index") == index and "delta" in event]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == said
        assert {event["item_id"] for event in deltas} == {item["id"]}


# -- items ------------------------------------------------------------------------------------------------------------


def test_items_are_messages() -> None:
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]
    call = {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}", "id": "x", "status": "completed"}
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}],
        },
        call,
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "b", "output": "noon"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "now"}]},
    ]
    found = messages_of(items)
    assert [one["role"] for one in found] == ["developer", "user", "assistant", "tool", "tool"]
    assert found[2]["reasoning_content"] == "hm"
    assert found[2]["content"] == "Well."
    assert [one["id"] for one in found[2]["tool_calls"]] == ["a", "b"]
    assert [(one["tool_call_id"], one["content"]) for one in found[3:]] == [("b", "noon"), ("a", "now")]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "boss", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x", "bold": True}]}, "input[0].content[0].bold"),
        ({"role": "user", "content": "x", "weight": 1}, "input[0].weight"),
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "name": "f", "arguments": {}, "call_id": "a"}, "input[0].arguments"),
        ({"type": "function_call_output", "call_id": "a"}, "input[0].output"),
        ({"type": "reasoning", "summary": 5}, "input[0].summary"),
        ({"type": "reasoning", "summary": []}, "input"),
    ],
)
def test_items_that_are_none(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as found:
        messages_of([item])
    assert found.value.error.param == param


def test_what_is_said_goes_back_as_it_came() -> None:
    ended: list[Response] = []
    writer(ended).body([Delta(0, f"<think>hm</think>Well. {CALL}", finish=FinishReason.STOP)], USAGE)
    (message,) = messages_of_output(ended[0].output)
    again = messages_of(msgspec.to_builtins(ended[0].output))
    assert again == [message]
    assert messages_of_output([]) == [{"role": "assistant", "content": ""}]


def test_instructions_join_the_systems_message() -> None:
    asked = [{"role": "user", "content": "hi"}]
    assert with_instructions(None, asked) == asked
    assert with_instructions("Be brief.", asked) == [{"role": "system", "content": "Be brief."}, *asked]
    joined = with_instructions("Be brief.", [{"role": "developer", "content": "In French."}, *asked])
    assert joined == [{"role": "developer", "content": "Be brief.\n\nIn French."}, *asked]


def test_a_request_is_a_chat() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": None}
    request = ResponsesRequest(
        input="x",
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        text=TextOptions(format={"type": "json_schema", "name": "a", "schema": {}, "strict": True}),
        max_output_tokens=5,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        seed=3,
    )
    chat = chat_of(request, [{"role": "user", "content": "x"}])
    assert chat.tools == [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {}, "strict": True},
    }
    assert (chat.max_completion_tokens, chat.logprobs, chat.top_logprobs, chat.seed) == (5, True, 2, 3)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    chat = chat_of(msgspec.structs.replace(request, tool_choice=allowed), [])
    assert chat.tool_choice == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }


def test_every_field_of_a_body_is_read() -> None:
    folder = Path(request.__file__).parent
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py") if path.name != "request.py"]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for body in (ResponsesRequest, TextOptions, request.ReasoningOptions, request.ResponsesStreamOptions):
        assert body.__struct_config__.forbid_unknown_fields
        fields = {field.name for field in msgspec.structs.fields(body)}
        assert fields - read - set(ALIKE) <= requests.WITHOUT_EFFECT.keys()
    assert set(ALIKE) <= {field.name for field in msgspec.structs.fields(requests.ChatRequest)}


def test_errors_have_the_names_of_responses() -> None:
    error = in_words_of_responses(ApiError(400, "`messages[3].tool_calls` no", param="messages[3].tool_calls"))
    assert (error.error.param, str(error)) == ("input.tool_calls", "`input.tool_calls` no")
    error = in_words_of_responses(ApiError(400, "x", param="tools[1].function.strct", code="c"))
    assert (error.error.param, error.error.code) == ("tools[1].strct", "c")


# -- the store --------------------------------------------------------------------------------------------------------


def entry(size: int) -> StoredResponse:
    return StoredResponse(b"x" * (size - 512), b"", b"")


def test_responses_are_their_owners() -> None:
    store = ResponseStore(10_000, 60)
    assert store.put(b"a", "one", entry(1000))
    assert store.get(b"a", "one") is not None
    assert store.get(b"b", "one") is None
    assert not store.delete(b"b", "one")
    assert store.delete(b"a", "one")
    assert store.get(b"a", "one") is None
    assert store.num_bytes == 0


def test_responses_leave_after_their_time() -> None:
    now = 0.0
    store = ResponseStore(10_000, 60, lambda: now)
    store.put(b"a", "one", entry(1000))
    now = 50.0
    store.put(b"a", "two", entry(1000))
    assert store.get(b"a", "one") is not None
    now = 61.0
    assert store.get(b"a", "one") is None
    assert store.get(b"a", "two") is not None
    assert store.num_bytes == 1000


def test_who_keeps_the_most_loses_the_oldest() -> None:
    store = ResponseStore(10_000, 60)
    store.put(b"a", "mine", entry(1000))
    for number in range(30):
        assert store.put(b"b", str(number), entry(1000))
    assert store.get(b"a", "mine") is not None
    assert store.get(b"b", "29") is not None
    assert store.get(b"b", "0") is None
    assert not store.put(b"b", "huge", entry(10_001))
    assert store.put(b"c", "large", entry(10_000))
    assert store.num_bytes == 10_000
    assert not ResponseStore(0, 60).is_on


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(512, 5000)), max_size=30))
def test_the_store_keeps_to_its_bytes(puts: list[tuple[bytes, int]]) -> None:
    store = ResponseStore(10_000, 60)
    for number, (owner, size) in enumerate(puts):
        assert store.put(owner, str(number), entry(size))
        assert store.get(owner, str(number)) is not None
        kept = [store.get(owner, str(one)) for one, (owner, _) in enumerate(puts[: number + 1])]
        assert sum(one.size for one in kept if one is not None) == store.num_bytes <= 10_000


def test_errors_are_in_the_words_of_responses() -> None:
    names = "`messages[3].tool_call_id` names the call 'c7', which no message before it has."
    said = f"{names} Send the assistant's message too."
    error = in_words_of_responses(ApiError(400, said, param="messages[3].tool_call_id", code="invalid_value"))
    assert str(error) == "`input.call_id` names the call 'c7', which no item before it has. Send that too."
    assert error.error.param == "input.call_id"
