"""Many clients at once, some of whom leave, stall or ask too much: the others' answers are right, nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.requests.request import FinishReason, SamplingParams
from phonograph.server.app import create_app
from phonograph.server.options import ServerOptions
from server.clients import Connection, Front, front
from server.conftest import Server
from server.notes import Notes

T = TypeVar("T")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "x" * 300}
NUM_CLIENTS = 200
NUM_TOKENS = 80
GREEDY = {"temperature": 0, "ignore_eos": True}
# Eight sequences fit in while they are short, and not when they are long: decodes run out of pages, some are preempted.
OPTIONS = EngineOptions(max_seqs=8, max_tokens=64, max_len=256, page_size=8, cache_tokens=880)


class Loop:
    """A front that all tests of this module share, and the event loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, found: Front, notes: Notes) -> None:
        self.front = found
        self.notes = notes
        self.llm = found.llm
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, 120))

    async def open(self, body: dict[str, Any], **options: Any) -> Connection:
        return await Connection.open(self.front.port, TEXT, body, **options)


@pytest.fixture(scope="module")
def loop(tiny_model: Path) -> Iterator[Loop]:
    notes = Notes()
    llm = AsyncLLM(EngineArguments(str(tiny_model), device="cpu", options=OPTIONS), max_queue=300, observers=[notes])
    with asyncio.Runner() as runner:
        runner.run(llm.start())
        context = front(llm, ServerOptions(port=0), send_buffer=4096)
        yield Loop(runner, runner.run(context.__aenter__()), notes)
        runner.run(context.__aexit__(None, None, None))
        runner.run(llm.stop())


async def all_is_given_back(llm: AsyncLLM) -> None:
    """Nothing is lost, and nothing is held but by the prefix cache."""
    for _ in range(500):
        found = await llm.check()
        counts = found.counts
        if counts.free_pages + counts.cached_pages == found.num_pages and not counts.running + counts.waiting:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(found)


def prompts() -> list[str]:
    numbers = random.Random(3)
    shared = "".join(numbers.choices("abcdefgh", k=24))
    return [shared[: numbers.randrange(24)] + "".join(numbers.choices("xyz ", k=40)) for _ in range(NUM_CLIENTS)]


def test_two_hundred_clients_of_whom_a_third_leaves(loop: Loop, offline: LLM) -> None:
    given = prompts()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    expected = [done.text for done in offline.generate(given, params)]

    async def client(number: int) -> str | None:
        body = {"prompt": given[number], "max_tokens": NUM_TOKENS, "stream": number % 2 == 0, **GREEDY}
        connection = await loop.open(body)
        try:
            if number % 3 == 0:  # leaves in the middle, or before anything came
                if body["stream"]:
                    async for _ in connection.events():
                        break
                return None
            if body["stream"]:
                return "".join([event["choices"][0]["text"] async for event in connection.events()])
            return str((await connection.body())["choices"][0]["text"])
        finally:
            await connection.close()

    async def work() -> list[str | None]:
        found = await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
        await all_is_given_back(loop.llm)
        return found

    found = loop.run(work())
    assert found == [None if number % 3 == 0 else text for number, text in enumerate(expected)]
    assert loop.llm.num_active == 0
    assert loop.llm.stats is not None
    assert loop.llm.stats.preemptions > 0


def test_who_leaves_while_the_whole_answer_is_made_frees_his_place(loop: Loop) -> None:
    async def work() -> None:
        connection = await loop.open({"prompt": "abc", "max_tokens": 200, "n": 8, **GREEDY})
        while not loop.llm.num_active:
            await asyncio.sleep(0.001)
        await connection.close()
        while loop.llm.num_active:
            await asyncio.sleep(0.001)
        await all_is_given_back(loop.llm)

    loop.run(asyncio.wait_for(work(), 20))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("waiting", [1, 3])
@pytest.mark.parametrize("size", [10, 300_000])
def test_who_leaves_with_pipelined_requests_behind_frees_his_place(
    loop: Loop, caplog: pytest.LogCaptureFixture, is_streamed: bool, waiting: int, size: int
) -> None:
    """A body that is too large to wait is dropped, and the client is noticed all the same."""
    body = {"prompt": "abc", "max_tokens": 200, "n": 8, "stream": is_streamed, **GREEDY}
    later = {"prompt": "x", "max_tokens": 200, "user": "x" * size, **GREEDY}
    before = len(loop.notes.events)

    async def work() -> None:
        connection = await loop.open(body)
        while not loop.llm.num_active:
            await asyncio.sleep(0.001)
        for _ in range(waiting):
            connection.send(TEXT, later)
        await asyncio.sleep(0.02)
        await connection.close()
        while loop.llm.num_active:
            await asyncio.sleep(0.001)
        await all_is_given_back(loop.llm)

    loop.run(asyncio.wait_for(work(), 20))
    told = [event[1] for event in loop.notes.events[before:] if event[0] == "finished"]
    assert told == [FinishReason.CANCELLED] * 8
    assert not caplog.records


@pytest.mark.parametrize(("cache_tokens", "says"), [(64, "64"), (None, "a context of 256 has room for 255")])
def test_a_prompt_that_does_not_fit_is_told_so_whatever_it_does_not_fit(
    tiny_model: Path, cache_tokens: int | None, says: str
) -> None:
    options = EngineOptions(max_seqs=2, max_len=256, page_size=8, cache_tokens=cache_tokens)
    llm = AsyncLLM(EngineArguments(str(tiny_model), device="cpu", options=options))

    async def work() -> None:
        await llm.start()
        async with front(llm, ServerOptions(port=0)) as served:
            for path, body in (
                (TEXT, {"prompt": "x" * 300}),
                (CHAT, {"messages": [MESSAGE]}),
                (TEXT, {"prompt": [7] * 300}),
            ):
                connection = await Connection.open(served.port, path, {**body, "max_tokens": 1})
                error = (await connection.body())["error"]
                assert connection.status == 400
                assert error["code"] == "context_length_exceeded"
                assert error["param"] == ("prompt" if path == TEXT else "messages")
                await connection.close()
            if cache_tokens is not None:
                connection = await Connection.open(served.port, TEXT, {"prompt": "x" * 100, "max_tokens": 1})
                error = (await connection.body())["error"]
                assert error["code"] == "context_length_exceeded"
                assert says in error["message"]
                await connection.close()
        await llm.stop()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_slow_reader_slows_nobody_and_misses_nothing(loop: Loop, offline: LLM) -> None:
    body = {"prompt": "abc", "max_tokens": 200, "n": 8, "stream": True, **GREEDY}
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, n=8)
    expected = [done.text for done in offline.generate("abc", params)]

    async def work() -> list[str]:
        slow = await loop.open(body, receive_buffer=4096)
        await slow.head()
        while loop.llm.num_active:  # the engine finishes, though nobody reads
            await asyncio.sleep(0.01)
        quick = await loop.open({"prompt": "abc", "max_tokens": 4, **GREEDY})
        assert len((await quick.body())["choices"]) == 1
        texts, num_events = [""] * 8, 0
        async for event in slow.events():
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            num_events += 1
        assert num_events < 8 * 200 / 2  # what nobody read was put together
        await slow.close()
        return texts

    assert loop.run(work()) == expected


def test_who_never_reads_is_dropped(loop: Loop) -> None:
    async def work() -> None:
        body = {"prompt": "abc", "max_tokens": 200, "n": 8, "stream": True, **GREEDY}
        async with front(loop.llm, ServerOptions(port=0, stall_timeout=0.5), send_buffer=4096) as impatient:
            stuck = await Connection.open(impatient.port, TEXT, body, receive_buffer=4096)
            await stuck.head()
            while loop.llm.num_active:
                await asyncio.sleep(0.01)
            await asyncio.sleep(2)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ValueError)):
                _ = [event async for event in stuck.events()]
            await stuck.close()

    loop.run(work())


def over(llm: AsyncLLM, options: ServerOptions) -> httpx.AsyncClient:
    """A client of another app over the same engine, without sockets."""
    transport = httpx.ASGITransport(create_app(llm, options))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def test_a_request_that_takes_too_long_is_ended(loop: Loop) -> None:
    async def work() -> None:
        async with over(loop.llm, ServerOptions(request_timeout=0.05)) as client:
            body = {"prompt": "abc", "max_tokens": 250, "n": 8, **GREEDY}
            late = await client.post(TEXT, json=body)
            assert late.status_code == 504
            assert late.json()["error"]["code"] == "deadline_exceeded"
            assert "did not finish within its 0.05 s" in late.json()["error"]["message"]
            stream = await client.post(TEXT, json={**body, "stream": True})
            assert stream.status_code in (200, 504)
            assert "deadline_exceeded" in stream.text
        await all_is_given_back(loop.llm)

    loop.run(work())


def test_a_full_queue_gets_a_429(loop: Loop) -> None:
    async def work() -> None:
        running = loop.llm.submit([[1, 2]] * 300, SamplingParams(max_tokens=250, ignore_eos=True))
        async with over(loop.llm, ServerOptions()) as client:
            refused = await client.post(TEXT, json={"prompt": "abc", "n": 9})
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        running.close()
        await all_is_given_back(loop.llm)

    loop.run(work())


def test_what_never_reaches_the_engine_is_counted_once(loop: Loop) -> None:
    async def work() -> None:
        async with over(loop.llm, ServerOptions()) as client:
            for body in ({}, {"prompt": "x" * 300}, {"prompt": [999]}, {"prompt": "x", "n": 500}):
                assert (await client.post(TEXT, json=body)).status_code == 400

    loop.notes.events.clear()
    loop.run(work())
    assert loop.notes.events == [("rejected", "invalid")] * 4


def test_without_a_key_nobody_gets_in(loop: Loop) -> None:
    async def work() -> None:
        async with over(loop.llm, ServerOptions(api_keys=("first", "sécond"))) as client:
            assert (await client.get("/health")).status_code == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"Authorization": "x"}):
                refused = await client.post(TEXT, json={"prompt": "abc"}, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await client.get("/v1/models", headers={"Authorization": "Bearer first"})).status_code == 200
            second = {b"Authorization": "Bearer sécond".encode()}
            assert (await client.get("/v1/models", headers=second)).status_code == 200
            # A browser asks for a name and a password.
            page = await client.get("/openapi.json")
            assert page.headers["www-authenticate"] == 'Basic realm="phonograph"'
            assert (await client.get("/openapi.json", auth=("anybody", "first"))).status_code == 200
            assert (await client.get("/openapi.json", auth=("first", ""))).status_code == 401

    loop.run(work())


def resident(pid: int) -> int:
    """Kilobytes of memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def test_memory_is_flat(tiny_server: Server) -> None:
    port = int(tiny_server.url.rpartition(":")[2])

    async def requests(count: int) -> None:
        for _ in range(0, count, 20):
            connections = [
                await Connection.open(port, TEXT, {"prompt": f"request {i}", "max_tokens": 2, **GREEDY})
                for i in range(20)
            ]
            for connection in connections:
                assert await connection.head() == 200
                await connection.close()

    asyncio.run(requests(300))
    sizes = [(resident(tiny_server.pid), resident(tiny_server.core_pid))]
    for _ in range(5):
        asyncio.run(requests(100))
        sizes.append((resident(tiny_server.pid), resident(tiny_server.core_pid)))
    # An allocator grows in leaps now and then. What a request leaves behind, 5 kB of it, grows every time.
    for process in zip(*sizes, strict=True):
        assert min(after - before for before, after in pairwise(process)) < 500, process
