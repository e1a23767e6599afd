"""ToolFormat: how a model family writes tool calls, for parsing outputs and for the grammar of forced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from phonograph.server.openai.responses import FunctionCall

_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeEncodeError, ValueError)
_BETWEEN = re.compile(r"[\s;]*")
"""Separators between calls that are consecutive JSON objects."""
_NAMED = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*[^\s\[{]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
"""Newer Mistral models write the name in front of the arguments."""


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call as models write it; an object with other fields is not a call."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    id: str | None = None
    type: Literal["function"] | None = None


_read_call = msgspec.json.Decoder(_Call).decode
_read_calls = msgspec.json.Decoder(list[_Call]).decode
_end_of = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Spelling:
    """How calls are written out: `begin call separator call end`, each call as `before {"name": …, key: …} after`."""

    begin: str = ""
    before: str = ""
    after: str = ""
    separator: str = ", "
    end: str = ""
    key: Literal["arguments", "parameters"] = "arguments"


@dataclass(frozen=True)
class ToolFormat:
    """How calls appear in an output; an output that is only their JSON is parsed in every format."""

    name: str
    read: Callable[[str], list[FunctionCall]]
    """The calls in the text between the tags; none if it can't be parsed."""
    opening: str = ""
    """The opening tag; without one, calls are the whole output."""
    closing: str = ""
    """The closing tag; without one, calls extend to the end of the output."""
    spelling: Spelling = Spelling()
    marks: tuple[str, ...] = ()
    """Texts that are part of calls and may be special tokens of a vocabulary."""


def read_json(text: str) -> list[FunctionCall]:
    """The calls of a text that is only JSON: one, a list of them, or several in a row."""
    try:
        if text.lstrip().startswith("["):
            return _all(_read_calls(text))
        return _all([_read_call(part) for part in _objects(text)])
    except _UNREADABLE:
        return []


def _read_one(text: str) -> list[FunctionCall]:
    try:
        return _all([_read_call(text)])
    except _UNREADABLE:
        return []


def _read_mistral(text: str) -> list[FunctionCall]:
    if text.lstrip().startswith(("[{", "[ {", "[\n", "{")):
        return read_json(text)
    calls: list[FunctionCall] = []
    place = 0
    try:
        while found := _NAMED.match(text, place):
            _, end = _end_of(text, found.end())
            calls.append(FunctionCall(found[1], text[found.end() : end]))
            rest = text[end:]
            place = end + len(rest) - len(rest.lstrip().removeprefix("[TOOL_CALLS]"))
    except _UNREADABLE:
        return []
    return [] if text[place:].strip() else calls


def _objects(text: str) -> Iterator[str]:
    """JSON values in a row."""
    place = _after_spaces(text, 0)
    while place < len(text):
        _, end = _end_of(text, place)
        yield text[place:end]
        place = _after_spaces(text, end)


def _after_spaces(text: str, place: int) -> int:
    found = _BETWEEN.match(text, place)
    return place if found is None else found.end()


def _all(found: list[_Call]) -> list[FunctionCall]:
    calls = [_made(one) for one in found]
    return [call for call in calls if call is not None] if None not in calls else []


def _made(found: _Call) -> FunctionCall | None:
    """The call, with arguments as the model wrote them: encoding them again might change a number."""
    if bool(bytes(found.arguments)) == bool(bytes(found.parameters)):
        return None
    arguments = bytes(found.arguments) or bytes(found.parameters)
    if arguments.startswith(b"{"):
        return FunctionCall(found.name, arguments.decode())
    return FunctionCall(found.name, msgspec.json.decode(arguments)) if arguments.startswith(b'"') else None


_LIST = Spelling(begin="[", end="]")

HERMES = ToolFormat(
    "hermes",
    _read_one,
    "<tool_call>",
    "</tool_call>",
    Spelling(before="<tool_call>\n", after="\n</tool_call>", separator="\n"),
    ("<tool_call>", "</tool_call>"),
)
LLAMA3 = ToolFormat(
    "llama3_json",
    read_json,
    "<|python_tag|>",
    spelling=Spelling(separator="; ", key="parameters"),
    marks=("<|python_tag|>",),
)
MISTRAL = ToolFormat(
    "mistral",
    _read_mistral,
    "[TOOL_CALLS]",
    spelling=_LIST,
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
JSON = ToolFormat("json", read_json, spelling=_LIST)

FORMATS = {one.name: one for one in (HERMES, LLAMA3, MISTRAL, JSON)}
CHOICES = ("auto", "none", *FORMATS)
"""What `--tool-parser` takes."""


class Mentions(Protocol):
    """A chat template, as far as formats are detected from it."""

    takes_tools: bool

    def mentions(self, text: str) -> bool: ...


def format_of(template: Mentions) -> ToolFormat:
    """The format that a template uses; Hermes for one without tools, as the fallback prompt for tools uses that."""
    if template.mentions("[TOOL_CALLS]"):
        return MISTRAL
    if template.mentions("<|python_tag|>") or template.mentions('"parameters": dictionary of argument'):
        return LLAMA3
    is_hermes = template.mentions("<tool_call>") and not template.mentions("<function=")
    return HERMES if is_hermes or not template.takes_tools else JSON


def call_of(function: dict[str, Any], spelling: Spelling) -> str:
    """An earlier call as the model would have written it."""
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{spelling.before}{{"name": {name}, "{spelling.key}": {written or "{}"}}}{spelling.after}'
