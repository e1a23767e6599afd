"""Locust, a load tool of others: some seconds of many users without a failure."""

from __future__ import annotations

import json

import pytest

from clients.environment import client_python, run_client
from server.conftest import Server

pytestmark = pytest.mark.slow


def test_many_users_and_no_failure(client_server: Server) -> None:
    python = client_python("locust")
    flags = ["--headless", "--users", "12", "--spawn-rate", "12", "--run-time", "8s", "--json", "--only-summary"]
    said = run_client(
        python, "-m", "locust", "-f", "locustfile.py", *flags, "--stop-timeout", "30", "--host", client_server.url
    )
    figures = json.loads(said)
    failures = {one["name"]: one["num_failures"] for one in figures}
    # On a busy machine one of them may not have come up.
    assert set(failures) <= {"/v1/chat/completions", "/v1/chat/completions (stream)", "/v1/completions"}
    assert set(failures.values()) == {0}
    assert sum(one["num_requests"] for one in figures) > 12
