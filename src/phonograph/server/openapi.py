"""OpenAPI document: generated from the types that bodies are decoded and encoded with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import phonograph
from phonograph.server.http.failures import ErrorBody


@dataclass(frozen=True)
class Operation:
    """A route's request and response."""

    path: str
    method: str
    summary: str
    response: type[msgspec.Struct]
    request: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    """The type of a stream's events."""
    statuses: tuple[int, ...] = (400,)
    """Its errors besides those of every route."""
    parameters: tuple[str, ...] = ()
    """In the path."""


_ERRORS = {
    400: "the request is invalid; the message says what to change",
    401: "the API key is missing or wrong",
    403: "the Host header is not an allowed one",
    404: "there is no such route or model",
    408: "the body arrived too slowly",
    413: "the body is too large",
    415: "the body is not declared as JSON, or is compressed",
    429: "too many requests are waiting; see Retry-After",
    500: "the model failed on this request, or the server did",
    503: "no request is accepted now: the core is down, or the server is shutting down",
    504: "the request did not finish within its timeout",
}


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1, for clients and for fuzzing."""
    used: list[type[msgspec.Struct]] = [ErrorBody]
    for operation in operations:
        used += [kind for kind in (operation.request, operation.response, operation.event) if kind is not None]
    kinds = list(dict.fromkeys(used))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "phonograph", "version": phonograph.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _described(operation: Operation, schemas: dict[type[Any], Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schemas[operation.response]}}
    if operation.event is not None:
        name = operation.event.__name__
        data = {"type": "string", "description": f"JSON of a {name} or of an ErrorBody; in the last event [DONE]"}
        event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    responses: dict[str, Any] = {"200": {"description": "the response", "content": content}}
    for status in sorted({401, 403, *operation.statuses}):
        failed = {"application/json": {"schema": schemas[ErrorBody]}}
        responses[str(status)] = {"description": _ERRORS[status], "content": failed}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.request is not None:
        body = {"application/json": {"schema": schemas[operation.request]}}
        described["requestBody"] = {"required": True, "content": body}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in operation.parameters
        ]
    return described
