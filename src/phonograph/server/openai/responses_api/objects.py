"""Response objects: bodies and stream events of `/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from phonograph.server.openai.responses import CachedTokens, ChatTokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Json = dict[str, Any]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text content."""

    text: str
    annotations: list[Json] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Reasoning content."""

    text: str


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """An output item: a message."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """An output item: reasoning."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Json] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """An output item: a function call for the client to run."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an output is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseOutputDetails(msgspec.Struct, frozen=True):
    """A breakdown of the output tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    """With speculation: drafted tokens that were accepted. Not in OpenAI's API of responses."""
    rejected_prediction_tokens: int | UnsetType = UNSET


class ResponseUsage(msgspec.Struct, frozen=True):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/responses, and of its first and last events."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    # Fields of the request, as the client sent them.
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Json
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: Json
    store: bool
    """Whether it can be retrieved by its id."""
    temperature: float | None = None
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    background: bool = False
    max_tool_calls: int | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a streamed response; which fields it has is told by its type, as at OpenAI."""

    type: str
    sequence_number: int
    response: Response | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatTokenLogprob] | None = None
    arguments: str | None = None
    name: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class DeletedResponse(msgspec.Struct, frozen=True):
    """Body of a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True):
    """Body of /v1/responses/{id}/input_items."""

    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
