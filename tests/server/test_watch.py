"""Watching a real core in its own process: what is counted arrives, and survives the core's death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.types import Message

from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.process.client import Restarts
from phonograph.engine.requests.request import SamplingParams
from phonograph.server.observe.metrics import Metrics
from phonograph.server.observe.status import Status
from phonograph.server.observe.watch import Watch

ARGUMENTS = EngineArguments(
    shape="tiny",
    device="emulated",
    options=EngineOptions(max_seqs=2, max_tokens=16, max_len=64, page_size=8),
)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


async def fetched(app: Starlette, path: str) -> bytes:
    """The body that an app answers with, without a server between."""
    body = b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "root_path": ""}
    await app(scope, receive, send)
    return body


async def status_of(app: Starlette) -> Status:
    return msgspec.json.decode(await fetched(app, "/status.json"), type=Status)


async def counters(app: Starlette) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families((await fetched(app, "/metrics")).decode())
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in families
        if family.type == "counter" and family.name.startswith("phonograph:")
        for sample in family.samples
    }


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():
        await asyncio.sleep(0.05)


def test_a_core_is_watched_through_its_lives() -> None:
    async def generate(llm: AsyncLLM) -> None:
        async for _ in llm.generate([5, 9, 200, 3], GREEDY):
            pass

    async def work() -> None:
        metrics = Metrics()
        llm = AsyncLLM(ARGUMENTS, observers=[metrics], restarts=Restarts(wait=0.01))
        await llm.start()
        async with Watch(llm, metrics, "tiny") as watch:
            app = Starlette(routes=watch.routes())
            await generate(llm)

            async def has_generated(num_tokens: int) -> bool:
                return (await status_of(app)).totals.generated_tokens >= num_tokens

            await until(lambda: has_generated(10))
            status, before = await status_of(app), await counters(app)
            assert status.facts is not None
            assert (status.facts.model, status.health.state, status.facts.max_seqs) == ("tiny", "ready", 2)
            assert (status.totals.requests, status.totals.finished["length"]) == (1, 1)
            assert (status.latencies.first_token.count, status.latencies.token_gap.count) == (1, 9)
            assert status.phases[0].replays == 9
            assert status.history.rows

            assert llm.core_pid is not None
            os.kill(llm.core_pid, signal.SIGKILL)
            await until(lambda: _is(llm.health.state == "down"))
            await until(lambda: _is(llm.health.state == "ready"))
            await generate(llm)
            await until(lambda: has_generated(20))
            status, after = await status_of(app), await counters(app)
            assert status.totals.core_restarts == 1
            assert status.phases[0].replays == 18
            assert any("SIGKILL" in incident.text for incident in status.incidents)
            assert [name for name in before if after[name] < before[name]] == []
        await llm.stop()

    asyncio.run(asyncio.wait_for(work(), 120))


async def _is(value: bool) -> bool:
    return value
