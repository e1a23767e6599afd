"""About: routes on the server itself: models, health, version and tokenizer, in vLLM's form."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import phonograph
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.requests.request import NEUTRAL, SamplingParams
from phonograph.engine.text import ChatTemplate, Tokenizer
from phonograph.server.http.failures import SERVER, ApiError, Error
from phonograph.server.openai.api import Api
from phonograph.server.openai.responses import HealthResponse, ModelCard, ModelList


class VersionResponse(msgspec.Struct, frozen=True):
    """Body of /version."""

    version: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """Body of /tokenizer_info, in the words of a tokenizer_config.json."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    """The other special tokens, such as those of the chat template."""
    model_max_length: int
    vocab_size: int
    chat_template: str | None
    tokenizer_class: str = "PreTrainedTokenizerFast"


def tokenizer_info(tokenizer: Tokenizer, template: ChatTemplate, max_len: int) -> TokenizerInfo:
    """The body for a tokenizer and its chat template."""
    roles = tokenizer.special_tokens
    named = {roles[role] for role in ("bos_token", "eos_token", "pad_token", "unk_token") if role in roles}
    special = (tokenizer.token_bytes(token).decode("utf-8", "replace") for token in sorted(tokenizer.special_ids))
    return TokenizerInfo(
        bos_token=roles.get("bos_token"),
        eos_token=roles.get("eos_token"),
        pad_token=roles.get("pad_token"),
        unk_token=roles.get("unk_token"),
        additional_special_tokens=[text for text in special if text not in named],
        model_max_length=max_len,
        vocab_size=tokenizer.vocab_size,
        chat_template=template.text,
    )


class About:
    """Routes for models, health, version and tokenizer."""

    def __init__(self, api: Api, llm: AsyncLLM) -> None:
        self._api = api
        self._llm = llm
        self._created = int(time.time())
        self._version = msgspec.json.encode(VersionResponse(phonograph.__version__))
        self._tokenizer: bytes | None = None

    async def models(self, request: Request) -> Response:
        """All names under which the model is served."""
        return _json(ModelList([self._model(name) for name in self._api.names]))

    async def model(self, request: Request) -> Response:
        """One of them."""
        return _json(self._model(self._api.checked_model(request.path_params["model"])))

    async def health(self, request: Request) -> Response:
        """Whether requests are accepted; where not, or where some fail, the reason."""
        health = self._llm.health
        if health.state == "ready":
            return _json(HealthResponse(health.state, health.reason))
        reason = health.reason or "the engine core is starting"
        what = "some requests fail" if health.is_serving else "no request is taken now"
        error = Error(f"{what}: {reason}.", SERVER, None, health.state)
        return _json(HealthResponse(health.state, reason, error), 503)

    def _model(self, name: str) -> ModelCard:
        resolved = SamplingParams().resolved(self._llm.sampling)
        sampling = {field: getattr(resolved, field) for field in NEUTRAL}
        return ModelCard(name, self._created, self._llm.about.limits.max_len, sampling, self._llm.arguments.name)

    async def version(self, request: Request) -> Response:
        """phonograph's version."""
        return Response(self._version, media_type="application/json")

    async def tokenizer_info(self, request: Request) -> Response:
        """The special tokens and the chat template of the model."""
        if self._llm.tokenizer is None:
            message = "this model has no tokenizer: it takes token ids, and its text is their numbers."
            raise ApiError(404, message, code="not_found")
        if self._tokenizer is None:
            tokenizer, template, max_len = self._llm.tokenizer, self._llm.text.template, self._llm.about.limits.max_len

            def written() -> bytes:
                return msgspec.json.encode(tokenizer_info(tokenizer, template, max_len))

            self._tokenizer = await self._llm.text.off_loop(len(template.text or "") + tokenizer.vocab_size, written)
        return Response(self._tokenizer, media_type="application/json")


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
