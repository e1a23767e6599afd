"""Message schemas: messages, tools and formats in the OpenAPI document; the server decodes them as plain JSON."""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_PART = _object(("type", "text"), type={"const": "text"}, text=_TEXT)
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_CALL = _object(
    ("type", "function"),
    id=_TEXT,
    type={"const": "function"},
    function=_object(("name", "arguments"), name=_TEXT, arguments=_TEXT),
)

MESSAGE = {
    "anyOf": [
        _object(("role", "content"), role={"enum": ["system", "developer", "user"]}, content=_CONTENT),
        _object(("role", "content"), role={"const": "assistant"}, content=_CONTENT),
        _object(
            ("role", "tool_calls"),
            role={"const": "assistant"},
            content={"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
            tool_calls={"type": "array", "items": _CALL, "minItems": 1},
        ),
        _object(("role", "content"), role={"const": "tool"}, content=_CONTENT, tool_call_id=_TEXT),
    ]
}
"""By role. Some chat templates read further fields; some read no tool calls, and then these are refused."""

TOOL = _object(
    ("type", "function"),
    type={"const": "function"},
    function=_object(
        ("name",),
        name={"type": "string", "minLength": 1},
        description=_TEXT,
        parameters={"type": "object"},
        strict={"type": "boolean"},
    ),
)

RESPONSE_FORMAT = {
    "anyOf": [
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=_object(
                ("name", "schema"),
                name=_TEXT,
                description=_TEXT,
                schema={"type": "object"},
                strict={"type": "boolean"},
            ),
        ),
    ]
}

STRUCTURED_OUTPUTS = {
    "anyOf": [
        _object(("json",), json={"type": "object"}),
        _object(("json_object",), json_object={"type": "boolean"}),
        _object(("regex",), regex=_TEXT),
        _object(("choice",), choice={"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}),
        _object(("grammar",), grammar=_TEXT),
    ]
}
"""One of them, since an output can follow one grammar."""

_SAID = {
    "anyOf": [_TEXT, {"type": "array", "items": _object(("type", "text"), type={"const": "input_text"}, text=_TEXT)}]
}
_NAME = {"type": "string", "minLength": 1}

ITEM = {
    "anyOf": [
        _object(
            ("role", "content"),
            type={"const": "message"},
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_SAID,
        ),
        _object(
            ("type", "call_id", "name", "arguments"),
            type={"const": "function_call"},
            call_id=_NAME,
            name=_NAME,
            arguments=_TEXT,
        ),
        _object(("type", "call_id", "output"), type={"const": "function_call_output"}, call_id=_NAME, output=_SAID),
    ]
}
"""Input items of a response; also reasoning items, and the fields of output items that are sent back."""

RESPONSE_TOOL = _object(
    ("type", "name"),
    type={"const": "function"},
    name=_NAME,
    description=_TEXT,
    parameters={"type": "object"},
    strict={"type": "boolean"},
)

TEXT_FORMAT = {
    "anyOf": [
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(
            ("type", "schema"),
            type={"const": "json_schema"},
            name=_TEXT,
            description=_TEXT,
            schema={"type": "object"},
            strict={"type": "boolean"},
        ),
    ]
}
