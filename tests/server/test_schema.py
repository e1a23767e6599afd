"""Requests made up from the OpenAPI document: whatever they are, an answer comes, of the form that was promised; and
those that are valid are served."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from phonograph.server.app import OPERATIONS
from phonograph.server.openai.message_schemas import (
    ITEM,
    MESSAGE,
    RESPONSE_FORMAT,
    RESPONSE_TOOL,
    STRUCTURED_OUTPUTS,
    TEXT_FORMAT,
    TOOL,
)
from phonograph.server.openapi import document
from server import tiny
from server.conftest import TINY_FLAGS, Server, serving

OF_TEMPLATES = (MESSAGE, TOOL, RESPONSE_FORMAT, STRUCTURED_OUTPUTS, ITEM, RESPONSE_TOOL, TEXT_FORMAT)
"""What the document describes in the form that is always served; a template, or null, may make more of it valid."""


def opened(found: Any) -> Any:
    """The document, with any object in these places."""
    if isinstance(found, dict):
        if any(found == {"type": "object", **one} for one in OF_TEMPLATES):
            return {"type": "object"}
        return {name: opened(one) for name, one in found.items()}
    return [opened(one) for one in found] if isinstance(found, list) else found


schema = schemathesis.openapi.from_dict(document(OPERATIONS))
open_schema = schemathesis.openapi.from_dict(opened(document(OPERATIONS)))

EXAMPLES: dict[str, Any] = {"max_examples": 40, "deadline": None, "derandomize": True, "database": None}
GUIDED = (
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "structured_outputs",
)
GRAMMARS = {
    "guided_json": {"type": "boolean"},
    "guided_regex": "a+",
    "guided_grammar": 'start: "a"',
    "structured_outputs": {"regex": "a+"},
}
NEEDS = {
    "stream_options": "stream",
    "top_logprobs": "logprobs",
    "return_tokens_as_token_ids": "logprobs",
}
"""Fields that are refused without another."""


@open_schema.parametrize()
@settings(**EXAMPLES, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_promised(case: schemathesis.Case[Any], tiny_server: Server) -> None:
    # What the document can't say (the context, the vocabulary, which fields exclude each other) may be refused.
    case.call_and_validate(base_url=tiny_server.url, excluded_checks=[positive_data_acceptance], timeout=30)


@pytest.fixture(scope="module")
def roomy_server() -> Iterator[Server]:
    """One with a context that no made-up request exceeds."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write(Path(folder) / "tiny", context=8192)
        with serving("--model", str(model), *TINY_FLAGS, "--cache-tokens", "65536", "--embeddings") as server:
            yield server


def fitted(value: Any) -> Any:
    """Numbers as the server reads them: whole ones without a fraction, and none that float32 can't hold."""
    if isinstance(value, dict):
        return {name: fitted(one) for name, one in value.items()}
    if isinstance(value, list):
        return [fitted(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, float) and 0 < abs(value) < 1e-6:
        return 1e-6
    return value


def fitted_prompt(prompt: Any) -> Any:
    """Not empty, of one kind, with tokens that there are."""
    if not isinstance(prompt, list):
        return prompt or "x"
    if isinstance(prompt[0], int):
        return [token % tiny.VOCAB for token in prompt if isinstance(token, int)]
    same = [one or "x" for one in prompt if type(one) is type(prompt[0])]
    return [[token % tiny.VOCAB for token in one] if isinstance(one, list) else one for one in same][:4]


def fitted_request(body: dict[str, Any]) -> dict[str, Any]:
    """A valid body made to fit what no schema says: this model, its vocabulary, short answers, fields that need or
    exclude others, and grammars in languages of their own."""
    body = fitted(body)
    # Of this model, this engine, other fields, or the last message.
    others = (
        "model",
        "chat_template_kwargs",
        "speculate",
        "return_hidden_states",
        "best_of",
        "max_completion_tokens",
        "continue_final_message",
    )
    for name in others:
        body.pop(name, None)
    for name in ("tokens", "stop_token_ids", "allowed_token_ids"):
        if body.get(name):
            body[name] = [token % tiny.VOCAB for token in body[name]]
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(token) % tiny.VOCAB): bias for token, bias in body["logit_bias"].items()}
    if body.get("n"):
        body["n"] = min(body["n"], 2)
    if body.get("tool_choice") is not None:
        body["tool_choice"] = "auto"
    if body.get("continue_final_message"):  # with a text, and in place of a new message
        last = (body.get("messages") or [{}])[-1].get("content")
        name = "add_generation_prompt" if isinstance(last, str) and last.strip() else "continue_final_message"
        body.pop(name, None)
    for name, other in NEEDS.items():
        if body.get(other) is None or body.get(other) is False:  # 0 is a number of logprobs
            body.pop(name, None)
    return body


def fitted_generation(body: dict[str, Any]) -> dict[str, Any]:
    """What is sampled, and how."""
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    body["max_tokens"] = min(body.get("max_tokens") or 4, 4)
    body["min_tokens"] = min(body.get("min_tokens") or 0, 4)
    chosen = next((name for name in GUIDED if body.get(name) not in (None, {"type": "text"})), None)
    for name in GUIDED:
        if name != chosen:
            body.pop(name, None)
        elif name in GRAMMARS:
            body[name] = GRAMMARS[name]
        elif name == "response_format" and "json_schema" in body[name]:
            body[name]["json_schema"]["schema"] = {"type": "boolean"}
    if chosen is not None:  # what a grammar asks for must be allowed
        for name in ("allowed_token_ids", "bad_words", "logit_bias"):
            body.pop(name, None)
    return body


def fitted_tokenize(body: dict[str, Any]) -> dict[str, Any]:
    """A prompt or messages, and what belongs to it."""
    if body.get("messages") is None:
        kept = {name: body[name] for name in ("add_special_tokens",) if name in body}
        return {"prompt": body.get("prompt") or "x", **kept}
    return {name: value for name, value in body.items() if name not in ("prompt", "add_special_tokens")}


def fitted_response(body: dict[str, Any]) -> dict[str, Any]:
    """A request for a response, to no earlier one."""
    body.pop("previous_response_id", None)
    body["max_output_tokens"] = 4
    if "message.output_text.logprobs" not in (body.get("include") or ()):
        body.pop("top_logprobs", None)
    wanted = (body.get("text") or {}).get("format") or {}
    if "schema" in wanted:
        wanted["schema"] = {"type": "boolean"}
    return body


VALID = {
    "/v1/completions": lambda body: fitted_generation({**body, "prompt": fitted_prompt(body["prompt"])}),
    "/v1/chat/completions": fitted_generation,
    "/v1/responses": fitted_response,
    "/v1/embeddings": lambda body: {**body, "input": fitted_prompt(body["input"]), "dimensions": None},
    "/tokenize": fitted_tokenize,
    "/detokenize": lambda body: body,
}


def test_the_described_places_are_found() -> None:
    found = str(opened(document(OPERATIONS))["components"])
    assert [name for name in ("tool_call_id", "json_schema", "parameters") if f"'{name}'" in found] == []


@pytest.mark.parametrize("path", VALID)
def test_a_valid_request_is_served(path: str, roomy_server: Server) -> None:
    strategy = schema[path]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)

    @settings(**EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=strategy)
    def serve(case: schemathesis.Case[Any]) -> None:
        assert isinstance(case.body, dict)
        case.body = VALID[path](fitted_request(case.body))
        case.call_and_validate(base_url=roomy_server.url, timeout=30)

    serve()


@pytest.mark.parametrize(
    "path", [one.path for one in OPERATIONS if one.request is None and not one.parameters], ids=lambda path: path[1:]
)
def test_what_takes_no_body_is_served(path: str, tiny_server: Server) -> None:
    assert tiny_server.get(path).status_code == 200
