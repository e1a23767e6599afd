"""AsyncLLM: a core in a process of its own gives offline's tokens, loses nothing, and comes back when killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from phonograph import CoreError, RequestError, UnavailableError
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.process.client import Restarts
from phonograph.engine.process.generation import Generation
from phonograph.engine.process.health import Health
from phonograph.engine.process.messages import IntegrityReport
from phonograph.engine.requests.request import FinishReason, SamplingParams
from server.notes import Notes

T = TypeVar("T")

ARGUMENTS = EngineArguments(
    shape="tiny",
    device="cpu",
    options=EngineOptions(max_seqs=4, max_tokens=32, max_len=256, page_size=8, cache_tokens=640),
)
PROMPTS = [[5, 9, 200, 3], [7], list(range(20, 61)), [11] * 9, list(range(100, 117))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


class Served:
    """An AsyncLLM and the event loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, llm: AsyncLLM, notes: Notes) -> None:
        self.llm = llm
        self.notes = notes
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with asyncio.Runner() as runner:
        notes = Notes()
        llm = AsyncLLM(ARGUMENTS, max_queue=12, restarts=Restarts(wait=0.05), observers=[notes])
        runner.run(llm.start())
        yield Served(runner, llm, notes)
        runner.run(llm.stop())
        assert llm.core_pid is None or not is_alive(llm.core_pid)


@pytest.fixture(scope="module")
def offline() -> list[list[int]]:
    return [done.tokens for done in ARGUMENTS.open().generate(PROMPTS, GREEDY)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def all_tokens(generation: Generation) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(generation.num_choices)]
    async with generation:
        async for delta in generation:
            found[delta.choice] += delta.tokens
    return found


async def tokens_of(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return await all_tokens(llm.submit(prompts, params))


async def back(llm: AsyncLLM) -> None:
    """Wait until requests are taken again."""
    while llm.health.state != "ready":
        await asyncio.sleep(0.05)


async def pages_return(llm: AsyncLLM) -> IntegrityReport:
    """Wait until nothing is held but what the prefix cache has."""
    for _ in range(200):
        found = await llm.check()
        if found.counts.free_pages + found.counts.cached_pages == found.num_pages and not found.counts.running:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found)


def test_many_at_once_get_the_tokens_of_offline(served: Served, offline: list[list[int]]) -> None:
    async def work() -> list[list[list[int]]]:
        return await asyncio.gather(*(tokens_of(served.llm, [prompt]) for prompt in PROMPTS))

    assert served.run(work()) == [[tokens] for tokens in offline]
    served.run(pages_return(served.llm))


@pytest.mark.parametrize("second", ["x", "x-1"])
def test_an_id_that_is_being_served_is_refused_and_the_first_goes_on(
    served: Served, offline: list[list[int]], second: str
) -> None:
    async def work() -> list[list[int]]:
        first = served.llm.submit(PROMPTS[:2], GREEDY, request_id="x")
        for prompts in (PROMPTS[2:3], PROMPTS[:3]):
            with pytest.raises(RequestError, match=f"{second}.*: this id is being served already"):
                served.llm.submit(prompts, GREEDY, request_id=second)
            with pytest.raises(RequestError, match="this id is being served already"):
                await served.llm.submit_long(prompts, GREEDY, request_id=second)
        return await all_tokens(first)

    assert served.run(work()) == offline[:2]
    assert served.run(tokens_of(served.llm, PROMPTS[:1])) == offline[:1]
    assert served.llm.num_active == 0
    served.run(pages_return(served.llm))


@pytest.mark.parametrize("wrong", [b"abc", {5: 1}, {3, 5}, 7])
def test_what_is_no_prompt_is_refused(served: Served, wrong: Any) -> None:
    async def work() -> None:
        async for _ in served.llm.generate(wrong, GREEDY):
            pass

    with pytest.raises(RequestError, match="where a prompt belongs"):
        served.run(work())
    with pytest.raises(RequestError, match="where a prompt belongs"):
        served.llm.submit([wrong], GREEDY)


def test_several_prompts_are_one_generation(served: Served, offline: list[list[int]]) -> None:
    assert served.run(tokens_of(served.llm, PROMPTS)) == offline


def test_n_choices_have_numbers_of_their_own(served: Served) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=1, n=3, ignore_eos=True)
    expected = [done.tokens for done in ARGUMENTS.open().generate(PROMPTS[:2], params)]

    async def work() -> tuple[list[list[int]], int]:
        generation = served.llm.submit(PROMPTS[:2], params)
        return await all_tokens(generation), generation.usage.output_tokens

    assert served.run(work()) == (expected, 48)


def test_a_slow_reader_gets_all_in_one_piece(served: Served, offline: list[list[int]]) -> None:
    async def work() -> None:
        generation = served.llm.submit([PROMPTS[2]], GREEDY)
        while generation.num_left:
            await asyncio.sleep(0.01)
        (delta,) = await generation.take()
        assert delta.tokens == offline[2]
        assert delta.finish is FinishReason.LENGTH
        assert await generation.take() == []

    served.run(work())


def test_who_leaves_early_frees_his_pages(served: Served, offline: list[list[int]]) -> None:
    async def work() -> None:
        async with served.llm.submit([PROMPTS[2]], LONG) as generation:
            await generation.take()
        assert served.llm.num_active == 0
        await pages_return(served.llm)
        assert await tokens_of(served.llm, PROMPTS[:1]) == [offline[0]]

    served.run(work())


def test_a_caller_that_stops_listening_cancels(served: Served) -> None:
    async def work() -> None:
        stream = served.llm.generate(PROMPTS[2], LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert served.llm.num_active == 0
        await pages_return(served.llm)

    served.run(work())


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ([[3] * 300], GREEDY, "300 tokens; a context of 256"),
        ([[1, 999]], GREEDY, "token 999 is not in the vocabulary of 256"),
        ([[]], GREEDY, "empty"),
        ([], GREEDY, "0 sequences"),
        ([[1]], SamplingParams(n=99), "99 sequences; expected 1 to 16"),
    ],
)
def test_what_can_not_be_served_is_refused(
    served: Served, prompts: list[list[int]], params: SamplingParams, says: str
) -> None:
    async def work() -> None:
        served.llm.submit(prompts, params)

    with pytest.raises(RequestError, match=says):
        served.run(work())
    assert served.llm.num_active == 0
    assert served.notes.events[-1] == ("rejected", "invalid")


def test_what_only_the_core_refuses_reaches_the_reader(served: Served) -> None:
    async def work() -> None:
        first = served.llm.submit([[1, 2]], LONG, request_id="same")
        # Another front would not know that the id is taken.
        del served.llm._live["same"]
        second = served.llm.submit([[1, 2]], LONG, request_id="same")
        with pytest.raises(RequestError, match="being served already"):
            await second.take()
        served.llm._live["same"] = first
        first.close()

    served.run(work())
    assert served.llm.num_active == 0


def test_a_full_queue_refuses_and_says_when_to_come_back(served: Served) -> None:
    async def work() -> None:
        running = [served.llm.submit([PROMPTS[0]], LONG) for _ in range(16)]
        with pytest.raises(UnavailableError, match="16 sequences run or wait, and at most 16 may") as refused:
            served.llm.submit([PROMPTS[0]], GREEDY)
        assert refused.value.reason == "queue_full"
        assert 1 <= refused.value.retry_after <= 60
        for generation in running:
            generation.close()
        assert len((await tokens_of(served.llm, PROMPTS[:1]))[0]) == 12
        await pages_return(served.llm)

    served.run(work())
    assert ("rejected", "queue_full") in served.notes.events


def test_a_deadline_ends_a_request(served: Served) -> None:
    async def work() -> list[FinishReason | None]:
        generation = served.llm.submit([PROMPTS[0]], LONG, timeout=0.02)
        return [delta.finish async for delta in generation]

    assert served.run(work())[-1] is FinishReason.DEADLINE


def test_the_observer_is_told_everything(served: Served) -> None:
    async def work() -> None:
        await all_tokens(served.llm.submit([PROMPTS[1]], GREEDY, request_id="mine"))

    served.notes.events.clear()
    served.run(work())
    events = served.notes.events
    assert served.notes.names() == ["started", "first_token", *["token_gap"] * 11, "finished"]
    assert events[0] == ("started", "mine")
    assert events[-1][1:5] == (FinishReason.LENGTH, 1, 12, 0)
    assert 0 < events[1][1] <= events[-1][5] < 60


def test_a_killed_core_is_noticed_and_comes_back(served: Served, offline: list[list[int]]) -> None:
    llm = served.llm

    async def work() -> None:
        running = [llm.submit([prompt], LONG) for prompt in PROMPTS]
        await running[0].take()
        pid = llm.core_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for generation in running:
            with pytest.raises(CoreError, match="SIGKILL"):
                await all_tokens(generation)
        assert llm.health.state == "down"
        assert "SIGKILL" in llm.health.reason
        assert llm.num_active == 0
        with pytest.raises(UnavailableError, match="being restarted") as refused:
            llm.submit([PROMPTS[0]], GREEDY)
        assert refused.value.reason == "down"
        await back(llm)
        assert llm.core_pid != pid
        assert await tokens_of(llm, PROMPTS) == offline

    served.run(work())


def test_a_core_that_hangs_is_killed_and_may_stay_down() -> None:
    async def work() -> None:
        llm = AsyncLLM(ARGUMENTS, restarts=Restarts(most=0, silence=0.2))
        await llm.start()
        await asyncio.sleep(0.5)  # with nothing to do it may say nothing
        generation = llm.submit([PROMPTS[0]], LONG)
        await generation.take()
        assert llm.core_pid is not None
        os.kill(llm.core_pid, signal.SIGSTOP)
        with pytest.raises(CoreError, match=r"was silent for 0.2 s; it was killed"):
            await all_tokens(generation)
        assert "it will not be restarted" in llm.health.reason
        with pytest.raises(CoreError, match="checking the engine core"):
            await llm.check()
        await llm.stop()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_draining_finishes_what_runs_and_refuses_what_comes(offline: list[list[int]]) -> None:
    async def work() -> None:
        llm = AsyncLLM(ARGUMENTS)
        await llm.start()
        running = asyncio.create_task(all_tokens(llm.submit(PROMPTS, GREEDY)))
        await asyncio.sleep(0)
        drained = asyncio.create_task(llm.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down") as refused:
            llm.submit([PROMPTS[0]], GREEDY)
        assert refused.value.reason == "draining"
        assert await drained
        assert await running == offline
        # A time that is too short leaves the rest to `stop`.
        llm._health = Health("ready")
        late = llm.submit([PROMPTS[0]], LONG)
        assert not await llm.drain(0)
        await llm.stop()
        with pytest.raises(CoreError, match="shut down"):
            await all_tokens(late)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_start_that_fails_says_why() -> None:
    arguments = EngineArguments(shape="tiny", device="cpu", options=EngineOptions(max_len=1))
    with pytest.raises(CoreError, match="max_len must be a whole number of at least 2"):
        asyncio.run(asyncio.wait_for(AsyncLLM(arguments).start(), 60))


def test_the_core_ends_with_its_front() -> None:
    program = (
        "import asyncio\n"
        "from phonograph.engine.process.async_llm import AsyncLLM\n"
        "from phonograph.engine.process.arguments import EngineArguments\n"
        "async def main():\n"
        "    llm = AsyncLLM(EngineArguments(shape='tiny', device='cpu'))\n"
        "    await llm.start()\n"
        "    print(llm.core_pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        core = int(front.stdout.readline())
        assert is_alive(core)
        front.kill()
    end = time.monotonic() + 10
    while is_alive(core) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(core)


@dataclass(frozen=True)
class FurtherParams(SamplingParams):
    lowest_id: int = 0


def test_a_parameter_that_the_core_would_not_get_is_refused_by_name(served: Served) -> None:
    async def work() -> None:
        with pytest.raises(RequestError, match="FurtherParams has lowest_id") as found:
            served.llm.submit([[1, 2]], FurtherParams(lowest_id=200))
        assert found.value.field == "lowest_id"
        with pytest.raises(RequestError, match="FurtherParams has lowest_id"):
            await served.llm.submit_long([[1, 2]], FurtherParams(lowest_id=200))
        assert served.llm.num_active == 0

    served.run(work())
