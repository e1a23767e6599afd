"""Tool calls in an output: `<tool_call>{…}</tool_call>`, or an output that is nothing but their JSON."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal

import msgspec

from phonograph.server.openai.responses import FunctionCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ESCAPED = re.compile(r"\\.", re.DOTALL)


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call as models write it; an object with anything else in it is none."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    id: str | None = None
    type: Literal["function"] | None = None


_read_call = msgspec.json.Decoder(_Call).decode
_read_calls = msgspec.json.Decoder(list[_Call]).decode


class ToolCallReader:
    """Reads one output as it comes: text is given out at once, what may be a call is held until it is known to be one.

    What turns out to be no call, though it looked like one, is text after all; so is a call of a tool that was not
    given. Of more calls than `most`, the later ones are dropped.
    """

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        self._names = frozenset(names)
        self._left = most
        self._held = ""
        self._at_start = True
        self._in_call = False
        self._in_json = False
        self._skips_space = False
        """After a call: what stands between calls is no text."""
        self._looked = 0
        """How much of what is held has been searched for the end of a call."""
        self._in_text = False
        """Whether that much ends inside of a JSON text, where a tag is no tag."""

    def add(self, text: str) -> tuple[str, list[FunctionCall]]:
        """The text that can be given out, and the calls that are complete."""
        shown, calls = self._add(text)
        return shown, self._allowed(calls)

    def _allowed(self, calls: list[FunctionCall]) -> list[FunctionCall]:
        if self._left is None:
            return calls
        calls = calls[: self._left]
        self._left -= len(calls)
        return calls

    def _add(self, text: str) -> tuple[str, list[FunctionCall]]:
        self._held += text
        shown = ""
        calls: list[FunctionCall] = []
        while self._has_begun() and not self._in_json:
            if self._skips_space:
                self._held = self._held.lstrip()
                self._skips_space = not self._held
            if self._in_call:
                end = self._end_of_call()
                if end is None:
                    break
                inside = self._held[:end]
                self._held, self._in_call = self._held[end + len(_CLOSE) :], False
                call = _tagged(inside, self._names)
                self._skips_space = call is not None
                calls += [call] if call is not None else []
                shown += "" if call is not None else _OPEN + inside + _CLOSE
                continue
            before, opened, rest = self._held.partition(_OPEN)
            if not opened:
                keep = _overlap(before, _OPEN)
                shown += before[: len(before) - keep]
                self._held = before[len(before) - keep :]
                break
            shown += before
            self._held, self._in_call = rest, True
            self._looked, self._in_text = 0, False
        return shown, calls

    def _end_of_call(self) -> int | None:
        """Where the tag is that ends the call; one inside of a text of its JSON does not."""
        while (end := self._held.find(_CLOSE, self._looked)) >= 0:
            quotes = _ESCAPED.sub("", self._held[self._looked : end]).count('"')
            if (quotes + self._in_text) % 2 == 0:
                return end
            self._looked, self._in_text = end + len(_CLOSE), True
        return None

    def finish(self) -> tuple[str, list[FunctionCall]]:
        """What is left when the output has ended."""
        shown, calls = "", list[FunctionCall]()
        while self._in_call and _CLOSE in self._held and _tagged(self._held, self._names) is None:
            # A quote that has no end hid the tag: what is before it is no call, what is after it may have some.
            inside, _, self._held = self._held.partition(_CLOSE)
            self._in_call = False
            text, found = self.add("")
            shown, calls = shown + _OPEN + inside + _CLOSE + text, calls + found
        held, self._held = self._held, ""
        if self._in_call:
            call = _tagged(held, self._names)
            return (shown + _OPEN + held, calls) if call is None else (shown, calls + self._allowed([call]))
        found = _bare(held, self._names) if self._in_json else []
        return (shown, calls + self._allowed(found)) if found else (shown + held, calls)

    def _has_begun(self) -> bool:
        """Whether there was a character that is no space; the first shows whether the output is JSON."""
        if self._at_start and (first := self._held.lstrip()[:1]):
            self._at_start = False
            self._in_json = first in "{["
        return not self._at_start


def _overlap(text: str, tag: str) -> int:
    """How much of the text's end may be the beginning of a tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)


def _tagged(text: str, names: Collection[str]) -> FunctionCall | None:
    try:
        call = _made(_read_call(text))
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return call if call is not None and call.name in names else None


def _bare(text: str, names: Collection[str]) -> list[FunctionCall]:
    """The calls, if the whole text is one or a list of them and each names a tool that there is."""
    try:
        found = _read_calls(text) if text.lstrip().startswith("[") else [_read_call(text)]
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return []
    calls = [_made(one) for one in found]
    return [call for call in calls if call] if all(call and call.name in names for call in calls) else []


def _made(found: _Call) -> FunctionCall | None:
    """The call, with arguments as the model wrote them: another encoding may be another number."""
    if bool(bytes(found.arguments)) == bool(bytes(found.parameters)):
        return None
    arguments = bytes(found.arguments) or bytes(found.parameters)
    if arguments.startswith(b"{"):
        return FunctionCall(found.name, arguments.decode())
    return FunctionCall(found.name, msgspec.json.decode(arguments)) if arguments.startswith(b'"') else None


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the arguments of earlier calls as objects, not as JSON in a string."""
    return [_with_objects(message) if "tool_calls" in message else message for message in messages]


def argument_texts(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Of all earlier calls whose arguments are JSON in a string."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _json(function["arguments"])
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
