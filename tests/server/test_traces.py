"""What the engine core says became of sequences, and the page of a request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.process.traces import PassCounts, SequenceTrace
from phonograph.engine.requests.request import FinishReason, SamplingParams
from server.conftest import TINY_FLAGS, Server, serving
from server.notes import Notes


async def traced(notes: Notes, count: int) -> list[SequenceTrace]:
    for _ in range(500):
        if len(notes.traces) >= count:
            return notes.traces
        await asyncio.sleep(0.01)
    raise AssertionError(notes.traces)


def arguments(device: str) -> EngineArguments:
    options = EngineOptions(max_seqs=2, max_len=64, max_tokens=16, verify="off")
    return EngineArguments(shape="tiny", device=device, options=options)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_passes_are_counted_and_have_reasons(device: str) -> None:
    async def work() -> list[SequenceTrace]:
        notes = Notes()
        async with AsyncLLM(arguments(device), observers=[notes]) as llm:
            params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
            async for _ in llm.generate(list(range(1, 40)), params):
                pass
            return await traced(notes, 1)

    (found,) = asyncio.run(work())
    assert (found.finish, found.prompt_tokens, found.output_tokens) == (FinishReason.LENGTH, 39, 20)
    assert found.admitted is not None
    assert found.first_token is not None
    assert 0 <= found.admitted < found.first_token <= found.ended
    (prompt,) = found.prompt
    assert (prompt.phase, prompt.total) == ("prefill", 3), "39 tokens, at most 16 a step"
    (output,) = found.output
    assert output.phase == "decode"
    assert 19 <= output.total <= 22, "one for each token but the first, and what was launched ahead of the end"
    if device == "emulated":
        assert output == PassCounts("decode", output.total, {})
    else:
        assert output.eager == {"disabled": output.total}
        assert output.details == {"disabled": "the backend of decode is disabled"}
        assert prompt.details == {"disabled": "the backend of prefill is disabled"}


def test_who_waits_has_waited_and_who_leaves_is_cancelled() -> None:
    async def work() -> list[SequenceTrace]:
        notes = Notes()
        async with AsyncLLM(arguments("cpu"), observers=[notes]) as llm:
            long = SamplingParams(max_tokens=50, ignore_eos=True)
            running = [llm.submit([[1, 2]], long, request_id=f"r{n}") for n in range(4)]
            await running[0].take()
            running[0].close()
            running[3].close()
            for one in running[1:3]:
                await one.whole()
            await traced(notes, 4)
            await llm.check()
            return notes.traces

    found = {trace.request_id: trace for trace in asyncio.run(work())}
    assert {name: trace.finish.value for name, trace in found.items()} == {
        "r0": "cancelled",
        "r1": "length",
        "r2": "length",
        "r3": "cancelled",
    }
    assert found["r3"].admitted is None
    assert (found["r3"].prompt, found["r3"].output) == ((), ())
    assert found["r2"].admitted is not None
    assert found["r1"].admitted is not None
    assert found["r2"].admitted > found["r1"].admitted


def test_n_choices_have_a_trace_each_and_a_stop_string_ends_one(tiny_model: Any) -> None:
    async def work() -> list[SequenceTrace]:
        notes = Notes()
        options = EngineOptions(max_seqs=4, max_len=64)
        async with AsyncLLM(EngineArguments(str(tiny_model), None, "cpu", options), observers=[notes]) as llm:
            params = SamplingParams(max_tokens=30, n=3, logit_bias={32: 100.0}, stop=("AAA",))
            await llm.submit([[1, 2, 3]], params).whole()
            return list(await traced(notes, 3))

    found = asyncio.run(work())
    assert sorted(trace.index for trace in found) == [0, 1, 2]
    assert {trace.finish for trace in found} == {FinishReason.STOP}


def test_the_page_of_a_request(tiny_server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    name = tiny_server.post("/v1/completions", body).json()["id"]
    deadline = time.monotonic() + 10
    while (story := tiny_server.get(f"/request.json?id={name}").json())["line"]["state"] == "active":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert story["line"]["state"] == "length"
    (trace,) = story["traces"]
    assert (trace["output_tokens"], trace["prompt_tokens"]) == (6, 3)
    assert trace["prompt"][0]["phase"] == "prefill"
    assert name in [line["id"] for line in tiny_server.get("/status.json").json()["requests"]]
    page = tiny_server.get(f"/requests/{name}")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    missing = tiny_server.get("/request.json?id=nobody")
    assert missing.status_code == 404
    assert "of the latest 512 none is called so" in missing.json()["error"]["message"]


def test_figures_of_requests_need_the_key_and_the_page_does_not() -> None:
    with serving("--shape", "tiny", *TINY_FLAGS, "--api-key", "secret") as server:
        assert server.get("/requests/any").status_code == 200
        assert server.get("/requests").status_code == 401
        assert server.get("/request.json?id=any").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/request.json?id=any", headers=key, timeout=60).status_code == 404
