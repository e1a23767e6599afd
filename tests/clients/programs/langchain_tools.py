"""langchain-openai: with_structured_output, bind_tools, streams, and use_responses_api. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

BASE, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
QUESTION = "What is the capital of France?"
COMMON: dict[str, Any] = {"base_url": BASE, "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}

chat = ChatOpenAI(**COMMON)
response = ChatOpenAI(**COMMON, use_responses_api=True)


class Capital(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]
    size: int = Field(ge=1, le=3)


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def round_trip(model: ChatOpenAI) -> tuple[list[str], str]:
    """A call that must be made, and the answer to its result."""
    asked = HumanMessage("What is the weather in Paris?")
    called = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke([asked])
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
    answer = model.bind_tools([weather], tool_choice="none", max_tokens=20).invoke([asked, called, *results])
    return [call["name"] for call in called.tool_calls], answer.text


def whole_of(chunks: Any) -> Any:
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    return total


called, answered = round_trip(chat)
response_called, response_answered = round_trip(response)
streamed = whole_of(chat.bind_tools([weather], tool_choice="weather").stream("Paris?"))
print(
    json.dumps(
        {
            "whole": chat.invoke(QUESTION).text,
            "stream": whole_of(chat.stream(QUESTION)).text,
            "response": response.invoke(QUESTION).text,
            "response_stream": whole_of(response.stream(QUESTION)).text,
            "by_function": chat.with_structured_output(Capital, method="function_calling")
            .invoke(QUESTION)
            .model_dump(),
            "by_schema": chat.with_structured_output(Capital, method="json_schema").invoke(QUESTION).model_dump(),
            "by_response": response.with_structured_output(Capital).invoke(QUESTION).model_dump(),
            "called": called,
            "answered": answered,
            "response_called": response_called,
            "response_answered": response_answered,
            "streamed_call": [call["name"] for call in streamed.tool_calls],
        }
    )
)
