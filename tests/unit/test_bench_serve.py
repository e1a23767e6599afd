"""The load client against a small endpoint whose times and token counts are known."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from phonograph.bench.serving.client import Lines
from phonograph.bench.serving.outcome import Outcome
from phonograph.bench.serving.summary import latency_summary, summarise, table
from phonograph.bench.workloads import WORKLOADS, Fixed, Job, LogNormal, Uniform, jobs, lengths_from
from phonograph.cli import bench as bench_command
from phonograph.errors import PlanError
from statuses import serving

DOCS = Path(__file__).parents[2] / "docs" / "bench-serve.md"
FIRST, GAP = 0.12, 0.03


@dataclass
class Model:
    """An endpoint that streams like an engine would, or fails as it is told."""

    tokens_per_event: int = 1
    takes_ids: bool = True
    takes_ignore_eos: bool = True
    reports_usage: bool = True
    has_text: bool = True
    failure: str = ""
    every: int = 3
    """Which requests the failure is for."""
    vocab: int = 1000
    seen: list[dict[str, Any]] = field(default_factory=list)
    num_asked: int = 0

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "little"}, {"id": "other"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        refusal = self._refusal(body, request)
        if refusal is not None:
            return JSONResponse({"error": {"message": refusal}}, status_code=400)
        self.seen.append(body)
        self.num_asked += 1
        fails = bool(self.failure) and self.num_asked > 1 and self.num_asked % self.every == 0
        if fails and self.failure == "full":
            return JSONResponse({"error": {"message": "queue is full"}}, status_code=429)
        return StreamingResponse(self._events(body, self.failure if fails else ""), media_type="text/event-stream")

    def _refusal(self, body: dict[str, Any], request: Request) -> str | None:
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) and (not self.takes_ids or max(prompt) >= self.vocab):
            return "no such token ids"
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return "unknown field ignore_eos"
        if "stream_options" in body and not self.reports_usage:
            return "unknown field stream_options"
        return None

    async def _events(self, body: dict[str, Any], failure: str) -> AsyncIterator[str]:
        wanted = body["max_tokens"]
        await asyncio.sleep(FIRST)
        for index, made in enumerate(range(0, wanted, self.tokens_per_event)):
            if index:
                await asyncio.sleep(GAP)
            if failure == "error" and index == 1:
                yield event({"error": {"message": "the engine core went down"}})
                return
            if failure == "cut" and index == 1:
                return
            count = min(self.tokens_per_event, wanted - made)
            yield event(self._piece(body, "token " * count if self.has_text else ""))
        yield event(self._piece(body, "", finish="length"))
        if "stream_options" in body:
            size = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 5
            yield event({"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": wanted}})
        yield "data: [DONE]\n\n"

    def _piece(self, body: dict[str, Any], text: str, finish: str | None = None) -> dict[str, Any]:
        if "messages" in body:
            return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
        return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}

    def app(self) -> Starlette:
        routes = [Route("/v1/models", self.models)]
        for path in ("/v1/completions", "/v1/chat/completions"):
            routes.append(Route(path, self.complete, methods=["POST"]))
        return Starlette(routes=routes)


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def bench(url: str, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    bench_command.add_flags(parser)
    return bench_command.run(parser.parse_args(["serve", "--url", url, *flags]))


def measured(model: Model, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """What a test of this endpoint finds, as it is written to JSON."""
    path = tmp_path / "found.json"
    with serving(model.app()) as url:
        bench(url, "--json", str(path), "--output-len", "9", "--prompt-len", "5", *flags)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# -- against an endpoint --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_event", [1, 4])
def test_times_and_tokens_are_those_of_the_endpoint(tmp_path: Path, tokens_per_event: int) -> None:
    found = measured(Model(tokens_per_event), tmp_path, "--num-requests", "6")["summary"]
    events = -(-9 // tokens_per_event)
    assert (found["completed"], found["failed"], found["output_tokens"]) == (6, 0, 54)
    assert found["prompt_tokens"] == 30
    assert found["tokens_per_event"] == pytest.approx(9 / events)
    # A busy machine makes times longer, never shorter; what is wrong by counting is wrong by more than this.
    share = GAP * events / 9
    assert 0.95 * FIRST <= found["first_token"]["p50"] <= FIRST + 0.15
    assert 0.9 * share <= found["token_gap"]["mean"] <= 2.5 * share
    assert 0.9 * GAP <= found["longest_gap"]["p50"] <= 10 * GAP
    whole = FIRST + GAP * (events - 1)
    assert 0.95 * whole <= found["request"]["p50"] <= whole + 0.3
    assert found["output_tokens_per_second"] == pytest.approx(54 / found["seconds"])
    assert found["requests_per_second"] == pytest.approx(6 / found["seconds"])
    assert not found["counts_events"]


def test_chat_is_sent_as_text(tmp_path: Path) -> None:
    model = Model()
    found = measured(model, tmp_path, "--num-requests", "2", "--api", "chat", "--model", "mine")
    assert found["summary"]["completed"] == 2
    assert model.seen[-1]["messages"][0]["content"].count(" ") == 4
    assert model.seen[-1]["model"] == "mine"


def test_an_endpoint_gets_what_it_takes_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(takes_ids=False, takes_ignore_eos=False, reports_usage=False)
    found = measured(model, tmp_path, "--num-requests", "2")
    assert found["summary"]["counts_events"]
    assert found["summary"]["output_tokens"] == 18
    assert (found["workload"]["prompts"], found["workload"]["ignore_eos"]) == ("text", False)
    shown = capsys.readouterr().out
    assert "events were counted as tokens" in shown
    assert "does not take ignore_eos" in shown


def test_tokens_without_text_are_timed_by_their_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(Model(has_text=False), tmp_path, "--num-requests", "2")["summary"]
    assert (found["completed"], found["output_tokens"], found["without_text"]) == (2, 18, 2)
    assert 0.95 * FIRST <= found["first_token"]["p50"] <= FIRST + 0.15
    assert "tokens and no text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "kind", "detail"),
    [
        ("full", "http 429", "queue is full"),
        ("error", "error in the stream", "went down"),
        ("cut", "stream cut off", None),
    ],
)
def test_errors_are_counted_by_kind(
    tmp_path: Path, failure: str, kind: str, detail: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(Model(failure=failure), tmp_path, "--num-requests", "6")["summary"]
    assert (found["completed"], found["errors"]) == (4, {kind: 2})
    assert detail is None or detail in found["examples"][kind]
    assert f"2 {kind}" in capsys.readouterr().out


def test_arrivals_follow_the_rate_and_the_limit(tmp_path: Path) -> None:
    requests = measured(Model(), tmp_path, "--num-requests", "8", "--rate", "40")["requests"]
    assert all(one["sent"] == pytest.approx(one["due"], abs=0.25) for one in requests)
    assert sorted(one["due"] for one in requests)[-1] > 0.05
    limited = measured(Model(), tmp_path, "--num-requests", "4", "--concurrency", "2")["requests"]
    assert sum(one["sent"] < 0.9 * (FIRST + 8 * GAP) for one in limited) == 2


def test_w1_is_what_is_sent(tmp_path: Path) -> None:
    model = Model(vocab=150_000)
    with serving(model.app()) as url:
        bench(url, "--workload", "w1", "--num-requests", "2", "--output-len", "2")
    source = random.Random(7)
    expected = [[source.randrange(10, 150_000) for _ in range(source.randrange(32, 512))] for _ in range(2)]
    assert [body["prompt"] for body in model.seen[1:]] == expected
    assert model.seen[1]["temperature"] == 0
    assert model.seen[1]["ignore_eos"] is True


def test_a_vocabulary_that_is_too_small_is_told() -> None:
    with serving(Model(vocab=1000).app()) as url, pytest.raises(PlanError, match=r"no such token ids.*--vocab"):
        bench(url, "--workload", "w1")


def test_nobody_there_is_told() -> None:
    with pytest.raises(PlanError, match=r"listing the models of http://127.0.0.1:9/v1/models.*Check --url"):
        bench("http://127.0.0.1:9")
    with pytest.raises(PlanError, match="no connection"):
        bench("http://127.0.0.1:9", "--model", "x")


def test_a_request_that_never_ends_is_a_timeout(tmp_path: Path) -> None:
    found = measured(Model(), tmp_path, "--num-requests", "2", "--timeout", "0.8", "--output-len", "90")["summary"]
    assert (found["completed"], found["errors"]) == (0, {"timeout": 2})


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot{suffix}"
    measured(Model(failure="full"), tmp_path, "--num-requests", "4", "--plot", str(path))
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in head


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--plot", "x.pdf"], "ends in .svg or .png"),
        (["--plot", "/no/such/folder/x.png"], "does not exist"),
        (["--json", "/no/such/folder/x"], "does not exist"),
        (["--api", "chat", "--prompts", "ids", "--model", "x"], "takes text only"),
        (["--prompt-len", "many"], "expected a number"),
        (["--api-key", "@/no/such/file"], "No such file"),
    ],
)
def test_what_can_not_be_is_told_before_anything_is_sent(flags: list[str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        bench("http://127.0.0.1:9", *flags)


# -- the parts ------------------------------------------------------------------------------------------------


def test_tokens_that_arrive_together_share_the_wait() -> None:
    one = Outcome(0.0, sent=1.0, end=3.0, arrivals=[(1.5, 1), (1.8, 3), (2.0, 1)], usage_tokens=5)
    assert one.first_token_seconds == 0.5
    assert np.allclose(one.token_gaps(), [(0.1, 3), (0.2, 1)])
    assert one.longest_gap == pytest.approx(0.3)
    found = summarise([one]).token_gap
    assert found is not None
    assert np.allclose((found.p50, found.p99), (0.1, 0.2))
    assert found.mean == pytest.approx(0.5 / 4)


def test_an_event_stands_for_the_tokens_that_usage_says() -> None:
    one = Outcome(0.0, arrivals=[(1.0, 1), (1.4, 1), (1.6, 1)], usage_tokens=12)
    assert np.allclose(one.token_gaps(), [(0.1, 4), (0.05, 4)])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.data())
def test_percentiles_are_those_of_the_values_written_out(values: list[float], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(values), max_size=len(values)))
    found = latency_summary(values, [float(weight) for weight in weights])
    written = np.repeat(values, weights)
    assert found is not None
    for share, value in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert value == np.quantile(written, share, method="inverted_cdf")
    assert found.mean == pytest.approx(float(written.mean()))


def test_an_empty_test_has_a_table() -> None:
    assert "0 completed" in table(summarise([]))


@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.data())
def test_events_come_out_however_they_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"data: " + payload + b"\r\n\r\n" for payload in payloads) + b": a comment\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    lines = Lines()
    found: list[bytes] = []
    for early, late in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += lines.add(stream[early:late])
    assert found == [payload.strip() for payload in payloads]


def test_lengths_are_read() -> None:
    assert lengths_from("256") == Fixed(256)
    assert lengths_from("32-512") == Uniform(32, 512)
    assert lengths_from("lognormal:220") == LogNormal(220)
    for wrong in ("0", "9-3", "0-3", "-5", "lognormal:", "lognormal:-1", "1.5", "lognormal:nan"):
        with pytest.raises(PlanError):
            lengths_from(wrong)


def first(count: int, rate: float, seed: int) -> list[Job]:
    return list(islice(jobs(WORKLOADS["mix"], rate, seed), count))


def test_the_mix_has_its_means() -> None:
    found = first(4000, 10.0, 7)
    assert np.mean([len(job.prompt) for job in found]) == pytest.approx(220, rel=0.08)
    assert np.mean([job.max_tokens for job in found]) == pytest.approx(190, rel=0.08)
    assert found[-1].due / len(found) == pytest.approx(0.1, rel=0.05)


def test_a_seed_gives_the_same_jobs_and_a_rate_only_their_times() -> None:
    slow, fast = (first(20, rate, 3) for rate in (1.0, 100.0))
    assert slow == first(20, 1.0, 3)
    assert [(job.prompt, job.max_tokens) for job in slow] == [(job.prompt, job.max_tokens) for job in fast]
    assert len(slow[5].text.split()) == len(slow[5].prompt)
    assert slow[5].due == pytest.approx(100 * fast[5].due)
    assert {job.due for job in first(5, float("inf"), 3)} == {0.0}


def test_every_flag_is_documented_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_command.add_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    flags = set(re.findall(r"^ +(--[\w-]+)", shown, re.M)) - {"--quiet"}
    assert set(re.findall(r"`(--[\w-]+)`", DOCS.read_text())) == flags
