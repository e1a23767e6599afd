"""What the tests of clients share: one live server with the default model, with room for tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phonograph.engine.checkpoints import default_model
from phonograph.errors import CheckpointError
from server.conftest import Server, serving

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def client_server() -> Iterator[Server]:
    """A process of its own, for all tests that leave it as it was."""
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    flags = ("--device", "cpu", "--max-len", "2048", "--max-seqs", "8", "--port", "0", "--embeddings")
    with serving(*flags) as server:
        yield server
