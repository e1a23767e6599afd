"""Sampling fields: a request's as the engine's SamplingParams; unsupported ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Literal, NoReturn

from phonograph.engine.requests.request import GrammarSpec, SamplingParams
from phonograph.server.http.failures import ApiError, unknown_field
from phonograph.server.openai.requests import ChatRequest, CompletionRequest, SamplingFields

_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
_FORMAT_FIELDS = ("type", "json_schema")
_STRUCTURED_FIELDS: dict[str, Literal["json_schema", "regex", "choice", "lark"]] = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def completion_params(request: CompletionRequest) -> SamplingParams:
    """For /v1/completions."""
    _refuse(request.suffix, "suffix", "infilling is not supported")
    if request.best_of not in (None, request.n or 1):
        raise _refusal("best_of", "as many choices are made as are returned: leave it out, or let it be `n`")
    max_tokens = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    echoed = request.logprobs if request.echo else None
    return _params(request, max_tokens, request.logprobs, prompt_logprobs=_more(echoed, request.prompt_logprobs))


def chat_params(request: ChatRequest, max_len: int) -> SamplingParams:
    """For /v1/chat/completions; without a limit an output may fill the context."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs`: true.", param="top_logprobs", code="invalid_value")
    if (
        None not in (request.max_tokens, request.max_completion_tokens)
        and request.max_tokens != request.max_completion_tokens
    ):
        problem = (
            f"it is {request.max_completion_tokens}, and `max_tokens`, another name of it, is {request.max_tokens}"
        )
        raise _refusal("max_completion_tokens", problem)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    asked = [most for most in (request.max_completion_tokens, request.max_tokens) if most is not None]
    most = asked[0] if asked else max(max_len, request.min_tokens or 0)
    return _params(request, most, logprobs, prompt_logprobs=request.prompt_logprobs)


def _params(
    request: SamplingFields, max_tokens: int, logprobs: int | None, *, prompt_logprobs: int | None
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "`stream_options` needs `stream`: true.", param="stream_options", code="invalid_value")
    if request.prompt_logprobs is not None and request.stream:
        raise _refusal("prompt_logprobs", "a stream has no place for them: send `stream`: false, or `echo`")
    if request.return_hidden_states and request.stream:
        raise _refusal("return_hidden_states", "a stream has no place for them: send `stream`: false")
    stop = (request.stop,) if request.stop and isinstance(request.stop, str) else tuple(request.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_k=None if request.top_k is None else max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=request.logit_bias or {},
        seed=request.seed,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        n=request.n or 1,
        logprobs=logprobs,
        grammar=grammar_of(request),
        prompt_logprobs=prompt_logprobs,
        min_tokens=request.min_tokens or 0,
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=tuple(request.bad_words or ()),
        speculate=request.speculate,
        return_hidden_states="last" if request.return_hidden_states else None,
    )


def _more(one: int | None, other: int | None) -> int | None:
    return max((number for number in (one, other) if number is not None), default=None)


def grammar_of(request: SamplingFields) -> GrammarSpec | None:
    """The grammar of the output: OpenAI's `response_format`, or one of the `guided_` fields."""
    found: dict[str, GrammarSpec] = {}
    _refuse_unknown(request.response_format, _FORMAT_FIELDS, "response_format.")
    kind = "text" if request.response_format is None else request.response_format.get("type")
    if kind in ("text", "json_object") and (request.response_format or {}).get("json_schema") is not None:
        raise _refusal("response_format.json_schema", f"the type is {kind}, which follows no schema: use json_schema")
    if kind in ("json_object", "json_schema"):
        found["response_format"] = GrammarSpec(
            "json_schema", _schema_of(request.response_format or {}), "response_format"
        )
    elif kind != "text":
        raise _refusal("response_format", f"its type is {repr(kind)[:100]}, not text, json_object or json_schema")
    if request.guided_json is not None:
        given = request.guided_json if isinstance(request.guided_json, str) else json.dumps(request.guided_json)
        found["guided_json"] = GrammarSpec("json_schema", given, "guided_json")
    if request.guided_regex is not None:
        found["guided_regex"] = GrammarSpec("regex", request.guided_regex, "guided_regex")
    if request.guided_choice is not None:
        found["guided_choice"] = GrammarSpec("choice", json.dumps(request.guided_choice), "guided_choice")
    if request.guided_grammar is not None:
        found["guided_grammar"] = GrammarSpec("lark", request.guided_grammar, "guided_grammar")
    found |= _structured(request.structured_outputs)
    if len(found) > 1:
        *others, last = found
        raise _refusal(last, f"the output can follow one grammar, and {others[0]} names another")
    return next(iter(found.values()), None)


def _structured(given: dict[str, Any] | None) -> dict[str, GrammarSpec]:
    """vLLM's form of the same: one of json, regex, choice and grammar, or `json_object`."""
    _refuse_unknown(given, _STRUCTURED_FIELDS, "structured_outputs.")
    found: dict[str, GrammarSpec] = {}
    for name, value in (given or {}).items():
        field, kind = f"structured_outputs.{name}", _STRUCTURED_FIELDS[name]
        if value is None or (name == "json_object" and value is False):
            continue
        if name == "json_object" and value is not True:
            _expected(field, "true")
        if name == "choice" and not isinstance(value, list):
            _expected(field, "a list of texts")
        if name in ("regex", "grammar") and not isinstance(value, str):
            _expected(field, "a text")
        text = value if isinstance(value, str) else json.dumps({"type": "object"} if value is True else value)
        found[field] = GrammarSpec(kind, text, field)
    return found


def _expected(field: str, what: str) -> NoReturn:
    raise ApiError(400, f"`{field}` must be {what}.", param=field, code="invalid_value")


def _schema_of(response_format: dict[str, Any]) -> str:
    if response_format.get("type") == "json_object":
        return '{"type": "object"}'
    described = response_format.get("json_schema")
    _refuse_unknown(described, _SCHEMA_FIELDS, "response_format.json_schema.")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(
            400,
            "`response_format` of type json_schema needs `json_schema`: {`name`: …, `schema`: {…}}.",
            param="response_format",
            code="invalid_value",
        )
    return json.dumps(schema)


def _refuse_unknown(given: object, known: Collection[str], place: str) -> None:
    for name, value in given.items() if isinstance(given, dict) else ():
        if value is not None and name not in known:
            raise unknown_field(name, known, place)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _refuse(value: object, name: str, because: str) -> None:
    if value not in (None, False, ""):
        raise _refusal(name, because)


def _refusal(name: str, because: str) -> ApiError:
    return ApiError(400, f"`{name}` can't be served: {because}. Leave it out.", param=name, code="unsupported")
