"""A status as a busy server would have it, and an app that serves it: for tests of the page and its routes."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phonograph.engine.process.health import Health
from phonograph.engine.process.messages import SpeculationInfo
from phonograph.engine.process.statistics import (
    EagerStats,
    EngineStats,
    PassTimeStats,
    PhaseStats,
    RecordingStats,
    SpeculationStats,
)
from phonograph.engine.process.traces import PassCounts, SequenceTrace
from phonograph.engine.requests.request import FinishReason, SamplingParams
from phonograph.engine.requests.request import Request as RequestOfUser
from phonograph.graphs.phases.buckets import Buckets
from phonograph.server.http.failures import ApiError, respond
from phonograph.server.observe.exposition import Exposition
from phonograph.server.observe.incidents import Incidents
from phonograph.server.observe.metrics import Metrics
from phonograph.server.observe.request_book import RequestBook
from phonograph.server.observe.status import ServerInfo, StatusKeeper
from phonograph.server.observe.status_page import PUBLIC_PATHS, routes

SERVER_INFO = ServerInfo(
    version="0.1.0",
    model="SmolLM2-135M-Instruct",
    source="SmolLM2-135M-Instruct.Q4_1.gguf",
    architecture="LlamaForCausalLM",
    num_layers=30,
    implementation="native: LlamaForCausalLM in layers of our own",
    dtype="bfloat16",
    device="cuda (cuda:0)",
    max_seqs=64,
    max_tokens=512,
    max_len=8192,
    speculation=SpeculationInfo(
        "eagle",
        3,
        "where that pays (a round costs 1.18× at 1, 1.19× at 2, 1.22× at 4, 1.31× at 8, 1.52× at 16, 2.07× at 32, "
        "2.94× at 64 rows)",
        "auto: a head comes with this model",
    ),
)


def recordings(name: str, dim: str, sizes: Buckets, axes: str, weight: float) -> list[RecordingStats]:
    """One for each bucket; the middle ones are replayed most."""
    made = []
    for index, size in enumerate(sizes):
        replays = int(weight * math.exp(-((index - len(sizes) / 2.5) ** 2) / len(sizes)))
        used = int(replays * size * 0.9)
        label = f"{name}[{dim}={size}{f', {axes}' if axes else ''}]"
        made.append(RecordingStats(label, size, axes, 1, 2_400_000 + 90_000 * size, replays, used))
    return made


def stats(second: int = 0, **changes: object) -> EngineStats:
    """What a core might say after so many seconds of work."""
    seqs, tokens = Buckets.up_to(64), Buckets.tokens_up_to(512)
    decode = recordings("decode", "seqs", seqs, "", 30.0 * second) + recordings(
        "decode", "seqs", seqs, "sampling=sampled", 4.0 * second
    )
    prefill = recordings("prefill", "tokens", tokens, "", 2.0 * second)
    if second:
        failed = "capturing prefill[tokens=4]: aten.item reads the device from the host (model.py:41, in forward)."
        prefill[0] = msgspec.structs.replace(prefill[0], error=failed, num_graphs=0, replays=0, used_rows=0)
    late = EagerStats("feature not captured", second // 7, "no recordings for sampling=detailed")
    eager = (
        EagerStats("capture failed", second // 3, "the capture of prefill[tokens=4] failed"),
        EagerStats("too large", second // 11, "611 tokens, the largest bucket is 512"),
    )
    found = EngineStats(
        clock=float(second),
        running=int(34 + 18 * math.sin(second / 40)),
        waiting=max(0, int(9 * math.sin(second / 40) - 2)),
        total_pages=4096,
        free_pages=1300,
        cached_pages=1900,
        used_pages=int(1700 + 600 * math.sin(second / 40)),
        page_size=16,
        steps=200 * second,
        prompt_tokens=int(2100 * second + 9000 * math.sin(second / 23)) + 20000,
        prefill_tokens=1500 * second,
        generated_tokens=int(5200 * second + 30000 * math.sin(second / 31)) + 50000,
        preemptions=second // 200,
        prefix_lookup_tokens=2150 * second,
        prefix_hit_tokens=810 * second,
        speculation=SpeculationStats(
            rounds=2500 * second,
            tokens=6900 * second,
            probed=30 * second,
            probed_tokens=48 * second,
            drafted=(2500 * second, 2450 * second, 2400 * second),
            accepted=(2050 * second, 1450 * second, 900 * second),
            plain={
                "grammar": 90 * second,
                "request": 12 * second,
                "cost": 700 * second,
                "no_draft": 0,
            },
            steps={"round": 150 * second, "plain": 40 * second},
            times={
                "round": PassTimeStats(140 * second, 0.58 * second),
                "plain": PassTimeStats(38 * second, 0.11 * second),
            },
        ),
        phases=(
            PhaseStats("decode", "full", "seqs", tuple(decode), (late,) if second else (), {"replay": 0.71 * second}),
            PhaseStats(
                "prefill",
                "breakable",
                "tokens",
                tuple(prefill),
                eager if second else (),
                {"replay": 0.2 * second, "eager": 0.01 * second},
            ),
        ),
    )
    return msgspec.structs.replace(found, **changes)


class Busy:
    """A keeper whose clock we turn: seconds of load in no time."""

    def __init__(self, facts: ServerInfo | None = SERVER_INFO) -> None:
        self.metrics = Metrics()
        self.metrics.requests = RequestBook(lambda: self.now, lambda: float(self.second))
        self.incidents = Incidents()
        self.health = Health("ready")
        self.now = time.time() - 600
        self.keeper = StatusKeeper(self.metrics, lambda: facts, lambda: self.health, self.incidents, lambda: self.now)
        self.second = 0
        self._random = random.Random(7)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second += 1
            self.now += 1
            crowd = 1 + 0.6 * math.sin(self.second / 40)
            for _ in range(4):
                self.metrics.first_token(0.03 * crowd * self._random.lognormvariate(0, 0.5))
            for _ in range(60):
                self.metrics.token_gap(0.006 * crowd * self._random.lognormvariate(0, 0.2))
            if self.second % 2:
                self.request(f"chatcmpl-{self.second:032x}")
                self.metrics.finished(FinishReason.STOP, 220, 190, 60, 2.0)
            self.metrics.take(stats(self.second), incarnation=0)
            self.keeper.tick()

    def request(self, name: str, *, ends: bool = True) -> None:
        """A request that came now, and what became of it."""
        params = SamplingParams(max_tokens=200, temperature=0.7).resolved()
        self.metrics.started(RequestOfUser(name, tuple(range(220)), params, arrival=float(self.second)))
        if ends:
            failed = {"capture failed": "the capture of prefill[tokens=4] failed"}
            prompt = (PassCounts("prefill", 1, {"capture failed": 1}, failed),)
            mixed = PassCounts("prefill", 8, {"too large": 2}, {"too large": "611 tokens"})
            output = (PassCounts("decode", 180, {}), mixed)
            counts, times = (220, 60, 190), (0.41, 0.47, 2.0)
            self.metrics.traced(SequenceTrace(name, 0, FinishReason.STOP, *counts, *times, 1, prompt, output))

    def warn(self, text: str, level: int = logging.WARNING) -> None:
        record = logging.LogRecord("phonograph", level, __file__, 1, text, None, None)
        record.created = self.now
        self.incidents.handle(record)


class _Key(BaseHTTPMiddleware):
    """Refuses requests without the key `secret`, except for the page itself."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        is_open = request.url.path in PUBLIC_PATHS or request.url.path.startswith("/requests/")
        if is_open or request.headers.get("authorization") == "Bearer secret":
            return await call_next(request)
        return JSONResponse({"error": {"message": "no"}}, status_code=401)


def app(busy: Busy, *, locked: bool = False) -> Starlette:
    """The routes alone, behind a key if asked."""
    exposition = Exposition(busy.metrics, SERVER_INFO.model, lambda: {"version": SERVER_INFO.version})
    middleware = [Middleware(_Key)] if locked else []
    return Starlette(
        routes=routes(busy.keeper, exposition), middleware=middleware, exception_handlers={ApiError: respond}
    )


@contextlib.contextmanager
def serving(application: Starlette) -> Iterator[str]:
    """Serve an app on a free port from a thread; yields its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(128)  # who connects before the server runs waits
        server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
