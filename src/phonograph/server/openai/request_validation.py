"""Request checks: lists and texts against their bounds, and fields that would have no effect, before any work."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from phonograph.engine.requests.request import SamplingParams
from phonograph.server.http import request_limits as limits
from phonograph.server.http.failures import ApiError, unknown_field
from phonograph.server.http.json_shape import Shape, shape_of
from phonograph.server.http.request_limits import ModelBounds
from phonograph.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from phonograph.server.openai.tool_messages import argument_texts

_TOOL_FIELDS = frozenset(("type", "function"))
_TOOL_FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "strict"))
MESSAGE_FIELDS = frozenset(("role", "content", "tool_calls", "tool_call_id", "reasoning_content"))
"""Fields of messages that the server knows; chat templates may read further ones."""
_ROLE_OF = {"tool_calls": "assistant", "tool_call_id": "tool", "reasoning_content": "assistant"}
"""Fields that messages of one role alone may have."""
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})
_PART_FIELDS = frozenset(("type", "text"))
_CALL_FIELDS = frozenset(("id", "type", "function"))
_FUNCTION_FIELDS = frozenset(("name", "arguments"))


def check_completion(request: CompletionRequest, bounds: ModelBounds) -> None:
    """Of /v1/completions."""
    _check_sampling(request)
    limits.LABEL_CHARS.check(len(request.suffix or ""), "suffix")
    if isinstance(request.prompt, str):
        bounds.prompt_chars.check(len(request.prompt))
        return
    if not isinstance(request.prompt[0], int):
        bounds.prompts.check(len(request.prompt))
    tokens = 0
    for place, prompt in enumerate(request.prompt):
        if isinstance(prompt, str):
            bounds.prompt_chars.check(len(prompt), f"prompt[{place}]")
        else:
            tokens += len(prompt) if isinstance(prompt, list) else 1
    bounds.prompt_tokens.check(tokens)


def check_chat(request: ChatRequest, bounds: ModelBounds) -> None:
    """Of /v1/chat/completions."""
    _check_sampling(request)
    _check_conversation(request.messages, request.tools, request.chat_template_kwargs, bounds)
    limits.LABEL_CHARS.check_size(request.tool_choice, "tool_choice")
    limits.LABEL_CHARS.check(len(request.modalities or ()), "modalities")


def check_tokenize(request: TokenizeRequest, bounds: ModelBounds) -> None:
    """Of /tokenize."""
    limits.LABEL_CHARS.check(len(request.model or ""), "model")
    bounds.prompt_chars.check(len(request.prompt or ""))
    _check_conversation(request.messages or [], request.tools, request.chat_template_kwargs, bounds)


def check_detokenize(request: DetokenizeRequest, bounds: ModelBounds) -> None:
    """Of /detokenize."""
    limits.LABEL_CHARS.check(len(request.model or ""), "model")
    bounds.tokens.check(len(request.tokens))


def check_message_fields(messages: Sequence[dict[str, Any]], read: Collection[str]) -> None:
    """Refuse message fields without effect: those neither known nor `read` by the chat template.

    Null and empty values are accepted: clients send messages back with all of OpenAI's fields.
    """
    for place, message in enumerate(messages):
        where = f"messages[{place}]."
        _refuse_unread(message, MESSAGE_FIELDS, read, where)
        _refuse_misplaced(message, where)
        for number, part in enumerate(_objects(message.get("content"))):
            if part.get("type") in (None, "text"):  # other types are refused where the template is rendered
                _refuse_unread(part, _PART_FIELDS, (), f"{where}content[{number}].")
        for number, call in enumerate(_objects(message.get("tool_calls"))):
            _refuse_unread(call, _CALL_FIELDS, read, f"{where}tool_calls[{number}].")
            for function in _objects([call.get("function")]):
                _refuse_unread(function, _FUNCTION_FIELDS, read, f"{where}tool_calls[{number}].function.")


def check_tool_fields(tools: Sequence[dict[str, Any]], read: Collection[str], *, shown_whole: bool) -> None:
    """Refuse tool fields that don't reach the model: the template neither names them nor dumps tools as JSON."""
    for place, tool in enumerate(() if shown_whole else tools):
        _refuse_unread(tool, _TOOL_FIELDS, read, f"tools[{place}].")
        for function in _objects([tool.get("function")]):
            _refuse_unread(function, _TOOL_FUNCTION_FIELDS, read, f"tools[{place}].function.")


def check_tokenize_fields(request: TokenizeRequest) -> None:
    """Refuse fields without effect: prompts use no chat template, and for messages the template adds special tokens."""
    of_messages = {
        "tools": request.tools,
        "chat_template_kwargs": request.chat_template_kwargs,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "content_special_tokens": request.content_special_tokens,
    }
    unread = [name for name, value in of_messages.items() if value not in (None, [], {})]
    if request.prompt is not None and unread:
        raise _unread(unread[0], "no chat template is applied to a prompt. Send `messages`, or leave it out.")
    if request.messages is not None and request.add_special_tokens:
        raise _unread("add_special_tokens", "the chat template adds them. Send false, or leave it out.")


def _unread(name: str, because: str) -> ApiError:
    return ApiError(400, f"`{name}` would have no effect: {because}", param=name, code="invalid_value")


def _objects(found: object) -> list[dict[str, Any]]:
    """The objects of a list, each at its index; anything else becomes an empty one."""
    return [part if isinstance(part, dict) else {} for part in found] if isinstance(found, list) else []


def _refuse_unread(found: dict[str, Any], known: Collection[str], read: Collection[str], where: str) -> None:
    for name, value in found.items():
        if value not in _SAYS_NOTHING and name not in known and name not in read:
            raise unknown_field(name, known, where)


def _refuse_misplaced(message: dict[str, Any], where: str) -> None:
    """Fields that messages of this role can't have."""
    for name, role in _ROLE_OF.items():
        if message.get(name) not in _SAYS_NOTHING and message.get("role") != role:
            field, because = where + name, f"only messages of the role {role} have one. Leave it out."
            raise ApiError(400, f"`{field}` can't be served: {because}", param=field, code="unsupported")


def check_logprobs(
    params: SamplingParams, prompts: Sequence[Sequence[int]], max_len: int, field: str = "prompt_logprobs"
) -> None:
    """A response with logprobs grows with the product of all of these; `field` asked for those of prompts."""
    if params.logprobs is not None:
        entries = len(prompts) * params.n * min(params.max_tokens, max_len) * (1 + params.logprobs)
        limits.LOGPROBS.check(entries)
    if params.prompt_logprobs is not None:
        entries = sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)
        limits.PROMPT_LOGPROBS.check(entries, field)


def _check_sampling(request: SamplingFields) -> None:
    for name in ("model", "user", "service_tier", "safety_identifier", "prompt_cache_key"):
        limits.LABEL_CHARS.check(len(getattr(request, name) or ""), name)
    limits.METADATA_SIZE.check_size(request.metadata)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    limits.STOPS.check(len(stops))
    for place, stop in enumerate(stops):
        limits.STOP_CHARS.check(len(stop), "stop" if isinstance(request.stop, str) else f"stop[{place}]")
    limits.STOP_TOKENS.check(len(request.stop_token_ids or ()))
    limits.ALLOWED_TOKENS.check(len(request.allowed_token_ids or ()))
    limits.BAD_WORDS.check(len(request.bad_words or ()))
    for place, word in enumerate(request.bad_words or ()):
        limits.BAD_WORD_CHARS.check(len(word), f"bad_words[{place}]")
    limits.BIASED.check(len(request.logit_bias or ()))
    limits.SCHEMA_SIZE.check_size(request.response_format, "response_format")
    limits.SCHEMA_SIZE.check_size(request.guided_json, "guided_json")
    limits.GRAMMAR_CHARS.check(len(request.guided_regex or ""), "guided_regex")
    limits.GRAMMAR_CHARS.check(len(request.guided_grammar or ""), "guided_grammar")
    _check_structured(request.structured_outputs)
    limits.GUIDED_CHOICES.check(len(request.guided_choice or ()))
    limits.GUIDED_CHOICE_SIZE.check_size(request.guided_choice)


def _check_structured(given: dict[str, Any] | None) -> None:
    """Check each part against the bound of the field that it is an alias of."""
    limits.SCHEMA_SIZE.check_size(given, "structured_outputs")
    if isinstance(choices := (given or {}).get("choice"), list):
        limits.GUIDED_CHOICES.check(len(choices), "structured_outputs.choice")


def _check_arguments(messages: Sequence[dict[str, Any]], bounds: ModelBounds) -> None:
    """Arguments of earlier tool calls are JSON strings, decoded for the template: bounded together like one body."""
    total = Shape(0, 0, 0, 0, 0, 0)
    for text in argument_texts(messages):
        total += shape_of(text.encode("utf-8", "surrogatepass"), bounds.values.most)
        bounds.check_shape(total, "messages[].tool_calls[].function.arguments")


def _check_conversation(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
    bounds: ModelBounds,
) -> None:
    limits.MESSAGES.check(len(messages))
    bounds.prompt_chars.check_size(messages, "messages")
    _check_arguments(messages, bounds)
    limits.TOOLS.check(len(tools or ()))
    limits.TOOLS_SIZE.check_size(tools)
    limits.TEMPLATE_SIZE.check_size(variables)
