"""ResponsesRequest: body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from phonograph.server.http import request_limits as limits
from phonograph.server.http.neutral_fields import NeutralField
from phonograph.server.openai import message_schemas
from phonograph.server.openai.requests import (
    FLOAT32,
    WHOLE,
    ContentTokens,
    Drafts,
    Effort,
    Penalty,
    Probability,
    Stops,
    Verbosity,
)

Item = Annotated[dict[str, Any], Meta(extra_json_schema=message_schemas.ITEM)]
ResponseTool = Annotated[dict[str, Any], Meta(extra_json_schema=message_schemas.RESPONSE_TOOL)]
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

ONLY_NEUTRAL = {
    "background": NeutralField("a response is made while its client waits", (False,)),
    "conversation": NeutralField("use `previous_response_id`"),
    "context_management": NeutralField("a prompt is taken whole, or cut by `truncation`"),
    "max_tool_calls": NeutralField("it is for tools that the server runs, and clients run all of them"),
    "access_programs": NeutralField("there are none"),
    "image": NeutralField("only text is read and written"),
    "prompt": NeutralField("no prompts are stored here"),
    "skip_special_tokens": NeutralField(
        "special tokens are not part of the text here: use /v1/chat/completions", (True,)
    ),
    "include_stop_str_in_output": NeutralField("stop strings are not part of the text here", (False,)),
    "return_token_ids": NeutralField("tokens are written as texts here", (False,)),
}
"""OpenAI's fields that are accepted at values that change nothing."""


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the output text."""

    format: Annotated[dict[str, Any], Meta(extra_json_schema=message_schemas.TEXT_FORMAT)] | None = None
    """`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "name": …, "schema": …}`."""
    verbosity: Verbosity | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for reasoning."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: reasoning is not summarized, but returned in full."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """OpenAI's older name for `summary`."""


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to stream."""

    include_obfuscation: bool = False


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/responses."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    """A text of the user's, or items: messages, function_call, function_call_output and reasoning."""
    model: str | None = None
    instructions: str | None = None
    """A system message in front of everything; of this response alone."""
    previous_response_id: str | None = None
    """Continue after this response, which must be stored."""
    store: bool | None = None
    """Whether the response can be retrieved and continued by its id. Default: true."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, extra_json_schema=WHOLE)] | None = None
    """Default: up to the end of the context."""
    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS.most)] | None = None
    """Needs `message.output_text.logprobs` in `include`."""
    include: list[Include] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` drops the oldest turns where not all of them fit the context."""
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Not in OpenAI's API: as in chats.
    top_k: Annotated[int, Meta(ge=-1, extra_json_schema=WHOLE)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, extra_json_schema=FLOAT32)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Meta(extra_json_schema={"maxLength": limits.STOP_CHARS.most})] | Stops | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    content_special_tokens: ContentTokens | None = None
    speculate: Drafts | None = None
