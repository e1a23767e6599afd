"""/v1/embeddings on a live server: every form of input, the `openai` client, bounds and refusals."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from server import tiny
from server.conftest import TINY_FLAGS, Server, serving

pytestmark = pytest.mark.slow

TEXTS = ["one", "another text, which is longer", "x" * 200]


@pytest.fixture(scope="module")
def embedder(tiny_model: Path) -> Iterator[Server]:
    flags = ("--embeddings", "--max-step-tokens", "64", "--max-queue", "2048", "--served-name", "tiny")
    with serving("--model", str(tiny_model), *TINY_FLAGS, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def embedding_llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, device="cpu", options=EngineOptions(max_seqs=8, max_tokens=64, embeddings=True))


@pytest.fixture(scope="module")
def client(embedder: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0, timeout=60)


def post(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/embeddings", body)


def vectors(found: httpx.Response) -> Any:
    assert found.status_code == 200, found.text
    assert [one["index"] for one in found.json()["data"]] == list(range(len(found.json()["data"])))
    return np.asarray([one["embedding"] for one in found.json()["data"]], dtype=np.float32)


def test_the_openai_client(client: openai.OpenAI, embedding_llm: LLM) -> None:
    """It asks for base64 unless told otherwise, and decodes it."""
    done = client.embeddings.create(model="tiny", input=TEXTS)
    found = np.asarray([one.embedding for one in done.data], dtype=np.float32)
    np.testing.assert_allclose(found, embedding_llm.embed(TEXTS), atol=1e-5)
    assert [one.index for one in done.data] == [0, 1, 2]
    assert (done.object, done.data[0].object, done.model) == ("list", "embedding", "tiny")
    total = sum(len(text) for text in TEXTS)  # its tokens are bytes
    assert (done.usage.prompt_tokens, done.usage.total_tokens) == (total, total)


def test_the_async_client_beside_chats(embedder: Server, embedding_llm: LLM) -> None:
    async def work() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
            chats = [
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": f"tell {n}"}], max_tokens=40
                )
                for n in range(6)
            ]
            embeddings = [client.embeddings.create(model="tiny", input=f"text {n}") for n in range(12)]
            return await asyncio.gather(*embeddings, *chats)

    found = asyncio.run(work())
    for place, done in enumerate(found[:12]):
        expected = embedding_llm.embed(f"text {place}")[0]
        np.testing.assert_allclose(np.asarray(done.data[0].embedding), expected, atol=1e-5)
    assert all(done.choices[0].finish_reason for done in found[12:])


def test_every_form_of_input(embedder: Server, embedding_llm: LLM) -> None:
    assert embedding_llm.tokenizer is not None
    ids = [embedding_llm.tokenizer.encode(text) for text in TEXTS]
    expected = vectors(post(embedder, input=TEXTS))
    assert np.array_equal(vectors(post(embedder, input=ids)), expected)
    assert np.array_equal(vectors(post(embedder, input=TEXTS[0]))[0], expected[0])
    assert np.array_equal(vectors(post(embedder, input=ids[1]))[0], expected[1])
    assert np.array_equal(vectors(post(embedder, input=TEXTS, model=None, user="me", dimensions=64)), expected)


def test_base64_is_the_same_numbers(embedder: Server) -> None:
    plain = vectors(post(embedder, input=TEXTS))
    found = post(embedder, input=TEXTS, encoding_format="base64").json()["data"]
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), dtype="<f4") for one in found]
    assert np.array_equal(np.stack(decoded), plain)


def test_pooling_and_length(embedder: Server, embedding_llm: LLM) -> None:
    last = vectors(post(embedder, input=TEXTS, pooling="last", normalize=False))
    np.testing.assert_allclose(last, embedding_llm.embed(TEXTS, "last", normalize=False), atol=1e-5)
    unit = vectors(post(embedder, input=TEXTS))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": "a", "dimensions": 32}, "dimensions", "have 64 numbers"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "pooling": "max"}, "pooling", "max"),
        ({"input": "a", "model": "other"}, "model", "not served here"),
        ({"input": []}, "input", "length"),
        ({"input": [[]]}, "input[0]", "length"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", 3]}, "input", "mixes"),
        ({"input": [99999]}, "input", "vocabulary"),
        ({"input": "x" * 600}, "input", "Shorten"),
        ({"input": "x" * 100_000}, "input", "at most"),
        ({"input": ["a"] * 3000}, "input", "at most"),
        ({"input": "a", "stream": True}, "stream", "unknown field"),
        ({"input": "a", "truncate_prompt_tokens": 10}, "truncate_prompt_tokens", "whole or refused"),
        ({}, "input", "missing"),
    ],
)
def test_refusals_name_the_field(embedder: Server, body: dict[str, Any], param: str, said: str) -> None:
    found = embedder.post("/v1/embeddings", body)
    assert found.status_code == (404 if param == "model" else 400), found.text
    error = found.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_neutral_fields_are_taken(embedder: Server) -> None:
    assert (
        post(embedder, input="a", priority=0, add_special_tokens=True, truncate_prompt_tokens=None).status_code == 200
    )


def test_ends_of_the_domain(embedder: Server) -> None:
    """One token, the longest prompt, and as many inputs as OpenAI takes in one request."""
    assert vectors(post(embedder, input="a")).shape == (1, 64)
    assert vectors(post(embedder, input="x" * tiny.CONTEXT)).shape == (1, 64)
    many = vectors(post(embedder, input=[f"{place:04}" for place in range(2048)]))
    assert many.shape == (2048, 64)
    assert np.array_equal(many[1234], vectors(post(embedder, input="1234"))[0]) or np.allclose(
        many[1234], vectors(post(embedder, input="1234"))[0], atol=1e-5
    )


def test_a_client_that_leaves_frees_everything(embedder: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{embedder.url}/v1/embeddings", json={"input": ["x" * 500] * 250}, timeout=0.3)
    found = vectors(post(embedder, input=TEXTS))
    assert len(found) == 3


def test_metrics_and_status_show_the_pass(embedder: Server) -> None:
    vectors(post(embedder, input=TEXTS))
    embedder.waits_until("/health", 200)
    text = embedder.get("/metrics").text
    assert 'phase="embed"' in text
    assert any(phase["name"] == "embed" for phase in embedder.get("/status.json").json()["phases"])


def test_without_the_flag_it_says_what_to_do(tiny_server: Server) -> None:
    found = post(tiny_server, input="a")
    assert found.status_code == 400
    assert "--embeddings" in found.json()["error"]["message"]
