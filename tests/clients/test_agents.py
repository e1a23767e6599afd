"""openai-agents, which talks to `/v1/responses`: tools that run, output types, streams and chats."""

from __future__ import annotations

import pytest

from clients.conftest import MODEL
from clients.environment import run_program
from server.conftest import Server

pytestmark = pytest.mark.slow


def test_agents_run_tools_and_give_typed_output(client_server: Server) -> None:
    found = run_program("agents_tools", client_server.url, MODEL, needs=("agents",))
    for api in ("responses", "chat"):
        assert found[api]["plain"] == "The capital of France is Paris."
        assert found[api]["streamed"] == found[api]["plain"]
        assert found[api]["runs"] == ["Paris"]
        assert found[api]["tool_output"] == "sunny in Paris"
        assert sorted(found[api]["typed"]) == ["city", "size"]
