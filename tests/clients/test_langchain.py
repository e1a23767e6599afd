"""langchain-openai: structured output by functions and by schema, tools, streams, and over responses."""

from __future__ import annotations

import pytest

from clients.conftest import MODEL
from clients.environment import run_program
from server.conftest import Server

ANSWER = "The capital of France is Paris."

pytestmark = pytest.mark.slow


def test_chats_tools_and_structured_output(client_server: Server) -> None:
    found = run_program("langchain_tools", client_server.url, MODEL, needs=("langchain_openai",))
    assert {found[name] for name in ("whole", "stream", "response", "response_stream")} == {ANSWER}
    for name in ("by_function", "by_schema", "by_response"):
        assert sorted(found[name]) == ["city", "size"], name
        assert found[name]["city"] in ("Paris", "Rome")
        assert 1 <= found[name]["size"] <= 3
    assert found["called"] == ["weather"]
    assert found["streamed_call"] == ["weather"]
    assert found["response_called"] == ["weather"]
    assert found["answered"]
    assert found["response_answered"]
