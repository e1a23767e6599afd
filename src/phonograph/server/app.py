"""ASGI app: the whole server: routes, error bodies, access."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.errors import PhonographError
from phonograph.server.http.access import CorsGuard, HostGuard, KeyGuard
from phonograph.server.http.failures import ApiError, respond
from phonograph.server.openai.about import About, TokenizerInfo, VersionResponse
from phonograph.server.openai.api import Api
from phonograph.server.openai.delivery import NOTE_HEADER
from phonograph.server.openai.embeddings import EmbeddingRequest, EmbeddingResponse
from phonograph.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from phonograph.server.openai.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from phonograph.server.openai.responses_api import objects as responses_api
from phonograph.server.openai.responses_api.request import ResponsesRequest
from phonograph.server.openai.responses_api.routes import ResponsesApi
from phonograph.server.openapi import Operation, document
from phonograph.server.options import ServerOptions

_ENGINE = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_BODY = (400, 404, 408, 413, 415, 500, 503)

OPERATIONS = (
    Operation(
        "/v1/completions",
        "post",
        "Complete prompts",
        CompletionResponse,
        CompletionRequest,
        event=CompletionResponse,
        statuses=_ENGINE,
    ),
    Operation(
        "/v1/chat/completions",
        "post",
        "Generate the next message of a conversation",
        ChatResponse,
        ChatRequest,
        event=ChatChunk,
        statuses=_ENGINE,
    ),
    Operation("/v1/embeddings", "post", "Embed texts", EmbeddingResponse, EmbeddingRequest, statuses=_ENGINE),
    Operation(
        "/v1/responses",
        "post",
        "Generate a response, and store it",
        responses_api.Response,
        ResponsesRequest,
        event=responses_api.ResponseEvent,
        statuses=_ENGINE,
    ),
    Operation(
        "/v1/responses/{id}",
        "get",
        "A stored response",
        responses_api.Response,
        statuses=(400, 404),
        parameters=("id",),
    ),
    Operation(
        "/v1/responses/{id}",
        "delete",
        "Delete a stored response",
        responses_api.DeletedResponse,
        statuses=(404,),
        parameters=("id",),
    ),
    Operation(
        "/v1/responses/{id}/input_items",
        "get",
        "Its input items",
        responses_api.ItemList,
        statuses=(400, 404),
        parameters=("id",),
    ),
    Operation("/v1/models", "get", "The names under which the model is served", ModelList, statuses=()),
    Operation("/v1/models/{model}", "get", "One of the names", ModelCard, statuses=(404,), parameters=("model",)),
    Operation("/tokenize", "post", "Tokenize a text or messages", TokenizeResponse, TokenizeRequest, statuses=_BODY),
    Operation("/detokenize", "post", "Detokenize token ids", DetokenizeResponse, DetokenizeRequest, statuses=_BODY),
    Operation("/tokenizer_info", "get", "Special tokens and chat template", TokenizerInfo, statuses=(404, 503)),
    Operation("/health", "get", "Whether the server accepts requests", HealthResponse, statuses=(503,)),
    Operation("/ping", "get", "The same, under SageMaker's name", HealthResponse, statuses=(503,)),
    Operation("/ping", "post", "The same", HealthResponse, statuses=(503,)),
    Operation("/version", "get", "phonograph's version", VersionResponse, statuses=()),
)


def create_app(
    llm: AsyncLLM,
    options: ServerOptions = ServerOptions(),
    *,
    further: Sequence[BaseRoute] = (),
    open_paths: Collection[str] = (),
) -> ASGIApp:
    """The app for an AsyncLLM that the caller starts; `further` routes may be open without an API key."""
    api = Api(llm, options)
    about, kept = About(api, llm), ResponsesApi(api, llm, options)
    described = msgspec.json.encode(document(OPERATIONS))

    async def openapi(request: Request) -> Response:
        return Response(described, media_type="application/json")

    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        Route("/v1/responses", kept.create, methods=["POST"]),
        Route("/v1/responses/{id}", kept.stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/input_items", kept.input_items),
        Route("/v1/models", about.models),
        Route("/v1/models/{model:path}", about.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/tokenizer_info", about.tokenizer_info),
        Route("/health", about.health),
        Route("/ping", about.health, methods=["GET", "POST"]),
        Route("/version", about.version),
        Route("/openapi.json", openapi),
        *further,
    ]
    expected = (ApiError, HTTPException, PhonographError)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((*expected, Exception), respond))
    app.router.redirect_slashes = False
    guarded: ASGIApp = app
    if options.api_keys:
        guarded = KeyGuard(guarded, options.api_keys, {"/health", "/ping", *open_paths})
    if options.cors_origins:
        guarded = CorsGuard(
            guarded,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[NOTE_HEADER],
        )
    return HostGuard(guarded, options.hosts) if options.hosts else guarded
