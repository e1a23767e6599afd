"""litellm against an `openai/` endpoint: embedding and aembedding. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

COMMON: dict[str, Any] = {
    "model": f"openai/{sys.argv[2]}",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "num_retries": 0,
}
TEXTS = ["What is the capital of France?", "Paris"]

done = litellm.embedding(input=TEXTS, **COMMON)
as_numbers = litellm.embedding(input=TEXTS, encoding_format="float", **COMMON)
in_a_loop = asyncio.run(litellm.aembedding(input=TEXTS, **COMMON))
print(
    json.dumps(
        {
            "sizes": [len(one["embedding"]) for one in as_numbers.data],
            "same": [one["embedding"] for one in done.data] == [one["embedding"] for one in in_a_loop.data],
            "usage": as_numbers.usage.prompt_tokens,
        }
    )
)
