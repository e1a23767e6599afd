"""Writers: encode the engine's outputs as OpenAI bodies and stream events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from phonograph.engine.process.generation import Delta, TokenUsage
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import PromptLogprob, TokenLogprob
from phonograph.server.http.failures import ApiError
from phonograph.server.openai.answer_reader import AnswerReader, Reading, joined
from phonograph.server.openai.logprobs import LogprobWriter, TextOffsets
from phonograph.server.openai.prompt_writer import PromptWriter, together
from phonograph.server.openai.responses import (
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatDeltaChoice,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    Finish,
    FunctionCall,
    OutputDetails,
    PromptLogprobs,
    TextChoice,
    TextLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
    hidden_states,
)
from phonograph.server.openai.token_ids import TokenIds

T = TypeVar("T", bound=TokenLogprob)

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
BLOCK = 128
"""Tokens whose logprobs are encoded at a time: other requests wait for at most 2,688 entries."""
_SMALL = 256 << 10

_FINISH: dict[FinishReason | None, Finish | None] = {
    None: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class ResponseWriter(Protocol):
    """Writes the response to one request; stateful, one for each request."""

    id: str
    size: int
    """Characters, besides those of deltas, that are handled at the end."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Server-sent events for new deltas."""

    def end(self, used: TokenUsage) -> bytes:
        """The last events of a stream."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that fails after its first."""

    def body(self, choices: Sequence[Delta], used: TokenUsage) -> list[bytes]:
        """The whole response, in pieces of limited size; takes the logprobs out of the choices."""


class Head(msgspec.Struct, frozen=True):
    """Fields common to all events and bodies of one response."""

    id: str
    created: int
    model: str
    streams_usage: bool = False
    """Whether the last event of a stream has the usage, and the others have `usage: null`."""

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
        prompts: PromptWriter | None = None,
    ) -> None:
        """`offsets` makes the text offsets of a choice; `prompts` writes echoes and prompt logprobs."""
        self.id = head.id
        self.size = 0
        self.ids = TokenIds()
        self.usage_so_far: Callable[[], TokenUsage] | None = None
        """For a client that wants counts in every event."""
        self._head = head
        self._logprobs = logprobs
        self._prompts = prompts
        self._new_offsets = offsets
        self._offsets: dict[int, TextOffsets] = {}

    def events(self, deltas: Sequence[Delta]) -> bytes:
        usage = self._head.no_usage if self.usage_so_far is None else usage_of(self.usage_so_far())
        return b"".join(self._event([self._choice(delta)], usage) for delta in deltas if self._is_shown(delta))

    def _is_shown(self, delta: Delta) -> bool:
        said = bool(delta.text or delta.finish is not None or delta.logprobs or self.ids.output(delta))
        return said or (
            self._prompts is not None and (self._prompts.is_new(delta.choice) or bool(delta.prompt_logprobs))
        )

    def end(self, used: TokenUsage) -> bytes:
        return (self._event([], usage_of(used)) if self._head.streams_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return error.event() + DONE

    def body(self, choices: Sequence[Delta], used: TokenUsage) -> list[bytes]:
        whole = _encode(self._response([], usage_of(used)))
        return _few(_filled(whole, "choices", (self._pieces(delta) for delta in choices)))

    def _pieces(self, delta: Delta) -> Iterator[bytes]:
        """A choice, with its logprobs encoded block by block."""
        prompts, scores = self._prompts, list(delta.prompt_logprobs)
        said, asked = _blocks(delta.logprobs), _blocks(delta.prompt_logprobs)
        text = delta.text if prompts is None else prompts.text(delta.choice) + delta.text
        ranked: PromptLogprobs | UnsetType = [] if prompts is not None and prompts.is_ranked else UNSET
        empty = TextLogprobs([], [], [], []) if self._logprobs is not None else None
        rest = _encode(self._text_choice(delta, text, empty, ranked))
        if self._logprobs is not None:
            columns: dict[str, list[bytes]] = {name: [] for name in TextLogprobs.__struct_fields__}
            for found in self._columns(delta.choice, asked, said):
                for name, pieces in columns.items():
                    pieces.append(_encode(getattr(found, name))[1:-1])
            for name, pieces in columns.items():
                begin, _, rest = rest.partition(b'"%s":[]' % name.encode())
                yield begin
                yield from _filled(b'"%s":[]' % name.encode(), name, ([piece] for piece in pieces if piece))
        if prompts is not None and prompts.is_ranked:
            yield from _filled(rest, "prompt_logprobs", prompts.ranked(_blocks(scores)))
        else:
            yield rest

    def _columns(
        self, choice: int, asked: Iterable[list[PromptLogprob]], said: Iterable[list[TokenLogprob]]
    ) -> Iterator[TextLogprobs]:
        """The entries of a choice's new tokens: of its prompt where that is echoed, then of the output."""
        assert self._logprobs is not None
        prompts = self._prompts
        if prompts is not None and prompts.echoes:
            for scores in chain(asked, [[]]):
                yield from prompts.columns(choice, scores)
        if choice not in self._offsets:
            self._offsets[choice] = self._new_offsets(choice)
            self._offsets[choice].end += 0 if prompts is None else prompts.end_of(choice)
        every = prompts is not None and prompts.echoes
        for block in said:
            yield self._logprobs.text(block, self._offsets[choice], every=every)

    def _choice(self, delta: Delta) -> TextChoice:
        text = delta.text if self._prompts is None else self._prompts.text(delta.choice) + delta.text
        logprobs: TextLogprobs | None = None
        if self._logprobs is not None:
            logprobs = together(self._columns(delta.choice, [delta.prompt_logprobs], [delta.logprobs]))
        return self._text_choice(delta, text, logprobs)

    def _text_choice(
        self, delta: Delta, text: str, logprobs: TextLogprobs | None, ranked: PromptLogprobs | UnsetType = UNSET
    ) -> TextChoice:
        about = ranked, self.ids.output(delta), self.ids.prompt(delta.choice), hidden_states(delta.hidden_state)
        return TextChoice(delta.choice, text, logprobs, _FINISH[delta.finish], *about)

    def _response(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(self._head.id, self._head.created, self._head.model, choices, usage)

    def _event(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(_encode(self._response(choices, usage)))


class ChatWriter:
    """For /v1/chat/completions; outputs are plain text, or parsed by `reading`."""

    def __init__(
        self,
        head: Head,
        logprobs: LogprobWriter | None,
        reading: Reading | None,
        prompts: PromptWriter | None = None,
    ) -> None:
        self.id = head.id
        self.size = 0
        self.ids = TokenIds()
        self.usage_so_far: Callable[[], TokenUsage] | None = None
        """For a client that wants counts in every event."""
        self._head = head
        self._logprobs = logprobs
        self._prompts = prompts
        self._reading = reading or Reading()
        self._is_plain = not self._reading.tools and self._reading.reasoning is None
        self._readers: dict[int, AnswerReader] = {}
        self._num_calls: dict[int, int] = {}
        """By choice; missing until its first delta."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        choices = [choice for delta in deltas for choice in self._delta_choices(delta)]
        usage = self._head.no_usage if self.usage_so_far is None else self._usage(self.usage_so_far())
        return b"".join(event(_encode(self._chunk([choice], usage, self.ids.prompt()))) for choice in choices)

    def end(self, used: TokenUsage) -> bytes:
        return (event(_encode(self._chunk([], self._usage(used)))) if self._head.streams_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return error.event() + DONE

    def body(self, choices: Sequence[Delta], used: TokenUsage) -> list[bytes]:
        head, prompts = self._head, self._prompts
        scores = choices[0].prompt_logprobs if choices else []
        written = _few(piece for place, delta in enumerate(choices) for piece in self._listed(place, delta))
        usage = self._usage(used)  # of what was read just now
        ranked: PromptLogprobs | UnsetType = UNSET if prompts is None else []
        about = head.id, head.created, head.model
        whole = _encode(ChatResponse(*about, [], usage, prompt_logprobs=ranked, prompt_token_ids=self.ids.prompt()))
        if prompts is None:
            return _few(_filled(whole, "choices", [written]))
        begin, place, end = whole.partition(b'"usage":')
        pieces = chain(
            _filled(begin, "choices", [written]),
            _filled(place + end, "prompt_logprobs", prompts.ranked(_blocks(scores))),
        )
        return _few(pieces)

    def _listed(self, place: int, delta: Delta) -> Iterator[bytes]:
        """A choice, with a comma in front of all but the first."""
        if place:
            yield b","
        yield from self._pieces(delta)

    def _pieces(self, delta: Delta) -> Iterator[bytes]:
        """A choice, with its logprobs encoded block by block."""
        logprobs, blocks = self._logprobs, _blocks(delta.logprobs)
        whole = _encode(self._choice(delta))
        if logprobs is None:
            yield whole
        else:
            yield from _filled(whole, "content", ([_encode(logprobs.chat(block).content)[1:-1]] for block in blocks))

    def _choice(self, delta: Delta) -> ChatChoice:
        thought, text, calls = self._read(delta)
        logprobs = ChatLogprobs([]) if self._logprobs is not None else None
        made = [ToolCall(self._call_id(delta.choice, place), call) for place, call in enumerate(calls)]
        message = ChatMessage(None if made and not text else text, made or UNSET, thought or UNSET)
        finish = self._finish(delta, len(made)) or "stop"
        about = self.ids.output(delta), hidden_states(delta.hidden_state)
        return ChatChoice(delta.choice, message, finish, logprobs, *about)

    def _delta_choices(self, delta: Delta) -> Iterator[ChatDeltaChoice]:
        """An event with the new parts, and a separate one for the finish reason."""
        index = delta.choice
        thought, text, calls = self._read(delta)
        logprobs: ChatLogprobs | None = None
        if self._logprobs is not None and delta.logprobs:
            logprobs = self._logprobs.chat(delta.logprobs)
        is_first = index not in self._num_calls
        first_call = self._num_calls.setdefault(index, 0)
        self._num_calls[index] += len(calls)
        ids = self.ids.output(delta)
        if text or thought or is_first or logprobs is not None or calls or ids:
            made = [
                ToolCallDelta(place, self._call_id(index, place), call) for place, call in enumerate(calls, first_call)
            ]
            content = UNSET if (made or thought) and not text else text
            new = ChatDelta("assistant" if is_first else UNSET, content, made or UNSET, thought or UNSET)
            yield ChatDeltaChoice(index, new, logprobs, token_ids=ids)
        if delta.finish is not None:
            yield ChatDeltaChoice(index, ChatDelta(), finish_reason=self._finish(delta, self._num_calls[index]))

    def _read(self, delta: Delta) -> tuple[str, str, list[FunctionCall]]:
        """New reasoning, content and tool calls."""
        if self._is_plain:
            return "", delta.text, []
        reader = self._readers.get(delta.choice)
        if reader is None:
            reader = self._readers[delta.choice] = self._reading.reader()
        parts = reader.add(delta.text, delta.widths)
        return joined([*parts, *reader.finish()] if delta.finish is not None else parts)

    def _usage(self, used: TokenUsage) -> Usage:
        if self._reading.reasoning is None:
            return usage_of(used)
        thought = sum(reader.num_thought for reader in self._readers.values())
        usage = usage_of(used)
        details = usage.completion_tokens_details or OutputDetails()
        details = msgspec.structs.replace(details, reasoning_tokens=thought)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _finish(self, delta: Delta, num_calls: int) -> Finish | None:
        found = _FINISH[delta.finish]
        return "tool_calls" if num_calls and found == "stop" else found

    def _call_id(self, choice: int, place: int) -> str:
        return f"call_{self._head.id.rpartition('-')[2]}_{choice}_{place}"

    def _chunk(
        self,
        choices: list[ChatDeltaChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: Sequence[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, head.created, head.model, choices, usage, prompt_token_ids=prompt_ids)


def split(deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
    """Groups of deltas with at most a block of logprobs each; one with more becomes several, the last with its text."""
    group: list[Delta] = []
    size = 0
    for delta in deltas:
        while len(scores := delta.prompt_logprobs) > BLOCK:
            delta.prompt_logprobs = scores[BLOCK:]
            yield [*group, Delta(delta.choice, prompt_logprobs=scores[:BLOCK])]
            group, size = [], 0
        if delta.prompt_logprobs and delta.logprobs:
            yield [*group, Delta(delta.choice, prompt_logprobs=delta.prompt_logprobs)]
            delta.prompt_logprobs, group, size = [], [], 0
        while size + len(delta.logprobs) > BLOCK:
            part, delta.logprobs[: BLOCK - size] = delta.logprobs[: BLOCK - size], []
            yield [*group, Delta(delta.choice, logprobs=part)] if part else group
            group, size = [], 0
        group.append(delta)
        size += len(delta.logprobs) + len(delta.prompt_logprobs)
    if group:
        yield group


def _blocks(found: list[T]) -> Iterator[list[T]]:
    """Consumes a list block by block, so that memory is freed as it is written."""
    taken, found[:] = found[::-1], []

    def blocks() -> Iterator[list[T]]:
        while taken:
            block, taken[-BLOCK:] = taken[-BLOCK:][::-1], []
            yield block

    return blocks()


def _filled(whole: bytes, name: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """JSON whose empty list of this name is filled with items; each item comes in pieces.

    A text can't be taken for the list: quotes are escaped in it.
    """
    begin, place, end = whole.partition(b'"%s":[]' % name.encode())
    yield begin + place[:-1]
    separator = b""
    for item in items:
        for piece in filter(None, item):
            yield separator + piece if separator else piece
            separator = b""
        separator = b","
    yield b"]" + end


def _few(pieces: Iterable[bytes]) -> list[bytes]:
    """Pieces of some size."""
    found: list[bytes] = []
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _SMALL:
            found.append(b"".join(held))
            held, size = [], 0
    return [*found, b"".join(held)]


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def usage_of(used: TokenUsage) -> Usage:
    total = used.prompt_tokens + used.output_tokens
    details: OutputDetails | UnsetType = UNSET
    if used.drafted_tokens:
        accepted = used.accepted_tokens
        details = OutputDetails(UNSET, accepted, used.drafted_tokens - accepted)
    return Usage(used.prompt_tokens, used.output_tokens, total, CachedTokens(used.cached_tokens), details)
