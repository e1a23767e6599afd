"""LoadTest: sends each request when it is due, shows progress, and watches its own lag."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from phonograph.bench.serving.client import Endpoint, new_session, send
from phonograph.bench.serving.outcome import Outcome
from phonograph.bench.workloads import Job

_TICK = 0.005


@dataclass
class LoadTest:
    """One run over some jobs; `outcomes` fills up as responses end."""

    endpoint: Endpoint
    jobs: Sequence[Job]
    concurrency: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    num_sent: int = 0
    lags: list[float] = field(default_factory=list)
    """How late the event loop was, every few milliseconds: what is read late looks as if it had come late."""
    is_interrupted: bool = False

    async def run(self, *, shows_progress: bool) -> None:
        """Send all; an interruption ends what runs, and what ended before is kept."""
        start = time.perf_counter()
        gate = asyncio.Semaphore(self.concurrency) if self.concurrency else contextlib.nullcontext()
        async with new_session() as session:
            watchers = [asyncio.create_task(self._watch_lag())]
            if shows_progress:
                watchers.append(asyncio.create_task(self._show(start)))
            tasks = [asyncio.create_task(self._serve(session, job, gate, start)) for job in self.jobs]
            try:
                await asyncio.gather(*tasks)
            except asyncio.CancelledError:
                self.is_interrupted = True
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                for watcher in watchers:
                    watcher.cancel()

    async def _serve(
        self,
        session: aiohttp.ClientSession,
        job: Job,
        gate: contextlib.AbstractAsyncContextManager[None],
        start: float,
    ) -> None:
        await asyncio.sleep(max(0.0, job.due - (time.perf_counter() - start)))
        async with gate:
            self.num_sent += 1
            self.outcomes.append(await send(session, self.endpoint, job, start))

    async def _watch_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK)
            self.lags.append(time.perf_counter() - before - _TICK)

    async def _show(self, start: float) -> None:
        """One line, written again and again."""
        while True:
            await asyncio.sleep(0.25)
            ended = len(self.outcomes)
            tokens = sum(one.output_tokens for one in self.outcomes)
            failed = sum(bool(one.error) for one in self.outcomes)
            line = (
                f"{time.perf_counter() - start:6.1f} s  {ended:,} of {len(self.jobs):,} ended, "
                f"{self.num_sent - ended:,} running, {tokens:,} tokens, {failed:,} failed"
            )
            print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)
