"""ToolCallReader: parses tool calls out of an output as it streams."""

from __future__ import annotations

import re
from collections.abc import Collection

from phonograph.server.openai.responses import FunctionCall
from phonograph.server.openai.tool_formats import HERMES, ToolFormat, read_json

_ESCAPED = re.compile(r"\\.", re.DOTALL)


class ToolCallReader:
    """Parses one output as it streams: text is passed on at once, a possible tool call is held until it is complete.

    What turns out not to be a tool call is passed on as text; so is a call of an unknown tool. Calls beyond `most` are
    dropped.
    """

    def __init__(
        self,
        names: Collection[str],
        format: ToolFormat = HERMES,
        most: int | None = None,
        *,
        takes_bare: bool = True,
    ) -> None:
        self._names = frozenset(names)
        self._takes_bare = takes_bare
        self._format = format
        self._left = most
        self._held = ""
        self._at_start = True
        self._in_call = False
        self._in_json = False
        self._skips_space = False
        """After a call: text between calls is dropped."""
        self._looked = 0
        """How much of the held text has been searched for the end of a call."""
        self._in_text = False
        """Whether that much ends inside of a JSON string, where a tag does not count."""

    def add(self, text: str) -> list[str | FunctionCall]:
        """Text that can be passed on and complete calls, in order."""
        self._held += text
        found: list[str | FunctionCall] = []
        while self._has_begun() and not self._in_json:
            if self._skips_space:
                self._held = self._held.lstrip()
                self._skips_space = not self._held
            if not (self._past_call(found) if self._in_call else self._up_to_call(found)):
                break
        return found

    def _up_to_call(self, found: list[str | FunctionCall]) -> bool:
        """Pass on text up to the next opening tag; whether there was one."""
        opening = self._format.opening
        before, opened, rest = self._held.partition(opening) if opening else (self._held, "", "")
        if not opened:
            keep = overlap(before, opening)
            _say(found, before[: len(before) - keep])
            self._held = before[len(before) - keep :]
            return False
        _say(found, before)
        self._held, self._in_call = rest, True
        self._looked, self._in_text = 0, False
        return True

    def _past_call(self, found: list[str | FunctionCall]) -> bool:
        """Parse the held call; whether it is complete."""
        end = self._end_of_call()
        if end is None:
            return False
        opening, closing = self._format.opening, self._format.closing
        inside = self._held[:end]
        self._held, self._in_call = self._held[end + len(closing) :], False
        calls = self._known(self._format.read(inside))
        self._skips_space = bool(calls)
        found += self._allowed(calls)
        if not calls:
            _say(found, opening + inside + closing)
        return True

    def _end_of_call(self) -> int | None:
        """Where the closing tag is; one inside of a JSON string does not count."""
        closing = self._format.closing
        while closing and (end := self._held.find(closing, self._looked)) >= 0:
            quotes = _ESCAPED.sub("", self._held[self._looked : end]).count('"')
            if (quotes + self._in_text) % 2 == 0:
                return end
            self._looked, self._in_text = end + len(closing), True
        return None

    def finish(self) -> list[str | FunctionCall]:
        """Parts that were held back until the output ended."""
        found: list[str | FunctionCall] = []
        opening, closing = self._format.opening, self._format.closing
        while self._in_call and closing and closing in self._held and not self._known(self._format.read(self._held)):
            # An unterminated string hid the tag: before it there is no call, after it there may be some.
            inside, _, self._held = self._held.partition(closing)
            self._in_call = False
            _say(found, opening + inside + closing)
            found += self.add("")
        held, self._held = self._held, ""
        calls: list[FunctionCall] = []
        if self._in_call:
            calls = self._known(self._format.read(held))
            held = held if calls else opening + held
        elif self._in_json:
            calls = self._known(read_json(held))
        if calls:
            return found + self._allowed(calls)
        _say(found, held)
        return found

    def _known(self, calls: list[FunctionCall]) -> list[FunctionCall]:
        """The calls, if each is of a known tool."""
        return calls if all(call.name in self._names for call in calls) else []

    def _allowed(self, calls: list[FunctionCall]) -> list[FunctionCall]:
        if self._left is None:
            return calls
        calls = calls[: self._left]
        self._left -= len(calls)
        return calls

    def _has_begun(self) -> bool:
        """Whether there was a character besides spaces; the first ones show whether the output is JSON."""
        if self._at_start and (begun := self._held.lstrip()):
            opening = self._format.opening
            if len(begun) < len(opening) and opening.startswith(begun):
                return False  # Mistral's mark begins as a list does
            self._at_start = False
            self._in_json = self._takes_bare and begun[0] in "{[" and not (opening and begun.startswith(opening))
        return not self._at_start


def _say(found: list[str | FunctionCall], text: str) -> None:
    if text:
        found.append(text)


def overlap(text: str, tag: str) -> int:
    """How many characters at the text's end may begin a tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)
