"""The status page's routes: what is served, under which policy, and in which shape."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from email.message import Message
from importlib.resources import files

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from phonograph.engine.process.health import Health
from phonograph.server.observe.history import HistoryPoint
from phonograph.server.observe.status import Status
from phonograph.server.observe.status_page import PUBLIC_PATHS
from statuses import SERVER_INFO, Busy, app, serving

PAGE = files("phonograph.server.observe") / "page"


@pytest.fixture(scope="module")
def busy() -> Busy:
    made = Busy()
    made.run(30)
    made.warn("the engine core runs again")
    made.metrics.rejected("queue_full")
    return made


@pytest.fixture(scope="module")
def url(busy: Busy) -> Iterator[str]:
    with serving(app(busy)) as found:
        yield found


def fetch(url: str, **headers: str) -> tuple[int, Message, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


@pytest.mark.parametrize("path", sorted(PUBLIC_PATHS))
def test_every_file_comes_with_the_policy(url: str, path: str) -> None:
    status, headers, body = fetch(url + path)
    assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert body


def test_the_page_keeps_to_its_policy_and_to_itself() -> None:
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    assert set(re.findall(r'(?:src|href)="(/[^"]*)"', html)) <= PUBLIC_PATHS | {"/metrics", "/status.json"}
    for name in ("page.js", "plot.js", "parts.js", "speculation.js", "request.js", "page.css"):
        text = (PAGE / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|@import|url\(", text), (
            name
        )
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name


def test_the_document_has_its_schema(url: str, busy: Busy) -> None:
    code, headers, body = fetch(f"{url}/status.json")
    assert (code, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
    status = msgspec.json.decode(body, type=Status, strict=True)
    assert status.facts == SERVER_INFO
    assert status.health == Health("ready")
    assert status.uptime == 30
    assert status.totals.rejected == {"queue_full": 1}
    assert status.incidents[0].text == "the engine core runs again"
    assert status.cache is not None
    assert status.cache.used + status.cache.cached + status.cache.free == status.cache.total
    assert [phase.name for phase in status.phases] == ["decode", "prefill"]
    assert status.phases[1].eager[0].detail == "the capture of prefill[tokens=4] failed"
    assert status.latencies.token_gap.p50 == pytest.approx(0.006 * 1.4, rel=0.4)


def test_samples_come_as_columns_and_from_where_they_are_asked(url: str) -> None:
    found = json.loads(fetch(f"{url}/status.json?since=28")[2])["history"]
    assert (found["first"], len(found["rows"])) == (28, 2)
    assert found["columns"] == list(HistoryPoint.__struct_fields__)
    assert all(len(row) == len(found["columns"]) for row in found["rows"])


@pytest.mark.parametrize("since", ["", "-1", "x", "1e9", "²", "9" * 400])
def test_a_wrong_number_is_told_so(url: str, since: str) -> None:
    code, _, body = fetch(f"{url}/status.json?since={urllib.parse.quote(since)}")
    assert code == 400
    assert json.loads(body)["error"]["param"] == "since"


def test_an_empty_server_has_a_status_too() -> None:
    with serving(app(Busy(facts=None))) as empty:
        status = msgspec.json.decode(fetch(f"{empty}/status.json")[2], type=Status)
        assert (status.facts, status.cache, status.phases, status.history.rows) == (None, None, (), ())
        assert fetch(f"{empty}/metrics")[0] == 200


def test_metrics_are_served_as_prometheus_expects(url: str) -> None:
    code, headers, body = fetch(f"{url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    names = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {"phonograph:num_requests_running", "phonograph:eager_steps", "process_resident_memory_bytes"} <= names


def test_behind_a_key_only_the_page_itself_is_open(busy: Busy) -> None:
    with serving(app(busy, locked=True)) as locked:
        assert {path: fetch(locked + path)[0] for path in PUBLIC_PATHS} == dict.fromkeys(PUBLIC_PATHS, 200)
        assert fetch(f"{locked}/status.json")[0] == 401
        assert fetch(f"{locked}/status.json", Authorization="Bearer secret")[0] == 200
