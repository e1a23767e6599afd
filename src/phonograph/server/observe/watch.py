"""Watch: follows a running engine, and keeps its stats for metrics and status page."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.routing import Route

import phonograph
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.server.observe.exposition import Exposition
from phonograph.server.observe.incidents import Incidents
from phonograph.server.observe.metrics import Metrics
from phonograph.server.observe.status import ServerInfo, StatusKeeper
from phonograph.server.observe.status_page import routes

_POLL_INTERVAL = 1.0
"""Poll interval, in seconds."""


class Watch:
    """For an engine that has `metrics` among its observers; runs as an async context manager."""

    def __init__(self, llm: AsyncLLM, metrics: Metrics, model: str) -> None:
        self._llm = llm
        self._metrics = metrics
        metrics.requests.is_live = llm.is_live
        self._model = model
        self._incidents = Incidents()
        self._keeper = StatusKeeper(metrics, self.info, lambda: llm.health, self._incidents)
        self._exposition = Exposition(metrics, model, self._labels)
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """The status page, `/status.json` and `/metrics`."""
        return routes(self._keeper, self._exposition, self._take)

    async def __aenter__(self) -> Watch:
        logging.getLogger("phonograph").addHandler(self._incidents)
        self._task = asyncio.create_task(self._run(), name="watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        logging.getLogger("phonograph").removeHandler(self._incidents)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.sample()
            due = max(due + _POLL_INTERVAL, loop.time())
            await asyncio.sleep(due - loop.time())

    def sample(self) -> None:
        """Take in the newest stats of the core, and add a point to the history."""
        self._take()
        self._keeper.tick()

    def _take(self) -> None:
        llm = self._llm
        if llm.health.state == "down":
            self._metrics.core_stats.ended(llm.incarnation)
        elif llm.stats is not None:
            self._metrics.take(llm.stats, llm.incarnation)

    def info(self) -> ServerInfo | None:
        """The engine as its core reported it when it was ready; None before."""
        if self._llm.incarnation < 0:
            return None
        about = self._llm.about
        return ServerInfo(
            version=phonograph.__version__,
            model=self._model,
            source=about.source,
            architecture=about.architecture,
            num_layers=about.num_layers,
            implementation=about.implementation,
            dtype=about.dtype,
            device=about.device,
            max_seqs=about.limits.max_seqs,
            max_tokens=about.limits.max_tokens,
            max_len=about.limits.max_len,
            speculation=about.speculation,
        )

    def _labels(self) -> dict[str, str]:
        info = self.info()
        return {"version": phonograph.__version__, "device": info.device if info else ""}
