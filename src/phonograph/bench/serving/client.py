"""Client of an OpenAI endpoint: finds out what it accepts, streams one response, and notes when each part arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp
import msgspec

from phonograph.bench.serving.outcome import Outcome
from phonograph.bench.workloads import Job, PromptKind
from phonograph.errors import PlanError

Api = Literal["completions", "chat"]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta
        if self.text or self.token_ids:
            return True
        return delta is not None and bool(delta.content or delta.reasoning_content or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True)
class Dialect:
    """What of our wishes an endpoint takes."""

    prompts: PromptKind
    ignores_eos: bool
    """Whether outputs have the requested length, whatever the model says."""
    reports_usage: bool


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and how they are put."""

    url: str
    """With `/v1`."""
    model: str
    api: Api = "completions"
    temperature: float = 0.0
    key: str = field(default="", repr=False)
    timeout: float = 600.0
    dialect: Dialect = Dialect("text", False, False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def path(self) -> str:
        return f"{self.url}/completions" if self.api == "completions" else f"{self.url}/chat/completions"

    def body(self, job: Job) -> bytes:
        body: dict[str, object] = {"model": self.model, "stream": True, "max_tokens": job.max_tokens}
        prompt = job.prompt if self.dialect.prompts == "ids" else job.text
        body["temperature"] = self.temperature
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.dialect.ignores_eos:
            body["ignore_eos"] = True
        if self.dialect.reports_usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)


class Lines:
    """Cuts a stream of bytes into the payloads of its events, however they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterator[bytes]:
        """What follows `data:` on the lines that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def new_session() -> aiohttp.ClientSession:
    """One connection for each request that runs."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 18)


async def first_model(url: str, key: str) -> str:
    """The first model that the endpoint lists."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with new_session() as session, session.get(f"{url}/models", headers=headers) as response:
            if response.status == 200:
                found: str = (await response.json(content_type=None))["data"][0]["id"]
                return found
            problem = f"status {response.status}"
    except aiohttp.ClientError as error:
        problem = str(error)
    except (LookupError, TypeError, ValueError):
        problem = "the response lists no model"
    raise PlanError(f"listing the models of {url}/models: {problem}. Check --url, or name a --model.")


async def find_dialect(
    session: aiohttp.ClientSession, endpoint: Endpoint, kinds: Sequence[PromptKind], highest_id: int
) -> Endpoint:
    """Send one small request after the other, each with fewer fields, until the endpoint takes one."""
    problem = ""
    for reports_usage in (True, False):
        for ignores_eos in (True, False):
            for kind in kinds:
                tried = replace(endpoint, dialect=Dialect(kind, ignores_eos, reports_usage))
                found = await send(session, tried, Job(0.0, [highest_id, highest_id], 2), time.perf_counter())
                if not found.error:
                    return tried
                problem = f"{found.error}{f' ({found.detail})' if found.detail else ''}"
                if not found.error.startswith(("http 400", "http 422")):
                    raise PlanError(
                        f"a first request to {endpoint.path}: {problem}. Check --url, --model and --api-key."
                    )
    hint = " Give --vocab the size of the model's vocabulary, or --prompts text." if "ids" in kinds else ""
    raise PlanError(f"a first request to {endpoint.path}, with nothing but a prompt: {problem}.{hint}")


async def send(session: aiohttp.ClientSession, endpoint: Endpoint, job: Job, start: float) -> Outcome:
    """Send one request and read its stream to the end; an error is an outcome too."""
    outcome = Outcome(job.due, sent=time.perf_counter() - start)
    try:
        async with asyncio.timeout(endpoint.timeout):
            await _stream(session, endpoint, job, outcome, start)
    except TimeoutError:
        outcome.error, outcome.detail = "timeout", f"no end after {endpoint.timeout:g} s"
    except aiohttp.ClientConnectorError as error:
        outcome.error, outcome.detail = "no connection", str(error)
    except (aiohttp.ClientError, OSError) as error:
        outcome.error, outcome.detail = "connection lost", f"{type(error).__name__}: {error}"
    except msgspec.DecodeError as error:
        outcome.error, outcome.detail = "broken event", str(error)
    outcome.end = time.perf_counter() - start
    return outcome


async def _stream(session: aiohttp.ClientSession, endpoint: Endpoint, job: Job, outcome: Outcome, start: float) -> None:
    headers = {**endpoint.headers, "Content-Type": "application/json"}
    async with session.post(endpoint.path, data=endpoint.body(job), headers=headers, timeout=_NO_TIMEOUT) as response:
        if response.status != 200:
            outcome.error, outcome.detail = f"http {response.status}", _message(await response.read())
            return
        lines, is_done = Lines(), False
        any_choices: list[tuple[float, int]] = []
        async for data in response.content.iter_any():
            now, num_outputs, num_choices = time.perf_counter() - start, 0, 0
            for payload in lines.add(data):
                if payload == b"[DONE]":
                    is_done = True
                elif payload:
                    event = _decode(payload)
                    num_outputs += _note(event, outcome)
                    num_choices += bool(event.choices)
                    is_done = is_done or any(choice.finish_reason for choice in event.choices)
            if num_outputs:
                outcome.arrivals.append((now, num_outputs))
            if num_choices:
                any_choices.append((now, num_choices))
        if not outcome.arrivals and outcome.usage_tokens:
            # A model without a tokenizer, or nothing but special tokens: there is output, and none of it is text.
            outcome.arrivals, outcome.has_text = any_choices, False
        if not outcome.error and not is_done:
            outcome.error = "stream cut off"
        if not outcome.error and not outcome.arrivals:
            outcome.error = "no output"


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


def _note(event: _Event, outcome: Outcome) -> int:
    """Take in one event; 1 if it has output, else 0."""
    if event.error is not None:
        outcome.error, outcome.detail = "error in the stream", str(event.error)[:300]
    if event.usage is not None:
        outcome.prompt_tokens = event.usage.prompt_tokens
        outcome.usage_tokens = event.usage.completion_tokens
    return int(any(choice.has_output for choice in event.choices))


def _message(body: bytes) -> str:
    """The text of an error body, OpenAI's or another."""
    text = body.decode(errors="replace")
    try:
        found = msgspec.json.decode(body)
        text = found["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError):
        pass
    return " ".join(str(text).split())[:300]
