"""Response bodies: what clients get, whole or as events, in the OpenAI API's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from phonograph.server.http.failures import Error

Finish = Literal["stop", "length", "tool_calls"]


class CachedTokens(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those that the prefix cache had."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Of the output's tokens, those that were thought."""

    reasoning_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """Of the outputs' tokens, what is known of some."""

    reasoning_tokens: int | UnsetType = UNSET
    """Those that were thought, where outputs are looked through for thoughts."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Where tokens are drafted, those that were drafted and are part of an output."""
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Numbers of tokens, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputDetails | UnsetType = UNSET


def hidden_states(given: bytes) -> list[float] | UnsetType:
    """Numbers of float32 as a choice has them; nothing where none were asked for."""
    return np.frombuffer(given, dtype=np.float32).tolist() if given else UNSET


# -- /v1/completions ------------------------------------------------------------------------------------------------


class RankedLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token of a prompt, or one that could have been in its place."""

    logprob: float
    rank: int
    """How many tokens were at least as likely; of alternatives, their place among them."""
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""For each token of a prompt, by token id; null for the first, which nothing was before."""


class TextLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt that is echoed."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True):
    """One completion, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In a stream, with the first piece."""
    hidden_states: list[float] | UnsetType = UNSET
    """What the last token was picked from."""


class CompletionResponse(msgspec.Struct, frozen=True):
    """Body of /v1/completions; in a stream, one event."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


# -- /v1/chat/completions -------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that is."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """Which function the model wants to be called, and with what."""

    name: str
    arguments: str
    """JSON, as the model wrote it: it may be wrong."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the client should make."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A whole call, in a stream."""

    index: int
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """The message that was generated."""

    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """What the model thought before it answered."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One message that was generated."""

    index: int
    message: ChatMessage
    finish_reason: Finish
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    hidden_states: list[float] | UnsetType = UNSET
    """What the last token was picked from."""


class ChatResponse(msgspec.Struct, frozen=True):
    """Body of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatDeltaChoice(msgspec.Struct, frozen=True):
    """What is new of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a streamed /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In the first event."""


# -- the rest -------------------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    """Tokens of a prompt and its output together."""
    sampling: dict[str, float]
    """What holds where a request leaves it out: temperature, top_k, top_p, min_p, repetition_penalty."""
    root: str
    """The model's own name, whatever it is called here."""
    parent: None = None
    """That of which it is a fine-tune, at servers that know."""
    owned_by: str = "phonograph"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    """Body of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Body of /tokenize."""

    count: int
    max_model_len: int
    tokens: Sequence[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """Body of /detokenize."""

    prompt: str


class HealthResponse(msgspec.Struct, frozen=True):
    """Body of /health."""

    status: str
    reason: str = ""
    error: Error | UnsetType = UNSET
    """Where no request is taken, or some fail."""
