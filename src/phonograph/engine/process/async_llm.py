"""AsyncLLM: an engine core in a process of its own, from text to text, for many requests at the same time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.client import CoreClient, Restarts
from phonograph.engine.process.front_text import FrontText
from phonograph.engine.process.generation import Delta, Generation
from phonograph.engine.process.health import Health, health_in_service
from phonograph.engine.process.messages import Add, Cancel, CheckIntegrity, Finish, IntegrityReport, Ready, StepOutput
from phonograph.engine.process.new_requests import Asked, new_requests
from phonograph.engine.process.observer import Observer, Observers
from phonograph.engine.process.statistics import EngineStats
from phonograph.engine.requests.pooling import Pooling
from phonograph.engine.requests.request import Request, SamplingParams
from phonograph.engine.text import ChatTemplate
from phonograph.engine.text.reader import TextForm
from phonograph.errors import CoreError, PhonographError, RequestError, UnavailableError
from phonograph.graphs.progress import Progress, silent

_CHOICE_SIZE = 16
"""The cost of starting a choice, in tokens."""
_LONGEST_WAIT = 60.0
"""The longest Retry-After, in seconds."""


class AsyncLLM:
    """Serves many requests at once; the engine core is a process of its own, started again when it dies.

    `async with AsyncLLM() as llm: async for delta in llm.generate("…", params): …`
    """

    def __init__(
        self,
        arguments: EngineArguments = EngineArguments(),
        *,
        max_queue: int = 1024,
        chat_template: str | None = None,
        restarts: Restarts = Restarts(),
        observers: Sequence[Observer] = (),
        log_level: int = logging.WARNING,
    ) -> None:
        self.arguments = arguments
        self.max_queue = max_queue
        self.checkpoint = arguments.checkpoint()
        self.sampling = self.checkpoint.sampling if arguments.options.sampling == "model" else SamplingParams()
        """Defaults for values that a request leaves out."""
        self.tokenizer = None if isinstance(self.checkpoint, RandomCheckpoint) else self.checkpoint.tokenizer()
        self.text = FrontText(self.checkpoint.source, self.tokenizer, self._opened_template(chat_template))
        self.observer = Observers(observers)
        self._health = Health("starting")
        self.stats: EngineStats | None = None
        """The newest stats of the core that runs now."""
        self.incarnation = -1
        """How often a core was started, from 0: counters of `stats` begin again with each."""
        self._core = CoreClient(arguments, self, restarts, log_level)
        self._ready: Ready | None = None
        self._live: dict[str, Generation] = {}
        """By the ids of their requests."""
        self.num_active = 0
        """Sequences that run or wait."""
        self.busy_since: float | None = None
        self._checks: deque[asyncio.Future[IntegrityReport]] = deque()
        self._lost = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ends: deque[float] = deque(maxlen=64)
        """When the latest sequences ended."""
        self._numbers = itertools.count()

    # -- start, health and stop --------------------------------------------------------------------------------------

    async def start(self, progress: Progress = silent) -> Ready:
        """Start the core; returns when it takes requests."""
        return await self._core.start(progress)

    async def drain(self, seconds: float) -> bool:
        """Accept no more requests, and wait until running ones have ended; False if some did not in that time."""
        self._health = Health("draining", "the server is shutting down")
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End the core; what still runs gets an error."""
        self._health = Health("stopped", "the server was shut down")
        try:
            self._fail_all(CoreError("the server was shut down while the request ran"))
        finally:
            await self._core.stop()
            self.text.close()

    async def lost(self) -> str:
        """Wait until the core is down for good, and say why."""
        await self._lost.wait()
        return self._health.reason

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def health(self) -> Health:
        """Whether requests are accepted, and whether some of them fail."""
        return health_in_service(self.stats) if self._health.state == "ready" else self._health

    @property
    def about(self) -> Ready:
        """The core's description of itself, sent when it was ready."""
        if self._ready is None:
            raise CoreError("the engine core has not been started. Call start() first.")
        return self._ready

    @property
    def max_active(self) -> int:
        """Sequences that may run or wait."""
        return self.about.limits.max_seqs + self.max_queue

    @property
    def core_pid(self) -> int | None:
        return self._core.pid

    async def check(self) -> IntegrityReport:
        """Raise if the core has lost a row, a page or a sequence."""
        if self._health.state not in ("ready", "draining"):
            raise CoreError(
                f"checking the engine core: {self._health.reason or 'it is starting'}. Wait until it is ready."
            )
        report: asyncio.Future[IntegrityReport] = asyncio.get_running_loop().create_future()
        self._checks.append(report)
        self._core.send(CheckIntegrity())
        found = await report
        if found.problem:
            raise PhonographError(found.problem)
        return found

    # -- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> AsyncIterator[Delta]:
        """Complete one prompt, text or token ids; a caller that stops listening cancels it."""
        prompts = await self.text.encode([prompt])
        async with self.submit(prompts, params or SamplingParams(), timeout=timeout, continues=True) as generation:
            async for delta in generation:
                yield delta

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[Delta]:
        """Generate the next message of a conversation."""
        tokens = await self.text.render(messages)
        async with self.submit([tokens], params or SamplingParams(), timeout=timeout) as generation:
            async for delta in generation:
                yield delta

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        continues: bool = False,
    ) -> Generation:
        """Send prompts to the core, all or none; close the generation if the rest is not needed.

        With `continues` an output goes on where its prompt ended: a leading space belongs to it.
        """
        self.refuse_unless_ready()
        with self._refusals_counted():
            prepared = self._prepared(self._requests(prompts, Asked(params, priority, timeout), request_id), continues)
        return self._started(*prepared)

    async def submit_long(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        continues: bool = False,
        pooling: Pooling | None = None,
        kept_ids: Collection[int] = (),
        form: TextForm = TextForm(),
    ) -> Generation:
        """Like `submit`; many tokens or choices are made ready in a thread. With `pooling`, prompts are embedded;
        `kept_ids` are special tokens that are text in the outputs."""
        self.refuse_unless_ready()

        def work() -> tuple[Generation, list[msgspec.Raw]]:
            requests = self._requests(prompts, Asked(params, priority, timeout, pooling), request_id)
            return self._prepared(requests, continues, kept_ids, form)

        size = sum(map(len, prompts)) + _CHOICE_SIZE * len(prompts) * params.n
        with self._refusals_counted():
            prepared = await self.text.off_loop(size, work)
        self.refuse_unless_ready()
        return self._started(*prepared)

    def _requests(self, prompts: Sequence[Sequence[int]], asked: Asked, request_id: str | None) -> list[Request]:
        name, embeddings = request_id or f"request-{next(self._numbers)}", self.arguments.options.embeddings
        asked = replace(asked, params=asked.params.resolved(self.sampling))
        most = self.max_active
        return new_requests(prompts, asked, name, self.about, self.tokenizer, most=most, embeddings=embeddings)

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except RequestError:
            self.observer.rejected("invalid")
            raise

    def _prepared(
        self,
        requests: Sequence[Request],
        continues: bool,
        kept_ids: Collection[int] = (),
        form: TextForm = TextForm(),
    ) -> tuple[Generation, list[msgspec.Raw]]:
        """The generation, and its messages to the core; may run on any thread."""
        eos_ids = self.about.limits.eos_ids
        generation = Generation(
            requests,
            self.tokenizer,
            self.observer,
            self._closed,
            eos_ids=eos_ids,
            continues=continues,
            kept_ids=kept_ids,
            form=form,
        )
        return generation, [self._core.encoded(Add(request)) for request in requests]

    def _started(self, generation: Generation, messages: Sequence[msgspec.Raw]) -> Generation:
        with self._refusals_counted():
            self._refuse_taken(generation.requests)
        self._refuse_overflow(generation.num_choices)
        for request, message in zip(generation.requests, messages, strict=True):
            self._live[request.id] = generation
            self._core.send(message)
            self.observer.started(request)
        self.num_active += generation.num_choices
        self.busy_since = self.busy_since or time.monotonic()
        self._idle.clear()
        return generation

    def is_live(self, request_id: str) -> bool:
        """Whether a request runs or waits."""
        return request_id in self._live

    def refuse_unless_ready(self) -> None:
        """Raise UnavailableError while no request is accepted."""
        if self._health.state != "ready":
            self.observer.rejected(self._health.state)
            draining = self._health.state in ("draining", "stopped")
            raise UnavailableError(
                f"no request is accepted now: {self._health.reason or 'the engine core is starting'}. Try again later.",
                "draining" if draining else "down",
                retry_after=5.0,
            )

    def _refuse_taken(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.id in self._live:
                problem = "this id is being served already. Give every request its own"
                problem += "; of several prompts, the second is id-1."
                raise RequestError(f"request {request.id!r}: {problem}", field="request_id")

    def _refuse_overflow(self, added: int) -> None:
        active, most = self.num_active, self.max_active
        if active + added > most:
            self.observer.rejected("queue_full")
            raise UnavailableError(
                f"{active} sequences run or wait, and at most {most} may. Try again later.",
                "queue_full",
                retry_after=self._wait_for(active + added - most),
            )

    def _wait_for(self, ends: int) -> float:
        """Seconds until `ends` sequences will have ended, going by the latest."""
        if len(self._ends) < 2:
            return 1.0
        seconds = (time.monotonic() - self._ends[0]) / len(self._ends) * ends
        return float(min(max(1, math.ceil(seconds)), _LONGEST_WAIT))

    def _opened_template(self, given: str | None) -> ChatTemplate | None:
        if self.tokenizer is None:
            return None
        if given is None:
            return self.checkpoint.chat_template()
        return ChatTemplate(given, self.tokenizer.special_tokens, "the server's own --chat-template")

    # -- what the core says -----------------------------------------------------------------------------------------

    def ready(self, found: Ready) -> None:
        self._ready, self.stats = found, None
        self.incarnation += 1
        if self._health.state in ("starting", "down"):
            self._health = Health("ready")

    def stepped(self, output: StepOutput) -> None:
        now = time.monotonic()
        self.stats = output.stats or self.stats
        for one in output.outputs:
            generation = self._live.get(one.request_id)
            if generation is None:
                continue
            num_left = generation.num_left
            if one.refused:
                generation.fail(RequestError(one.error, field=one.field or None), now)
            elif generation.put(one, now):
                self._core.send(Finish(one.request_id, one.index))
            if generation.num_left < num_left:
                self._ends.append(now)
                self._ended(generation, num_left)
        for trace in output.ended:
            self.observer.traced(trace)

    def checked(self, found: IntegrityReport) -> None:
        report = self._checks.popleft()
        if not report.done():
            report.set_result(found)

    def down(self, reason: str, *, final: bool) -> None:
        if self._health.state in ("starting", "ready", "down"):
            hope = "it will not be restarted" if final else "it is being restarted"
            self._health = Health("down", f"the engine core is down ({reason}); {hope}")
            if final:
                self._lost.set()
        error = CoreError(f"the engine core died while the request was running: {reason}. Send the request again.")
        self._fail_all(error)
        for report in self._checks:
            report.set_exception(error)
        self._checks.clear()

    def _fail_all(self, error: CoreError) -> None:
        now = time.monotonic()
        for generation in set(self._live.values()):
            num_left = generation.num_left
            generation.fail(error, now)
            self._ended(generation, num_left)

    def _closed(self, generation: Generation, num_left: int) -> None:
        """The reader stopped while `num_left` choices had not ended."""
        for request in generation.requests:
            self._core.send(Cancel(request.id))
        self._ended(generation, num_left)

    def _ended(self, generation: Generation, num_left: int) -> None:
        """Some of the choices that were left have ended."""
        self.num_active -= num_left - generation.num_left
        if not generation.num_left:
            for request in generation.requests:
                del self._live[request.id]
            if not self._live:
                self.busy_since = None
                self._idle.set()
