"""A server that speculates: answers as without, the request's own field, and what metrics, status and usage say."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_head import write_random_head

from phonograph import LLM
from server.conftest import TINY_FLAGS, Server, serving

pytestmark = pytest.mark.slow

BODY = {"prompt": "one two three one two three one two", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["ngram", "ngram+eagle"])
def drafter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(drafter: str, tiny_model: Path, offline: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--speculate", drafter, "--speculate-depth", "2"]
    if "eagle" in drafter:
        head = tmp_path_factory.mktemp("head")
        write_random_head(head, offline.checkpoint.config, 100, torch.float32)
        flags += ["--draft", str(head)]
    with serving("--model", str(tiny_model), *TINY_FLAGS, *flags) as found:
        yield found


def metric(server: Server, name: str) -> float:
    text = server.get("/metrics").text
    found = re.findall(rf"^phonograph:{re.escape(name)}(?:_total)?{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def test_answers_are_those_without(server: Server, tiny_server: Server) -> None:
    for changes in ({}, {"temperature": 0.9, "seed": 3}, {"logprobs": 2, "presence_penalty": 1.0}, {"speculate": 1}):
        body = {**BODY, **changes}
        plainly = {name: value for name, value in body.items() if name != "speculate"}
        found, wanted = (
            one.post("/v1/completions", sent).json() for one, sent in ((server, body), (tiny_server, plainly))
        )
        assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
        assert found["usage"]["completion_tokens"] == 40


def test_usage_tells_of_drafts(server: Server, tiny_server: Server) -> None:
    told = server.post("/v1/completions", BODY).json()["usage"]["completion_tokens_details"]
    assert told["accepted_prediction_tokens"] + told["rejected_prediction_tokens"] > 0
    assert told["accepted_prediction_tokens"] < 40
    assert (
        "completion_tokens_details" not in server.post("/v1/completions", {**BODY, "speculate": False}).json()["usage"]
    )
    assert "completion_tokens_details" not in tiny_server.post("/v1/completions", BODY).json()["usage"]


def test_usage_of_a_response_tells_of_drafts(server: Server, tiny_server: Server) -> None:
    body = {"input": BODY["prompt"], "max_output_tokens": 40, "temperature": 0}
    told, plainly = (
        one.post("/v1/responses", body).json()["usage"]["output_tokens_details"] for one in (server, tiny_server)
    )
    assert told["accepted_prediction_tokens"] + told["rejected_prediction_tokens"] > 0
    assert plainly == {"reasoning_tokens": told["reasoning_tokens"]}
    without = server.post("/v1/responses", {**body, "speculate": False}).json()["usage"]["output_tokens_details"]
    assert without == plainly


def counted(server: Server) -> list[float]:
    """Rounds, drafted, accepted and their tokens, once nothing is in flight."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "round_tokens")
    before: list[float] = []
    while (found := [metric(server, f"spec_decode_{name}") for name in names]) != before or server.get(
        "/status.json"
    ).json()["running"]:
        before = found
        time.sleep(0.1)
    return found


def test_usage_of_short_answers(server: Server) -> None:
    """What `max_tokens` cuts off is not rejected: usage is that of the rounds, whose last token is the model's own."""
    for max_tokens in range(1, 9):
        before = counted(server)
        usage = server.post("/v1/completions", {**BODY, "max_tokens": max_tokens}).json()["usage"]
        rounds, drafted, accepted, tokens = (now - then for now, then in zip(counted(server), before, strict=True))
        assert usage["completion_tokens"] == max_tokens
        if max_tokens <= 2:
            assert drafted == 0, "nothing could be accepted"
        told = usage.get("completion_tokens_details", {})
        assert told.get("accepted_prediction_tokens", 0) == accepted == tokens - rounds
        assert told.get("rejected_prediction_tokens", 0) == drafted - accepted
        # With a round for every token, as where all drafts are wrong, there are the most.
        assert drafted <= sum(min(2, max_tokens - outputs - 1) for outputs in range(1, max_tokens))


def test_a_stop_text_within_a_round(server: Server, tiny_server: Server) -> None:
    whole = tiny_server.post("/v1/completions", BODY).json()["choices"][0]["text"]
    for place in range(8, 16):
        body = {**BODY, "stop": [whole[place : place + 2]]}
        found, wanted = (one.post("/v1/completions", body).json() for one in (server, tiny_server))
        assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
        assert found["choices"][0]["finish_reason"] == "stop"
        usage = found["usage"]
        assert usage["completion_tokens"] == wanted["usage"]["completion_tokens"]
        told = usage.get("completion_tokens_details", {"accepted_prediction_tokens": 0})
        assert told["accepted_prediction_tokens"] < usage["completion_tokens"]


def test_a_stop_string_leaves_the_drafts_that_max_tokens_leaves(server: Server, tiny_server: Server) -> None:
    """But that `max_tokens` is known in rounds before the last too, whose drafts may reach past it."""
    whole = tiny_server.post("/v1/completions", BODY).json()["choices"][0]["text"]
    for place in range(8, 16):
        usage = server.post("/v1/completions", {**BODY, "stop": [whole[place : place + 2]]}).json()["usage"]
        cut = server.post("/v1/completions", {**BODY, "max_tokens": usage["completion_tokens"]}).json()["usage"]
        found, wanted = (one.get("completion_tokens_details", {}) for one in (usage, cut))
        accepted, rejected = "accepted_prediction_tokens", "rejected_prediction_tokens"
        assert found.get(accepted, 0) == wanted.get(accepted, 0)
        assert found.get(rejected, 0) >= wanted.get(rejected, 0)


def test_metrics_and_status(server: Server, drafter: str) -> None:
    server.post("/v1/completions", {**BODY, "speculate": False})
    server.post("/v1/completions", BODY)
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "round_tokens")
    rounds, drafted, accepted, by_place, tokens = (metric(server, f"spec_decode_{name}") for name in names)
    assert rounds < drafted == metric(server, "spec_decode_num_draft_tokens_per_pos") <= 2 * rounds
    assert accepted == by_place == tokens - rounds
    assert metric(server, "spec_decode_plain_rounds") >= 39
    told = server.get("/status.json").json()["speculation"]
    assert (told["rounds"], sum(told["drafted"]), sum(told["accepted"])) == (rounds, drafted, accepted)
    assert told["plain"]["request"] >= 39
    assert (told["plain"]["no_draft"] == 0) == (drafter != "ngram"), "a head drafts whatever came before"


def test_the_screen_says_who_drafts(server: Server, tiny_server: Server, drafter: str) -> None:
    line = f"drafts    {drafter}, 2 tokens a round; rounds run wherever a request allows drafts"
    assert line in server.lines
    assert not any(line.startswith("drafts") for line in tiny_server.lines)


def test_the_status_page_s_figures(server: Server, tiny_server: Server, drafter: str) -> None:
    server.post("/v1/completions", BODY)
    counted(server)
    status = server.get("/status.json").json()
    told = {"drafter": drafter, "depth": 2, "when": "wherever a request allows drafts", "why": ""}
    assert status["facts"]["speculation"] == told
    found = status["speculation"]
    assert 0 < found["times"]["round"]["passes"] <= found["steps"]["round"]
    assert found["times"]["round"]["seconds"] > 0
    names = ("steps", "passes", "device_seconds")
    steps, passes, seconds = (metric(server, f"spec_decode_{name}") for name in names)
    assert steps == sum(found["steps"].values())
    assert passes == sum(time["passes"] for time in found["times"].values())
    assert seconds == pytest.approx(sum(time["seconds"] for time in found["times"].values()))
    plainly = tiny_server.get("/status.json").json()
    assert (plainly["facts"]["speculation"], plainly["speculation"]) == (None, None)


def test_what_can_t_be_is_refused(server: Server, tiny_server: Server) -> None:
    for path, body in (("/v1/completions", BODY), ("/v1/responses", {"input": "one", "max_output_tokens": 4})):
        for asked in (True, 1):
            refused = tiny_server.post(path, {**body, "speculate": asked})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "speculate"
    for wrong in (-1, 1.5, "yes", 2000):
        assert server.post("/v1/completions", {**BODY, "speculate": wrong}).status_code == 400
