"""Response bodies: OpenAI's objects, whole or as stream events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from phonograph.server.http.failures import Error

Finish = Literal["stop", "length", "tool_calls"]


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """A breakdown of the output tokens."""

    reasoning_tokens: int | UnsetType = UNSET
    """Tokens of reasoning, where outputs are parsed for it."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """With speculation: drafted tokens that were accepted."""
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
    """A token of a prompt, or an alternative to it."""

    logprob: float
    rank: int
    """Its rank by probability, from 1; ties count against a prompt's own token."""
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""For each token of a prompt, by token id; null for the first, which has no logprob."""


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
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A sampled token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """The function that the model calls, and its arguments."""

    name: str
    arguments: str
    """JSON as the model wrote it, not validated."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call for the client to run."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A complete tool call, in a stream."""

    index: int
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """The generated message."""

    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The model's reasoning."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One generated message."""

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
    """New parts of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatDeltaChoice(msgspec.Struct, frozen=True):
    """New parts of one choice."""

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
    """Defaults for requests that leave out temperature, top_k, top_p, min_p or repetition_penalty."""
    root: str
    """The model's own name, under whichever name it is served."""
    parent: None = None
    """The parent of a fine-tune, on servers that have such."""
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
    """Set where no request is accepted, or some fail."""
