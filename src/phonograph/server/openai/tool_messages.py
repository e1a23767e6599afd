"""Tool messages: tools, earlier calls and their results, in the form that the model's chat template takes.

A template without tool support gets them as text: a system message with their JSON, calls as assistant text, and
results as user text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from phonograph.engine.text import ChatTemplate
from phonograph.server.http.failures import ApiError
from phonograph.server.openai.tool_formats import ToolFormat, call_of

Message = dict[str, Any]

_TOOLS = """\
You may call functions to help with the user's request. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call one, answer with nothing but its name and arguments as JSON, in this form:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Several calls are one such block after the other. If no function helps, answer as usual."""
_RESULT = "<tool_response>\n{result}\n</tool_response>"


def for_template(
    messages: Sequence[Message], tools: Sequence[Message] | None, template: ChatTemplate, format: ToolFormat
) -> tuple[list[Message], list[Message] | None]:
    """Messages and tools as the template takes them."""
    reads_calls = "tool_calls" in template.message_fields
    found = [_with_objects(one) for one in messages] if reads_calls else _with_calls_written(messages, format)
    if not tools:
        return found, None
    if template.takes_tools:
        return found, list(tools)
    return _with_tools_written(found, tools, takes_system=template.takes_system), None


def argument_texts(messages: Iterable[Message]) -> Iterator[str]:
    """The arguments of all earlier calls, as JSON strings."""
    for message in messages:
        for function in _functions(message):
            if isinstance(function.get("arguments"), str):
                yield function["arguments"]


def _functions(message: Message) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    found = (
        [call.get("function") if isinstance(call, dict) else None for call in calls] if isinstance(calls, list) else []
    )
    return [function if isinstance(function, dict) else {} for function in found]


def _with_tools_written(messages: Sequence[Message], tools: Sequence[Message], *, takes_system: bool) -> list[Message]:
    """With tools in the system message, in a new one if there is none, or else in front of the first message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=lines)
    first = messages[0] if messages else {}
    is_system = first.get("role") in ("system", "developer")
    if takes_system and not is_system:
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        return [{**first, "content": [*content, part] if is_system else [part, *content]}, *messages[1:]]
    if not isinstance(content, str):
        return list(messages)
    joined = f"{content}\n\n{text}" if is_system else f"{text}\n\n{content}"
    return [{**first, "content": joined}, *messages[1:]]


def _with_calls_written(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    """With calls and results as text, for templates that read neither."""
    found: list[Message] = []
    names: dict[str, str] = {}
    results: list[str] = []
    for place, message in enumerate(messages):
        if message.get("role") == "tool":
            results.append(_RESULT.format(result=_result(place, message, names)))
            continue
        if results:
            found.append({"role": "user", "content": "\n".join(results)})
            results = []
        for call, function in zip(message.get("tool_calls") or (), _functions(message), strict=False):
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                names[call["id"]] = str(function.get("name"))
        found.append(_said(message, format))
    return [*found, {"role": "user", "content": "\n".join(results)}] if results else found


def _said(message: Message, format: ToolFormat) -> Message:
    """An assistant message with its calls as text."""
    functions = _functions(message)
    if not functions:
        return message
    spelling = format.spelling
    written = spelling.begin + spelling.separator.join(call_of(one, spelling) for one in functions) + spelling.end
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    if isinstance(content, list):
        return {**rest, "content": [*content, {"type": "text", "text": written}]}
    return {**rest, "content": f"{content}\n{written}" if content and isinstance(content, str) else written}


def _result(place: int, message: Message, names: dict[str, str]) -> str:
    """A tool's result, with the name of its function."""
    content, call = message.get("content"), message.get("tool_call_id")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "\n".join(part for part in parts if isinstance(part, str)) if None not in parts else None
    if not isinstance(content, str):
        problem = "must be a text or text parts: the result of a tool"
        field = f"messages[{place}].content"
        raise ApiError(400, f"`{field}` {problem}.", param=field, code="invalid_value")
    if not call:
        return content
    if call not in names:
        field = f"messages[{place}].tool_call_id"
        problem = f"names the call {str(call)[:100]!r}, which no message before it has"
        raise ApiError(
            400, f"`{field}` {problem}. Send the assistant's message too.", param=field, code="invalid_value"
        )
    return json.dumps({"name": names[call], "content": content}, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _with_objects(message: Message) -> Message:
    """The arguments of earlier calls as objects, not as JSON in a string."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _json(function["arguments"])
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
