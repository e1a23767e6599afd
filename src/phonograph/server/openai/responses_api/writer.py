"""ResponsesWriter: an output as items of a response, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from phonograph.engine.process.generation import Delta, TokenUsage
from phonograph.engine.requests.request import FinishReason
from phonograph.server.http.failures import ApiError
from phonograph.server.openai.answer_reader import Part, Reading, Thought
from phonograph.server.openai.logprobs import LogprobWriter
from phonograph.server.openai.responses import CachedTokens, ChatTokenLogprob, FunctionCall
from phonograph.server.openai.responses_api.objects import (
    FunctionCallItem,
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseOutputDetails,
    ResponseUsage,
    Status,
)

_encode = msgspec.json.Encoder().encode
_replace = msgspec.structs.replace


class ResponsesWriter:
    """For /v1/responses. One item at a time: a part of another kind closes the open item."""

    def __init__(
        self,
        begun: Response,
        logprobs: LogprobWriter | None,
        reading: Reading,
        on_end: Callable[[Response], Response],
        size: int = 0,
    ) -> None:
        """`begun` is the response before any output; `on_end` gets the finished one, and may change it. `size` is about
        how many characters `on_end` handles."""
        self.size = size
        self.id = begun.id
        self._response = begun
        self._logprobs = logprobs
        self._reader = reading.reader()
        self._on_end = on_end
        self._items: list[OutputItem] = []
        self._open: OutputMessage | ReasoningItem | None = None
        self._texts: list[str] = []
        """Of the open item."""
        self._entries: list[ChatTokenLogprob] = []
        """Logprobs of the open item."""
        self._new_entries: list[ChatTokenLogprob] = []
        self._finish: FinishReason | None = None
        self._events: list[bytes] = []
        self._number = 0

    # -- for the delivery -------------------------------------------------------------------------------------------

    def events(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._take(delta)
        return self._drained()

    def end(self, used: TokenUsage) -> bytes:
        response = self._ended(used)
        self._say(f"response.{response.status}", response=response)
        return self._drained()

    def body(self, choices: Sequence[Delta], used: TokenUsage) -> list[bytes]:
        for delta in choices:
            self._take(delta)
        return [_encode(self._ended(used))]

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else error.error.code or "invalid_prompt"
        self._begin()
        response = _replace(
            self._response, status="failed", error=ResponseError(code, error.error.message), output=self._items
        )
        self._say("response.failed", response=response)
        return self._drained()

    # -- what is new ------------------------------------------------------------------------------------------------

    def _take(self, delta: Delta) -> None:
        self._begin()
        if self._logprobs is not None and delta.logprobs:
            self._new_entries += self._logprobs.chat(delta.logprobs).content
        for part in self._reader.add(delta.text, delta.widths):
            self._add(part)
        if delta.finish is not None:
            self._finish = delta.finish
            for part in self._reader.finish():
                self._add(part)
            self._close("incomplete" if delta.finish is FinishReason.LENGTH else "completed")

    def _begin(self) -> None:
        if not self._number:
            self._say("response.created", response=self._response)
            self._say("response.in_progress", response=self._response)

    def _add(self, part: Part) -> None:
        if isinstance(part, FunctionCall):
            self._close("completed")
            self._call(part)
            return
        kind = ReasoningItem if isinstance(part, Thought) else OutputMessage
        if not isinstance(self._open, kind):
            self._close("completed")
            self._open_item(kind)
        text = part.text if isinstance(part, Thought) else part
        self._texts.append(text)
        if isinstance(part, Thought):
            self._say("response.reasoning_text.delta", **self._place(), delta=text)
            return
        entries, self._new_entries = self._new_entries, []
        self._entries += entries
        self._say("response.output_text.delta", **self._place(), delta=text, logprobs=entries)

    def _open_item(self, kind: type[OutputMessage | ReasoningItem]) -> None:
        is_text = kind is OutputMessage
        opened = kind(self._id_of("msg" if is_text else "rs"), "in_progress", [])
        self._open, self._texts, self._entries = opened, [], []
        self._say("response.output_item.added", output_index=len(self._items), item=opened)
        part = OutputText("") if is_text else ReasoningText("")
        self._say("response.content_part.added", **self._place(), part=part)

    def _close(self, status: Status) -> None:
        """End the item that is open."""
        opened, text = self._open, "".join(self._texts)
        if opened is None:
            return
        part: OutputText | ReasoningText
        if isinstance(opened, OutputMessage):
            self._entries += self._new_entries
            self._new_entries = []
            part = OutputText(text, logprobs=self._entries)
            self._say("response.output_text.done", **self._place(), text=text, logprobs=self._entries)
        else:
            part = ReasoningText(text)
            self._say("response.reasoning_text.done", **self._place(), text=text)
        self._say("response.content_part.done", **self._place(), part=part)
        whole: OutputItem = _replace(opened, status=status, content=[part])
        self._say("response.output_item.done", output_index=len(self._items), item=whole)
        self._items.append(whole)
        self._open = None

    def _call(self, call: FunctionCall) -> None:
        index, name = len(self._items), self._id_of("fc")
        item = FunctionCallItem(name, "in_progress", self._id_of("call"), call.name, "")
        where: dict[str, Any] = {"item_id": name, "output_index": index}
        self._say("response.output_item.added", output_index=index, item=item)
        self._say("response.function_call_arguments.delta", **where, delta=call.arguments)
        self._say("response.function_call_arguments.done", **where, arguments=call.arguments, name=call.name)
        whole = _replace(item, status="completed", arguments=call.arguments)
        self._say("response.output_item.done", output_index=index, item=whole)
        self._items.append(whole)

    def _ended(self, used: TokenUsage) -> Response:
        is_cut = self._finish is FinishReason.LENGTH
        total = used.prompt_tokens + used.output_tokens
        details = ResponseOutputDetails(self._reader.num_thought)
        if used.drafted_tokens:
            rejected = used.drafted_tokens - used.accepted_tokens
            details = ResponseOutputDetails(self._reader.num_thought, used.accepted_tokens, rejected)
        usage = ResponseUsage(
            used.prompt_tokens,
            CachedTokens(used.cached_tokens),
            used.output_tokens,
            details,
            total,
        )
        return self._on_end(
            _replace(
                self._response,
                status="incomplete" if is_cut else "completed",
                completed_at=None if is_cut else int(time.time()),
                incomplete_details=IncompleteDetails() if is_cut else None,
                output=self._items,
                usage=usage,
            )
        )

    # -- events -----------------------------------------------------------------------------------------------------

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self._items), "content_index": 0}

    def _id_of(self, kind: str) -> str:
        return f"{kind}_{self.id.partition('_')[2]}_{len(self._items)}"

    def _say(self, type: str, **fields: Any) -> None:
        event = ResponseEvent(type=type, sequence_number=self._number, **fields)
        self._events.append(b"event: %s\ndata: %s\n\n" % (type.encode(), _encode(event)))
        self._number += 1

    def _drained(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events
