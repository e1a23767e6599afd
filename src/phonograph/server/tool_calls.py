"""Finds the calls of tools in an answer: `<tool_call>{…}</tool_call>`, or an answer that is nothing but their JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from phonograph.server.answers import FunctionCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")


class ToolCallReader:
    """Reads one answer as it comes: text is given out at once, what may be a call is held until it is known to be one.

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
        """Behind a call: what stands between calls is no text."""

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
                inside, closed, rest = self._held.partition(_CLOSE)
                if not closed:
                    break
                self._held, self._in_call = rest, False
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
        return shown, calls

    def finish(self) -> tuple[str, list[FunctionCall]]:
        """What is left when the answer has ended."""
        held, self._held = self._held, ""
        if self._in_call:
            call = _tagged(held, self._names)
            return (_OPEN + held, []) if call is None else ("", self._allowed([call]))
        if self._in_json:
            calls = _bare(held, self._names)
            return ("", self._allowed(calls)) if calls else (held, [])
        return held, []

    def _has_begun(self) -> bool:
        """Whether there was a character that is no space; the first tells an answer in JSON."""
        if self._at_start and (first := self._held.lstrip()[:1]):
            self._at_start = False
            self._in_json = first in "{["
        return not self._at_start


def _overlap(text: str, tag: str) -> int:
    """How much of the text's end may be the beginning of a tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)


def _tagged(text: str, names: Collection[str]) -> FunctionCall | None:
    call = _call(_json(text))
    return call if call is not None and call.name in names else None


def _bare(text: str, names: Collection[str]) -> list[FunctionCall]:
    """The calls, if the whole text is one or a list of them and each names a tool that there is."""
    found = _json(text)
    calls = [_call(one) for one in (found if isinstance(found, list) else [found])]
    return [call for call in calls if call] if all(call and call.name in names for call in calls) else []


def _call(found: object) -> FunctionCall | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    for key in _ARGUMENTS:
        arguments = found.get(key)
        if isinstance(arguments, dict):
            return FunctionCall(found["name"], msgspec.json.encode(arguments).decode())
        if isinstance(arguments, str):
            return FunctionCall(found["name"], arguments)
    return None


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
