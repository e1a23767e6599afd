"""The `openai` client: whole, streamed, parsed; in a thread and in an event loop. Prints what came of it as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
import pydantic

BASE, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
COMMON: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}


class Capital(pydantic.BaseModel):
    """What `parse` fills in."""

    city: str = pydantic.Field(max_length=12)


def in_a_thread() -> dict[str, Any]:
    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    whole = client.chat.completions.create(**COMMON)
    chunks = list(client.chat.completions.create(**COMMON, stream=True, stream_options={"include_usage": True}))
    with client.chat.completions.stream(**COMMON) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.content
    parsed = client.chat.completions.parse(**COMMON, max_tokens=40, response_format=Capital)
    text = client.completions.create(model=MODEL, prompt="One, two, three,", temperature=0, max_tokens=4)
    raw = client.chat.completions.with_raw_response.create(**COMMON)
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Capital)
    return {
        "models": [model.id for model in client.models.list()],
        "whole": whole.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": chunks[-1].usage.model_dump() if chunks[-1].usage else None,
        "helper": streamed,
        "events": sorted(kinds),
        "parsed": found.city,
        "text": text.choices[0].text,
        "raw": raw.parse().choices[0].message.content,
    }


async def in_a_loop() -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        whole, parsed = await asyncio.gather(
            client.chat.completions.create(**COMMON),
            client.chat.completions.parse(**COMMON, max_tokens=40, response_format=Capital),
        )
        stream = await client.chat.completions.create(**COMMON, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        found = parsed.choices[0].message.parsed
        assert isinstance(found, Capital)
        return {"whole": whole.choices[0].message.content, "stream": text, "parsed": found.city}


print(json.dumps({"version": openai.__version__, "thread": in_a_thread(), "loop": asyncio.run(in_a_loop())}))
