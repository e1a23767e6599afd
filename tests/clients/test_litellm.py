"""litellm, which agents and proxies put in front of every server."""

from __future__ import annotations

import pytest

from clients.conftest import MODEL
from clients.environment import run_program
from server.conftest import Server

ANSWER = "The capital of France is Paris."

pytestmark = pytest.mark.slow


def test_completions_streams_texts_and_errors(client_server: Server) -> None:
    found = run_program("litellm_chat", client_server.url, MODEL, needs=("litellm",))
    assert {found[name] for name in ("whole", "stream", "loop")} == {ANSWER}
    assert {found[name] for name in ("text", "pieces")} == {" four, five,"}
    assert found["usage"] == 45
    assert found["json"] == ["city"]
    assert found["failure"] == [400, True]


def test_embeddings(client_server: Server) -> None:
    found = run_program("litellm_embedding", client_server.url, MODEL, needs=("litellm",))
    assert found == {"sizes": [576, 576], "same": True, "usage": 8}
