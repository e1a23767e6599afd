"""openai-agents: runs, streams, a tool that must be used, an output type; over responses and chats. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, Field

MODEL = sys.argv[2]
QUESTION = "What is the capital of France?"
GREEDY = ModelSettings(temperature=0, max_tokens=60)
runs: list[str] = []


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]
    size: int = Field(ge=1, le=3)


@function_tool
def weather(city: Literal["Paris"]) -> str:
    """The weather of a city."""
    runs.append(city)
    return f"sunny in {city}"


async def tried(model: Any) -> dict[str, Any]:
    runs.clear()
    plain = Agent(name="plain", model=model, model_settings=GREEDY)
    forced = ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False)
    looks = Agent(
        name="looks", model=model, tools=[weather], model_settings=forced, tool_use_behavior="stop_on_first_tool"
    )
    typed = Agent(name="typed", model=model, output_type=Capital, model_settings=GREEDY)
    said = await Runner.run(plain, QUESTION)
    stream = Runner.run_streamed(plain, QUESTION)
    pieces = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    looked = await Runner.run(looks, "What is the weather in Paris?")
    shaped = await Runner.run(typed, QUESTION)
    return {
        "plain": said.final_output,
        "streamed": "".join(pieces),
        "runs": list(runs),
        "tool_output": looked.final_output,
        "typed": shaped.final_output.model_dump(),
    }


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    found = {
        "responses": await tried(OpenAIResponsesModel(MODEL, client)),
        "chat": await tried(OpenAIChatCompletionsModel(MODEL, client)),
    }
    print(json.dumps(found))


asyncio.run(main())
