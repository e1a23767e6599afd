"""Embeddings: the request body of /v1/embeddings, its checks, and the response."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from phonograph.engine.process.generation import Delta, TokenUsage
from phonograph.engine.requests.pooling import Pooling
from phonograph.engine.requests.vectors import normalized
from phonograph.errors import RequestError
from phonograph.server.http import request_limits as limits
from phonograph.server.http.failures import ApiError
from phonograph.server.http.neutral_fields import NeutralField
from phonograph.server.http.request_limits import ModelBounds
from phonograph.server.openai.requests import TokenId, Tokens

_PIECE = 256 << 10
"""Bytes of one piece of the body: small enough to be sent at once, and large enough for few pieces."""

_encode = msgspec.json.Encoder().encode

NEUTRAL_FOR_EMBEDDINGS = {
    "add_special_tokens": NeutralField("inputs have the model's special tokens", (True,)),
    "truncate_prompt_tokens": NeutralField("an input is taken whole or refused"),
    "priority": NeutralField("requests are served as they come", (0,)),
}
"""Fields of other servers that some clients always send."""


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/embeddings."""

    model: str | None = None
    """A name from /v1/models; may be left out."""
    input: str | Annotated[list[str | TokenId | Tokens], Meta(min_length=1)]
    """A text, several texts, token ids, or several lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the bytes of float32 in base64. Default: float."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Vectors are not truncated: only the model's own size is accepted."""
    pooling: Pooling | None = None
    """The mean of all hidden states, or that of the last token. Default: mean. Not in OpenAI's API."""
    normalize: bool | None = None
    """Whether vectors have length 1. Default: true, as at OpenAI. Not in OpenAI's API."""
    user: str | None = None
    """Accepted, and without effect."""


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one input."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True):
    """Body of the response, in the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


def check_embeddings(request: EmbeddingRequest, bounds: ModelBounds, hidden: int) -> None:
    """Against the bounds of prompts, and what vectors this model has."""
    for name in ("model", "user"):
        limits.LABEL_CHARS.check(len(getattr(request, name) or ""), name)
    if request.dimensions not in (None, hidden):
        message = (
            f"`dimensions` can't be {request.dimensions}: this model's vectors have {hidden} numbers, and it was not "
            "trained for parts of them. Leave it out."
        )
        raise ApiError(400, message, param="dimensions", code="unsupported")
    if isinstance(request.input, str):
        bounds.prompt_chars.check(len(request.input), "input")
        return
    if not isinstance(request.input[0], int):
        bounds.prompts.check(len(request.input), "input")
    tokens = 0
    for place, text in enumerate(request.input):
        if isinstance(text, str):
            bounds.prompt_chars.check(len(text), f"input[{place}]")
        else:
            tokens += len(text) if isinstance(text, list) else 1
    bounds.prompt_tokens.check(tokens, "input")


@contextmanager
def inputs_at_fault() -> Iterator[None]:
    """The error with `input` for what the engine calls a prompt."""
    try:
        yield
    except RequestError as error:
        if error.field != "prompt":
            raise
        raise RequestError(str(error), field="input") from None


class EmbeddingWriter:
    """Writes vectors as a response, encoding one at a time."""

    size = 0

    def __init__(self, name: str, model: str, request: EmbeddingRequest) -> None:
        self.id = name
        self.size = 0
        self._model = model
        self._as_bytes = request.encoding_format == "base64"
        self._normalize = request.normalize is not False

    def body(self, choices: Sequence[Delta], used: TokenUsage) -> list[bytes]:
        usage = EmbeddingUsage(used.prompt_tokens, used.prompt_tokens)
        begin, _, end = _encode(EmbeddingResponse([], self._model, usage)).partition(b'"data":[]')
        return _joined([begin + b'"data":[', *self._entries(choices), b"]" + end])

    def events(self, deltas: Sequence[Delta]) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def end(self, used: TokenUsage) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def failure(self, error: ApiError) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def _entries(self, choices: Sequence[Delta]) -> Iterator[bytes]:
        for place, delta in enumerate(choices):
            yield (b"," if place else b"") + _encode(Embedding(delta.choice, self._written(delta.embedding)))

    def _written(self, found: bytes) -> list[float] | str:
        vector = np.frombuffer(found, dtype=np.float32)
        vector = normalized(vector) if self._normalize else vector
        if self._as_bytes:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


def _joined(parts: Iterable[bytes]) -> list[bytes]:
    """The same bytes, in pieces of about `_PIECE` bytes."""
    found, waiting = list[bytes](), bytearray()
    for part in parts:
        waiting += part
        if len(waiting) >= _PIECE:
            found.append(bytes(waiting))
            waiting.clear()
    return [*found, bytes(waiting)]
