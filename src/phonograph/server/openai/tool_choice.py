"""ToolChoice: whether the model may, must or must not call tools; forced calls follow a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phonograph.engine.requests.request import GrammarSpec
from phonograph.server.http.failures import ApiError, unknown_field
from phonograph.server.openai.tool_formats import Spelling

MAX_FORCED_CALLS = 32
"""Forced calls per output: a model that never stops calling would fill the context."""
_WORDS = ("none", "auto", "required")
_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models write JSON. With arbitrary white space a weak model may generate nothing else."""
_OF_SCHEMAS = frozenset(("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"))
"""Keywords whose values map names to schemas; the names are not keywords."""
_OF_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are not schemas."""


@dataclass(frozen=True)
class ToolChoice:
    """Which tools reach the model, and whether it must call one."""

    tools: tuple[dict[str, Any], ...] = ()
    mode: Literal["none", "auto", "required"] = "auto"
    is_named: bool = False
    """Whether there is one tool because the request names it: then it is called once."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"


def choice_of(given: str | Mapping[str, Any] | None, tools: Sequence[dict[str, Any]] | None) -> ToolChoice:
    """Resolve `tool_choice` against the given tools; refuses one that can't be met."""
    for place, tool in enumerate(tools or ()):
        _check_tool(place, tool)
    named = tuple(tools or ())
    if given is None or given in _WORDS:
        mode: Literal["none", "auto", "required"] = given or "auto"  # type: ignore[assignment]
        if mode == "required" and not named:
            raise _refusal('"required" needs `tools`, and there are none. Send some')
        return ToolChoice(named if mode != "none" else (), mode)
    if isinstance(given, str):
        raise _refusal(f"it is {given[:100]!r}; expected {', '.join(_WORDS)} or a function")
    return _choice_of_object(given, named)


def _choice_of_object(given: Mapping[str, Any], tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    kind = given.get("type")
    if kind == "function":
        _refuse_others(given, ("type", "function"))
        return ToolChoice((_named(given.get("function"), tools),), "required", is_named=True)
    if kind == "allowed_tools":
        _refuse_others(given, ("type", "allowed_tools"))
        allowed = given.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required") or not listed:
            raise _refusal('allowed_tools must be {"mode": "auto" or "required", "tools": […]}')
        functions = [one.get("function") if isinstance(one, dict) else None for one in listed]
        found = tuple(_named(function, tools) for function in functions)
        return ToolChoice(found, allowed["mode"])
    problem = f"its type is {repr(kind)[:100]}; expected function or allowed_tools"
    raise _refusal(problem)


def _named(function: object, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _refusal('a function is named by {"type": "function", "function": {"name": …}}')
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise _refusal(f"the function {name[:100]!r} is not among `tools`")


def _refuse_others(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            raise unknown_field(name, known, "tool_choice.")


def _check_tool(place: int, tool: dict[str, Any]) -> None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        message = f'`tools[{place}]` must be {{"type": "function", "function": {{"name": …}}}}.'
        raise ApiError(400, message, param=f"tools[{place}]", code="invalid_value")


def grammar_of_calls(
    choice: ToolChoice, spelling: Spelling, *, parallel: bool, instead: GrammarSpec | None = None
) -> GrammarSpec:
    """The grammar of an output that is only tool calls, each valid for its tool's schema, or JSON `instead`."""
    rules: list[str] = []
    for place, tool in enumerate(choice.tools):
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        head = _text(f'{spelling.before}{{"name": {name}, "{spelling.key}": ')
        schema = json.dumps(_schema_of(place, tool["function"]), ensure_ascii=False)
        rules.append(f"call_{place}: {head} args_{place} {_text('}' + spelling.after)}")
        rules.append(f"args_{place}: %json {schema}")
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(choice.tools))))
    is_list = parallel and not choice.is_named
    more = f" ({_text(spelling.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}" if is_list else ""
    begin, end = (_text(text) + " " if text else "" for text in (spelling.begin, spelling.end))
    if instead is not None:
        rules.append(f"said: %json {instead.text}")
    start = f"{begin}call{more} {end}".rstrip() + (" | said" if instead is not None else "")
    text = "\n".join([f"start: {start}", *rules])
    return GrammarSpec("lark", text.replace("\x7f", "\\u007f"), "tools" if instead is None else instead.field)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema_of(place: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the arguments: an object; `strict` allows no properties beyond those described."""
    given = function.get("parameters")
    if given is None:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    field = f"tools[{place}].function.parameters"
    if not isinstance(given, dict):
        raise ApiError(400, f"`{field}` must be a JSON schema, as an object.", param=field, code="invalid_value")
    GrammarSpec("json_schema", json.dumps(given), field)  # refuses schemas that a grammar can't enforce exactly
    closed = _closed(given) if function.get("strict") else given
    typed = closed if "type" in closed or "$ref" in closed else {"type": "object", **closed}
    return {"x-guidance": _TIGHT, **typed}


def _closed(schema: Any, *, by_name: bool = False) -> Any:
    """A schema whose objects have no further properties where it does not say that they may."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: part if name in _OF_VALUES and not by_name else _closed(part, by_name=not by_name and name in _OF_SCHEMAS)
        for name, part in schema.items()
    }
    is_open = not by_name and "properties" in found and "additionalProperties" not in found
    return {**found, "additionalProperties": False} if is_open else found


def _refusal(because: str) -> ApiError:
    return ApiError(400, f"`tool_choice` can't be served: {because}.", param="tool_choice", code="unsupported")
