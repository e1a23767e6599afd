"""Conversation: a response's input items as chat messages, and its output as messages of the next turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from phonograph.server.http.failures import ApiError, unknown_field
from phonograph.server.openai.responses_api.objects import FunctionCallItem, OutputItem, OutputMessage, ReasoningItem

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})
_FIELDS = {
    "message": ("type", "id", "status", "role", "content", "phase"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
    "reasoning": ("type", "id", "status", "summary", "content", "encrypted_content"),
}
"""By item type. `id`, `status` and `phase` are on output items that are sent back; nothing depends on them."""
_PART_FIELDS = ("type", "text", "annotations", "logprobs")


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Items as chat messages; refuses an item that can't be one."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[Message] = []
    thought = ""
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = item.get("type") or "message"
        if kind not in _FIELDS:
            expected = ", ".join(_FIELDS)
            raise _refusal(f"{where}.type", f"is {repr(kind)[:100]}; expected one of {expected}")
        _refuse_unknown(item, _FIELDS[kind], f"{where}.")
        if kind == "reasoning":
            thought = _thought(where, item)
            continue
        message = _message(where, kind, item)
        if message["role"] == "assistant":
            if thought:
                message["reasoning_content"], thought = thought, ""
            if found and found[-1]["role"] == "assistant" and kind == "function_call":
                _join(found[-1], message)
                continue
        found.append(message)
    if not found:
        raise _refusal("input", "has no message. Send one")
    return found


def messages_of_output(output: Sequence[OutputItem]) -> list[Message]:
    """A response's output as one assistant message."""
    message: Message = {"role": "assistant", "content": None}
    for item in output:
        match item:
            case OutputMessage():
                message["content"] = (message["content"] or "") + "".join(part.text for part in item.content)
            case ReasoningItem():
                message["reasoning_content"] = message.get("reasoning_content", "") + "".join(
                    part.text for part in item.content
                )
            case FunctionCallItem():
                call = {"id": item.call_id, "type": "function"}
                function = {"name": item.name, "arguments": item.arguments}
                message.setdefault("tool_calls", []).append({**call, "function": function})
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return [message]


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """With instructions in front, merged into the system message: many templates accept only one, at the start."""
    if not instructions:
        return list(messages)
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _message(where: str, kind: str, item: Mapping[str, Any]) -> Message:
    if kind == "function_call":
        call_id, name, arguments = (_text(item, field, where) for field in ("call_id", "name", "arguments"))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(f"{where}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content}
    role = item.get("role")
    if role not in _ROLES:
        raise _refusal(f"{where}.role", f"is {repr(role)[:100]}; expected one of {', '.join(_ROLES)}")
    return {"role": role, "content": _content(f"{where}.content", item.get("content"))}


def _join(message: Message, further: Message) -> None:
    """Merge the tool calls of one turn into one message."""
    message.setdefault("tool_calls", []).extend(further["tool_calls"])
    if "reasoning_content" in further:
        message["reasoning_content"] = message.get("reasoning_content", "") + further["reasoning_content"]


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(where, "must be a text or a list of text parts")
    return "\n".join(_part(f"{where}[{place}]", part) for place, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in _TEXTS or not isinstance(part.get("text"), str):
        raise _refusal(where, f"is of type {repr(kind)[:100]}; the model reads text only: expected input_text")
    _refuse_unknown(part, _PART_FIELDS, f"{where}.")
    text: str = part["text"]
    return text


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """The reasoning text: its content, else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts] if _is_list(parts) else [None]
        if None in texts or not all(isinstance(text, str) for text in texts):
            raise _refusal(f"{where}.{name}", "must be a list of texts")
        if texts:
            return "\n".join(map(str, texts))
    return ""


def _is_list(found: object) -> bool:
    return isinstance(found, list)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or (not value and name != "arguments"):
        raise _refusal(f"{where}.{name}", "must be a text")
    return value


def _refuse_unknown(found: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for name, value in found.items():
        if name not in known and value not in _SAYS_NOTHING:
            raise unknown_field(name, known, where)


def _refusal(field: str, problem: str) -> ApiError:
    return ApiError(400, f"`{field}` {problem}.", param=field, code="invalid_value")
