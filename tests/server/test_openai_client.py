"""The real `openai` client against a server with the default model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import openai
import pytest

from server.conftest import Server

MODEL = "SmolLM2-135M-Instruct"
ANSWER = "The capital of France is Paris."
QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


@pytest.fixture(scope="module")
def client(real_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_it_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert done.choices[0].message.content == ANSWER
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (37, 8, 45)


def test_chat_as_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER
    assert len(chunks) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 45


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/serve-a-model.md"])
def test_the_lines_of_a_page(page: str, real_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "OpenAI(" in block)
    exec(compile(code.replace("http://127.0.0.1:8000", real_server.url), page, "exec"), {})
    assert capsys.readouterr().out == ANSWER


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_many_at_once_with_the_async_client(real_server: Server) -> None:
    async def work() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key="none") as client:

            async def ask() -> str | None:
                done = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
                return done.choices[0].message.content

            async def stream() -> str | None:
                found = await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, temperature=0, stream=True, n=2
                )
                texts = ["", ""]
                async for chunk in found:
                    texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                assert texts[0] == texts[1]
                return texts[0]

            return await asyncio.gather(*(ask() for _ in range(4)), *(stream() for _ in range(2)))

    assert asyncio.run(work()) == [ANSWER] * 6


def test_completions_of_texts_and_of_token_ids(client: openai.OpenAI, real_server: Server) -> None:
    text = "One, two, three,"
    ids = real_server.tokens(text)
    one = client.completions.create(model=MODEL, prompt=text, temperature=0, max_tokens=4)
    assert one.choices[0].text == " four, five,"
    assert one.choices[0].finish_reason == "length"
    for prompt in ([text, text], [ids, ids]):
        both = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4, n=2)
        assert [(choice.index, choice.text) for choice in both.choices] == [(i, " four, five,") for i in range(4)]
        assert both.usage is not None
        assert both.usage.prompt_tokens == 2 * len(ids)
    stream = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == " four, five,"


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    for stream in (False, True):
        found = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stop=["never", " is Par"], stream=stream
        )
        if isinstance(found, openai.Stream):
            text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
        else:
            text = found.choices[0].message.content or ""
            assert found.choices[0].finish_reason == "stop"
        assert text == "The capital of France"


def test_a_seed_gives_the_same_answer_and_another_another(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str:
        done = client.completions.create(model=MODEL, prompt="Once upon a time", seed=seed, max_tokens=12)
        return done.choices[0].text

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_a_bias_decides(client: openai.OpenAI, real_server: Server) -> None:
    (token,) = real_server.tokens(" yes")
    done = client.completions.create(
        model=MODEL, prompt="Is it so?", temperature=0, max_tokens=3, logit_bias={str(token): 100}
    )
    assert done.choices[0].text == " yes yes yes"


def test_fields_beyond_openais(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=12,
        extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "ignore_eos": True, "stop_token_ids": [0]},
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == 12
    assert (done.choices[0].message.content or "").startswith(ANSWER)


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here") as missing:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="context of 512") as long:
        client.completions.create(model=MODEL, prompt="word " * 600)
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "prompt"


WEATHER: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def test_tools_with_a_model_whose_template_has_none(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    asked: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Weather in Paris?"}]
    done = client.chat.completions.create(
        model=MODEL,
        messages=asked,
        tools=[WEATHER],
        temperature=0,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    assert done.choices[0].finish_reason == "tool_calls"
    calls = done.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 3
    answered = client.chat.completions.create(
        model=MODEL,
        messages=[
            *asked,
            done.choices[0].message.model_dump(),  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"},
        ],
        tools=[WEATHER],
        temperature=0,
        max_tokens=20,
    )
    assert answered.choices[0].message.content


def test_an_answer_fits_its_schema(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}}
    done = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        extra_body={"response_format": wanted},
    )
    assert list(json.loads(done.choices[0].message.content or "")) == ["city"]


def test_logprobs_come_with_the_answer(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2
    )
    told = done.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert "".join(one.token for one in told.content) == done.choices[0].message.content
    for one in told.content:
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].token == one.token  # greedy
        assert one.logprob == one.top_logprobs[0].logprob <= 0
    texts = client.completions.create(model=MODEL, prompt="Once", temperature=0, max_tokens=4, logprobs=3)
    assert texts.choices[0].logprobs is not None
    assert len(texts.choices[0].logprobs.token_logprobs or []) == 4
