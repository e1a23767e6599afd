"""Translation: a Responses request as a chat request, and the chat's errors with the Responses API's field names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from phonograph.errors import RequestError
from phonograph.server.http.failures import ApiError, unknown_field
from phonograph.server.openai.requests import ChatRequest
from phonograph.server.openai.responses_api.request import ResponsesRequest

Message = dict[str, Any]

_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_WORDS = (
    (re.compile(r"messages(\[\d*\])?"), "input"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"max_completion_tokens|max_tokens"), "max_output_tokens"),
    (re.compile(r"tool_call_id"), "call_id"),
    (
        re.compile(r"no message before it has\. Send the assistant's message too"),
        "no item before it has. Send that too",
    ),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(?<!text\.)verbosity"), "text.verbosity"),
)
ALIKE = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "chat_template_kwargs", "content_special_tokens", "parallel_tool_calls"),
    *("speculate", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key"),
)
"""Fields that mean the same in both."""


def chat_of(request: ResponsesRequest, messages: Sequence[Message]) -> ChatRequest:
    """The chat whose answer is the response."""
    wants_logprobs = "message.output_text.logprobs" in (request.include or ())
    if request.top_logprobs and not wants_logprobs:
        problem = '`top_logprobs` needs "message.output_text.logprobs" in `include`.'
        raise ApiError(400, problem, param="top_logprobs", code="invalid_value")
    text, reasoning = request.text, request.reasoning
    return ChatRequest(
        messages=list(messages),
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        tools=[_tool(place, tool) for place, tool in enumerate(request.tools or ())] or None,
        tool_choice=_choice(request.tool_choice),
        response_format=_format(text.format) if text is not None and text.format is not None else None,
        verbosity=text.verbosity if text is not None else None,
        reasoning_effort=reasoning.effort if reasoning is not None else None,
        **{name: getattr(request, name) for name in ALIKE},
    )


def notes_of(request: ResponsesRequest) -> list[str]:
    """Fields of the request that have no effect."""
    found: list[str] = []
    if request.reasoning is not None and (request.reasoning.summary or request.reasoning.generate_summary):
        found.append("reasoning.summary: reasoning is not summarized; it is returned in full")
    if "reasoning.encrypted_content" in (request.include or ()):
        found.append("include reasoning.encrypted_content: nothing is encrypted; reasoning items have their content")
    return found


def in_words_of_responses(error: ApiError | RequestError) -> ApiError:
    """The same error, with the Responses API's field names."""
    found = error.error if isinstance(error, ApiError) else None
    message, param = str(error), found.param if found is not None else getattr(error, "field", None)
    for pattern, name in _WORDS:
        message = pattern.sub(name, message)
        param = pattern.sub(name, param) if param is not None else None
    if not isinstance(error, ApiError) or found is None:
        return ApiError(400, message, param=param)
    return ApiError(
        error.status, message, type=found.type, param=param, code=found.code, headers=error.headers, detail=error.detail
    )


def _tool(place: int, tool: Mapping[str, Any]) -> Message:
    where = f"tools[{place}]"
    if tool.get("type") != "function":
        kind = repr(tool.get("type"))[:100]
        message = f"`{where}.type` is {kind}; no tools run here: expected function, which the client runs."
        raise ApiError(400, message, param=f"{where}.type", code="unsupported")
    for name, value in tool.items():
        if name not in _TOOL_FIELDS and value is not None:
            raise unknown_field(name, _TOOL_FIELDS, f"{where}.")
    function = {name: tool[name] for name in _TOOL_FIELDS[1:] if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The Responses API names functions where chat completions nest them."""
    if not isinstance(given, dict):
        return given
    if given.get("type") == "allowed_tools":
        listed = given.get("tools")
        tools = [_choice(one) if isinstance(one, dict) else one for one in listed] if isinstance(listed, list) else None
        rest = {name: value for name, value in given.items() if name not in ("tools", "mode")}
        return {**rest, "allowed_tools": {"mode": given.get("mode"), "tools": tools}}
    rest = {name: value for name, value in given.items() if name != "name"}
    return {**rest, "function": {"name": given.get("name")}} if given.get("type") == "function" else given


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: one for name, one in given.items() if name != "type"}}


def described(request: ResponsesRequest, *, is_stored: bool) -> dict[str, Any]:
    """Request fields that a response echoes."""
    text, reasoning = request.text, request.reasoning
    wanted = (text.format if text is not None else None) or {"type": "text"}
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": msgspec.to_builtins(reasoning) if reasoning is not None else {"effort": None, "summary": None},
        "store": is_stored,
        "temperature": request.temperature,
        "text": {"format": wanted, **({"verbosity": text.verbosity} if text is not None and text.verbosity else {})},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        **{name: getattr(request, name) for name in ("user", "service_tier", "safety_identifier", "prompt_cache_key")},
    }
