"""RequestBook: the latest requests with their outcomes: counts and times, never texts."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from phonograph.engine.process.traces import SequenceTrace
from phonograph.engine.requests.request import Request

MAX_REQUESTS = 512
MAX_CHOICES = 16
"""Choices of a request whose traces are kept."""
_LISTED = 12


class RequestLine(msgspec.Struct, frozen=True):
    """A request in the list of the latest."""

    id: str
    at: float
    """When it arrived, in Unix time."""
    state: str
    """`active` while it runs or waits, `ended` if the core died first; else the finish reasons of its choices."""
    prompt_tokens: int
    output_tokens: int
    seconds: float
    eager: int
    """Eager passes during its lifetime."""


class RequestStory(msgspec.Struct, frozen=True):
    """All that is known of a request."""

    line: RequestLine
    choices: int
    max_tokens: int
    priority: int
    deadline: float | None
    """Seconds after it arrived."""
    sampling: dict[str, float | int | None]
    grammar: str | None
    """The kind of grammar that its output follows."""
    traces: tuple[SequenceTrace, ...]
    """Traces of its finished choices, by index; only the first of many."""


@dataclass(slots=True)
class _Kept:
    """One request."""

    at: float
    begun: float
    id: str
    prompt_tokens: int
    choices: int
    max_tokens: int
    priority: int
    deadline: float | None
    sampling: dict[str, float | int | None]
    grammar: str | None
    ended: int = 0
    output_tokens: int = 0
    eager: int = 0
    seconds: float = 0.0
    states: dict[str, int] = field(default_factory=dict)
    traces: list[SequenceTrace] = field(default_factory=list)


class RequestBook:
    """Keeps the newest; all calls come from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.is_live: Callable[[str], bool] = lambda request_id: True
        """Whether an unfinished request runs or waits; False if its engine core died."""

    def started(self, request: Request) -> None:
        """A request went to the engine core."""
        params, arrival = request.params, request.arrival
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        self._kept[request.id] = _Kept(
            self._clock(),
            arrival,
            request.id,
            len(request.prompt),
            params.n,
            params.max_tokens,
            request.priority,
            None if request.deadline is None else round(request.deadline - arrival, 3),
            {name: getattr(params, name) for name in names},
            params.grammar.kind if params.grammar is not None else None,
        )
        self._kept.move_to_end(request.id)
        if len(self._kept) > MAX_REQUESTS:
            self._kept.popitem(last=False)

    def traced(self, trace: SequenceTrace) -> None:
        """Add the trace of one of its choices."""
        kept = self._kept.get(trace.request_id)
        if kept is None:
            return
        kept.ended += 1
        kept.output_tokens += trace.output_tokens
        kept.eager += sum(sum(counts.eager.values()) for counts in (*trace.prompt, *trace.output))
        kept.seconds = max(kept.seconds, trace.ended)
        kept.states[trace.finish.value] = kept.states.get(trace.finish.value, 0) + 1
        if len(kept.traces) < MAX_CHOICES:
            kept.traces.append(trace)

    def newest(self) -> tuple[RequestLine, ...]:
        """Some of the latest, the newest first."""
        found = []
        for kept in reversed(self._kept.values()):
            found.append(self._line(kept))
            if len(found) == _LISTED:
                break
        return tuple(found)

    def story(self, request_id: str) -> RequestStory | None:
        """All details of one; None if it is not kept."""
        kept = self._kept.get(request_id)
        if kept is None:
            return None
        return RequestStory(
            self._line(kept),
            kept.choices,
            kept.max_tokens,
            kept.priority,
            kept.deadline,
            kept.sampling,
            kept.grammar,
            tuple(sorted(kept.traces, key=lambda trace: trace.index)),
        )

    def _line(self, kept: _Kept) -> RequestLine:
        is_over = kept.ended >= kept.choices
        state = ", ".join(kept.states) if is_over else "active" if self.is_live(kept.id) else "ended"
        seconds = kept.seconds if is_over else self._monotonic() - kept.begun
        return RequestLine(
            kept.id, round(kept.at, 2), state, kept.prompt_tokens, kept.output_tokens, round(seconds, 3), kept.eager
        )
