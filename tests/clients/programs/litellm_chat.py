"""litellm against an `openai/` endpoint: completion, stream, acompletion, text_completion. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

BASE, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
COMMON: dict[str, Any] = {"api_base": BASE, "api_key": "none", "temperature": 0, "num_retries": 0}
CHAT: dict[str, Any] = {"model": f"openai/{MODEL}", "messages": QUESTION, **COMMON}

whole = litellm.completion(**CHAT, user="somebody", metadata={"trace": "1"})
chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="One, two, three,", max_tokens=4, **COMMON
)
pieces = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="One, two, three,", max_tokens=4, stream=True, **COMMON
)
shape = {
    "name": "capital",
    "schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
as_json = litellm.completion(**CHAT, max_tokens=40, response_format={"type": "json_schema", "json_schema": shape})


async def in_a_loop() -> str:
    async def streamed() -> str:
        found = await litellm.acompletion(**CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in found])

    one, other = await asyncio.gather(litellm.acompletion(**CHAT), streamed())
    assert one.choices[0].message.content == other
    return other


def failure() -> list[Any]:
    """What litellm makes of an error of the server's."""
    try:
        litellm.completion(**{**CHAT, "messages": [{"role": "user", "content": "word " * 4000}]})
    except litellm.ContextWindowExceededError as error:
        return [error.status_code, "context of" in str(error)]
    raise AssertionError("a prompt that is too long was taken")


print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "usage": whole.usage.total_tokens,
            "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "text": text.choices[0].text,
            "pieces": "".join(piece.choices[0].text or "" for piece in pieces),
            "json": sorted(json.loads(as_json.choices[0].message.content)),
            "loop": asyncio.run(in_a_loop()),
            "failure": failure(),
        }
    )
)
