"""Metrics and the status page of a real server, under the load of the real client."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from browsers import Tab, open_browser
from phonograph.cli.main import main
from phonograph.server.observe.status import Status
from server.conftest import TINY_FLAGS, Server, serving


def totals(server: Server) -> dict[str, float]:
    """All that carries no label but the model's name."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        sample.name.removeprefix("phonograph:"): sample.value
        for family in families
        for sample in family.samples
        if sample.labels == {"model_name": "tiny"}
    }


def status_of(server: Server) -> Status:
    return msgspec.json.decode(server.get("/status.json").content, type=Status)


def test_what_the_client_measures_is_what_the_server_counts(
    tiny_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, path = Counter(totals(tiny_server)), tmp_path / "found.json"
    flags = ("--num-requests", "12", "--prompt-len", "3-30", "--output-len", "4-20", "--vocab", "250")
    assert main(["bench", "serve", "--url", tiny_server.url, *flags, "--json", str(path)]) == 0
    assert "12 completed, 0 failed" in capsys.readouterr().out
    found = json.loads(path.read_text())["summary"]
    first = {"requests": 1, "prompt": 2, "output": 2}  # asks what the endpoint takes
    wanted = found["output_tokens"] + first["output"]
    end = time.monotonic() + 20
    while (after := totals(tiny_server))["generation_tokens_total"] - before["generation_tokens_total"] < wanted:
        assert time.monotonic() < end, "the figures of the core do not arrive"
        time.sleep(0.1)
    counted = {name: after[name] - before[name] for name in after}
    assert counted["generation_tokens_total"] == wanted
    assert counted["prompt_tokens_total"] == found["prompt_tokens"] + first["prompt"]
    assert counted["requests_total"] == 12 + first["requests"]
    assert counted["time_to_first_token_seconds_count"] == 12 + first["requests"]
    assert counted["request_generation_tokens_sum"] == wanted
    assert after["num_requests_running"] == 0
    status = status_of(tiny_server)
    assert status.facts is not None
    assert (status.facts.model, status.health.state) == ("tiny", "ready")
    assert {why.reason for phase in status.phases for why in phase.eager} == {"disabled"}


def test_a_server_with_a_key_shows_its_page_to_who_has_it(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), *TINY_FLAGS, "--api-key", "open-sesame") as server:
        assert server.get("/").status_code == 200
        assert server.get("/status.json").status_code == 401
        assert server.get("/metrics").status_code == 401
        key = {"Authorization": "Bearer open-sesame"}
        assert httpx.get(f"{server.url}/metrics", headers=key).status_code == 200
        with open_browser() as browser:
            tab = Tab(browser)
            tab.page.goto(server.url)
            tab.page.get_by_label("API key").fill("open-sesame")
            tab.page.keyboard.press("Enter")
            tab.until("#state", "ready")
            assert tab.text("#model") == "tiny"
