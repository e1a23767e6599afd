"""Turns what the engine says into the bodies and events of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from phonograph.engine.generation import Delta
from phonograph.engine.generation import Usage as Counted
from phonograph.engine.request import FinishReason
from phonograph.server.answers import (
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatDeltaChoice,
    ChatLogprobs,
    ChatMessage,
    Completion,
    Finish,
    FunctionCall,
    TextChoice,
    TextLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from phonograph.server.logprobs import LogprobWriter, TextOffsets
from phonograph.server.tool_calls import ToolCallReader

_encode = msgspec.json.Encoder().encode

_FINISH: dict[FinishReason | None, Finish | None] = {
    None: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class Writer(Protocol):
    """How one request is answered; it has a state, so there is one for each request."""

    id: str

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Server-sent events for what is new."""

    def usage_event(self, counted: Counted) -> bytes:
        """The last event, for a client that asked for numbers."""

    def body(self, choices: Sequence[Delta], counted: Counted) -> bytes:
        """The whole answer at once."""


class Head(msgspec.Struct, frozen=True):
    """What every event and body of one answer begins with."""

    id: str
    created: int
    model: str
    streams_usage: bool = False
    """Whether events say that their usage is not known yet."""

    @property
    def no_usage(self) -> UnsetType | None:
        return None if self.streams_usage else UNSET


class CompletionWriter:
    """For /v1/completions."""

    def __init__(
        self,
        head: Head,
        logprobs: LogprobWriter | None,
        offsets: Callable[[int], TextOffsets] = lambda choice: TextOffsets(),
    ) -> None:
        """`offsets` makes those of a choice."""
        self.id = head.id
        self._head = head
        self._logprobs = logprobs
        self._new_offsets = offsets
        self._offsets: dict[int, TextOffsets] = {}

    def events(self, deltas: Sequence[Delta]) -> bytes:
        shown = (delta for delta in deltas if delta.text or delta.finish is not None or delta.logprobs)
        return b"".join(self._event([self._choice(delta)], self._head.no_usage) for delta in shown)

    def usage_event(self, counted: Counted) -> bytes:
        return self._event([], _usage(counted))

    def body(self, choices: Sequence[Delta], counted: Counted) -> bytes:
        return _encode(self._answer([self._choice(delta) for delta in choices], _usage(counted)))

    def _choice(self, delta: Delta) -> TextChoice:
        logprobs: TextLogprobs | None = None
        if self._logprobs is not None:
            if delta.choice not in self._offsets:
                self._offsets[delta.choice] = self._new_offsets(delta.choice)
            logprobs = self._logprobs.text(delta.logprobs, self._offsets[delta.choice])
        return TextChoice(delta.choice, delta.text, logprobs, _FINISH[delta.finish])

    def _answer(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._head.id, self._head.created, self._head.model, choices, usage)

    def _event(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(_encode(self._answer(choices, usage)))


class ChatWriter:
    """For /v1/chat/completions; with `tools`, calls of these names are looked for, at most `max_calls`."""

    def __init__(
        self,
        head: Head,
        logprobs: LogprobWriter | None,
        tools: Collection[str] | None,
        max_calls: int | None = None,
    ) -> None:
        self.id = head.id
        self._head = head
        self._logprobs = logprobs
        self._tools = tools
        self._max_calls = max_calls
        self._readers: dict[int, ToolCallReader] = {}
        self._num_calls: dict[int, int] = {}
        """By choice; who is not in it has not begun."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(
            event(_encode(self._chunk([choice], self._head.no_usage)))
            for delta in deltas
            for choice in self._delta_choices(delta)
        )

    def usage_event(self, counted: Counted) -> bytes:
        return event(_encode(self._chunk([], _usage(counted))))

    def body(self, choices: Sequence[Delta], counted: Counted) -> bytes:
        whole = [self._choice(delta) for delta in choices]
        return _encode(ChatCompletion(self._head.id, self._head.created, self._head.model, whole, _usage(counted)))

    def _choice(self, delta: Delta) -> ChatChoice:
        text, calls = self._read(delta)
        logprobs = self._logprobs.chat(delta.logprobs) if self._logprobs is not None else None
        made = [ToolCall(self._call_id(delta.choice, place), call) for place, call in enumerate(calls)]
        message = ChatMessage(text, made) if made else ChatMessage(text)
        if made and not text:
            message = ChatMessage(None, made)
        return ChatChoice(delta.choice, message, self._finish(delta, len(made)) or "stop", logprobs)

    def _delta_choices(self, delta: Delta) -> Iterator[ChatDeltaChoice]:
        """An event with what is new, and one of its own for the end."""
        index = delta.choice
        text, calls = self._read(delta)
        logprobs: ChatLogprobs | None = None
        if self._logprobs is not None and delta.logprobs:
            logprobs = self._logprobs.chat(delta.logprobs)
        is_first = index not in self._num_calls
        first_call = self._num_calls.setdefault(index, 0)
        self._num_calls[index] += len(calls)
        if text or is_first or logprobs is not None or calls:
            made = [
                ToolCallDelta(place, self._call_id(index, place), call) for place, call in enumerate(calls, first_call)
            ]
            new = ChatDelta("assistant" if is_first else UNSET, UNSET if made and not text else text, made or UNSET)
            yield ChatDeltaChoice(index, new, logprobs)
        if delta.finish is not None:
            yield ChatDeltaChoice(index, ChatDelta(), finish_reason=self._finish(delta, self._num_calls[index]))

    def _read(self, delta: Delta) -> tuple[str, list[FunctionCall]]:
        if self._tools is None:
            return delta.text, []
        reader = self._readers.get(delta.choice)
        if reader is None:
            reader = self._readers[delta.choice] = ToolCallReader(self._tools, self._max_calls)
        text, calls = reader.add(delta.text)
        if delta.finish is not None:
            rest, more = reader.finish()
            text, calls = text + rest, calls + more
        return text, calls

    def _finish(self, delta: Delta, num_calls: int) -> Finish | None:
        found = _FINISH[delta.finish]
        return "tool_calls" if num_calls and found == "stop" else found

    def _call_id(self, choice: int, place: int) -> str:
        return f"call_{self._head.id.rpartition('-')[2]}_{choice}_{place}"

    def _chunk(self, choices: list[ChatDeltaChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._head.id, self._head.created, self._head.model, choices, usage)


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def _usage(counted: Counted) -> Usage:
    total = counted.prompt_tokens + counted.output_tokens
    return Usage(counted.prompt_tokens, counted.output_tokens, total, CachedTokens(counted.cached_tokens))
