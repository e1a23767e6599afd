"""OpenAI's own client of the newest version, in a process and an environment of its own."""

from __future__ import annotations

import pytest

from clients.conftest import MODEL
from clients.environment import run_program
from server.conftest import Server

ANSWER = "The capital of France is Paris."

pytestmark = pytest.mark.slow


def test_whole_streamed_and_parsed_answers_are_one(client_server: Server) -> None:
    found = run_program("openai_chat", client_server.url, MODEL, needs=("openai",))
    thread, loop = found["thread"], found["loop"]
    assert thread["models"] == [MODEL]
    assert {thread[name] for name in ("whole", "stream", "helper", "raw")} == {ANSWER}
    assert {loop[name] for name in ("whole", "stream")} == {ANSWER}
    assert {"content.delta", "content.done"} <= set(thread["events"])
    assert thread["usage"]["total_tokens"] == 45
    assert 0 < len(thread["parsed"]) <= 12
    assert loop["parsed"] == thread["parsed"]
    assert thread["text"] == " four, five,"
