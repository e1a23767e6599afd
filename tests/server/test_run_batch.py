"""`phonograph run-batch`: files in OpenAI's batch format, through the routes of the server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phonograph.errors import CoreError, PlanError
from phonograph.server.batch.files import Done, count_lines, numbered_lines, resumed
from phonograph.server.batch.lines import BadLineError, read_request
from phonograph.server.batch.progress import BatchProgress
from phonograph.server.batch.running import BatchRun, Tally

pytestmark = pytest.mark.slow

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


def line(name: str, url: str = "/v1/chat/completions", body: object = CHAT, **more: object) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **more})


def command(tiny_model: Path, *args: str) -> list[str]:
    flags = ("--model", str(tiny_model), "--device", "cpu", "--max-seqs", "4", "--embeddings")
    return [sys.executable, "-m", "phonograph", "run-batch", *args, *flags]


def run(tiny_model: Path, *args: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(tiny_model, *args), input=given, capture_output=True, text=True, env=env, timeout=120, check=False
    )


def results(path: Path) -> dict[str | None, Any]:
    return {found["custom_id"]: found for found in map(json.loads, path.read_text().splitlines())}


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["same", "symbolic", "hard", "standard input"])
def test_answers_never_take_the_place_of_requests(tiny_model: Path, tmp_path: Path, form: str) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text('{"custom_id": "a"}\n')
    if form == "symbolic":
        output.symlink_to(requests)
    elif form == "hard":
        output.hardlink_to(requests)
    else:
        output = requests
    given = "-" if form == "standard input" else str(requests)
    with requests.open() as standard:
        asked = command(tiny_model, "-i", given, "-o", str(output), "--overwrite")
        found = subprocess.run(asked, stdin=standard, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2
    assert "is the file that requests are read from" in found.stderr
    assert requests.read_text() == '{"custom_id": "a"}\n'


def test_all_routes_and_every_kind_of_bad_line(tiny_model: Path, tmp_path: Path) -> None:
    bad = [
        "no json",
        line("m", method="GET"),
        line("u", "/v1/files"),
        line("c0"),
        line("s", body={**CHAT, "stream": True}),
    ]
    good = [
        *(line(f"c{n}") for n in range(12)),
        line("t", "/v1/completions", {"prompt": "a", "max_tokens": 3}),
        line("e", "/v1/embeddings", {"input": ["one", "two"]}),
        line("p", "/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    ]
    refused = line("r", body={**CHAT, "n": 1000})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*good, "", *bad, refused]))
    done = run(tiny_model, "-i", str(source), "-o", str(target))
    assert done.returncode == 1, done.stderr
    lines = [json.loads(text) for text in target.read_text().splitlines()]
    assert len(lines) == len(good) + len(bad) + 1
    found = {one["custom_id"]: one for one in lines if one["error"] is None}
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in lines)
    assert len({one["id"] for one in lines}) == len(lines)
    assert found["c3"]["response"]["status_code"] == 200
    assert found["c3"]["response"]["body"]["object"] == "chat.completion"
    assert found["c3"]["response"]["request_id"] == found["c3"]["response"]["body"]["id"]
    assert found["t"]["response"]["body"]["object"] == "text_completion"
    assert len(found["e"]["response"]["body"]["data"]) == 2
    assert (found["p"]["response"]["body"]["object"], found["p"]["response"]["body"]["store"]) == ("response", False)
    assert found["r"]["response"]["status_code"] == 400
    assert found["r"]["response"]["body"]["error"]["param"] == "n"
    errors = {one["error"]["line"]: one for one in lines if one["error"] is not None}
    assert {number: one["error"]["code"] for number, one in errors.items()} == {
        17: "invalid_line",
        18: "invalid_method",
        19: "invalid_url",
        20: "duplicate_custom_id",
        21: "invalid_body",
    }
    assert [errors[number]["custom_id"] for number in (17, 18, 20)] == [None, "m", "c0"]
    for number in (*errors, 22):
        assert f"line {number}: " in done.stderr
    assert "done: 15 answered, 6 failed" in done.stderr


def test_it_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"c{n}") + "\n" for n in range(6)) + "no json\n")
    assert run(tiny_model, "-i", str(source), "-o", str(target)).returncode == 1
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:3]) + whole[3][:20])
    again = run(tiny_model, "-i", str(source), "-o", str(target))
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert run(tiny_model, "-i", str(source), "-o", str(target), "--resume").returncode in (0, 1)
    assert target.read_bytes().startswith(b"".join(whole[:3]))
    assert set(results(target)) == {None, *(f"c{n}" for n in range(6))}
    assert len(target.read_text().splitlines()) == 7
    third = run(tiny_model, "-i", str(source), "-o", str(target), "--resume")
    assert third.returncode == 0
    assert "0 answered, 0 failed, 7 had been before" in third.stderr


def test_standard_streams(tiny_model: Path) -> None:
    done = run(tiny_model, "-i", "-", "-o", "-", given=f"{line('a')}\n{line('b')}")
    assert done.returncode == 0, done.stderr
    assert {json.loads(text)["custom_id"] for text in done.stdout.splitlines()} == {"a", "b"}


def test_ctrl_c_leaves_what_is_done(tiny_model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = {**CHAT, "max_tokens": 100}
    source.write_text("".join(line(f"c{n}", body=long) + "\n" for n in range(2000)))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    args = command(tiny_model, "-i", str(source), "-o", str(target))
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=env) as process:
        end = time.monotonic() + 60
        while (not target.exists() or target.stat().st_size < 2000) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopped (--resume continues)" in said
    assert "Traceback" not in said
    assert 0 < len(results(target)) < 2000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-i", "/no/such/file", "-o", "x"), "--input /no/such/file"),
        (("-i", "-", "-o", "/no/such/folder/x"), "--output /no/such/folder/x"),
        (("-i", "-", "-o", "-", "--resume"), "--resume"),
        (("-i", "-", "-o", "x", "--max-in-flight", "0"), "--max-in-flight"),
    ],
)
def test_wrong_flags_end_before_anything_is_loaded(tiny_model: Path, args: tuple[str, ...], said: str) -> None:
    done = run(tiny_model, *args, given="")
    assert done.returncode == 2
    assert said in done.stderr


# -- its parts ------------------------------------------------------------------------------------------------------

Answering = Callable[[Request], Any]


async def _never() -> str:
    await asyncio.Event().wait()
    return ""


def batch(answer: Answering, text: str, *, most: int = 4, waits: bool = False, lost: Any = None) -> Any:
    """(tally, output lines, reports) of a run over an app of one function."""
    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    output, reports = io.BytesIO(), list[str]()

    async def work() -> Tally:
        running = BatchRun(app, output, most=most, done=Done(), report=reports.append, progress=lambda tally: None)
        return await running.run(numbered_lines(io.BytesIO(text.encode()), 1000), (lost or _never)(), waits=waits)

    tally = asyncio.run(work())
    return tally, [json.loads(found) for found in output.getvalue().splitlines()], reports


@pytest.mark.parametrize("waits", [False, True])
def test_so_many_are_in_flight_and_no_more(waits: bool) -> None:
    flying = most = 0

    async def answer(request: Request) -> Response:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.02)
        flying -= 1
        return JSONResponse({"id": "x"})

    tally, found, _ = batch(answer, "\n".join(line(f"{n}") for n in range(100)), most=7, waits=waits)
    assert (tally.succeeded, tally.failed, len(found), most) == (100, 0, 100, 7)


def test_a_full_queue_is_waited_for() -> None:
    tries = 0

    async def answer(request: Request) -> Response:
        nonlocal tries
        tries += 1
        if tries <= 5:
            return JSONResponse({"error": {}}, 429, headers={"Retry-After": "0"})
        return JSONResponse({"id": "x"})

    tally, _, _ = batch(answer, line("a"))
    assert (tally.succeeded, tries) == (1, 6)


def test_a_core_that_goes_down_under_a_request_is_tried_thrice() -> None:
    tries = 0

    async def answer(request: Request) -> Response:
        nonlocal tries
        tries += 1
        return JSONResponse({"error": {"message": "down", "type": "server_error"}}, 503, headers={"Retry-After": "0"})

    tally, found, reports = batch(answer, line("a"))
    assert (tally.failed, tries, reports) == (1, 3, ["line 1: down"])
    assert found[0]["response"]["status_code"] == 503


def test_an_app_that_raises_fails_its_line_alone() -> None:
    async def answer(request: Request) -> Response:
        if (await request.json()) == {"bad": 1}:
            raise RuntimeError("what nobody expected")
        return JSONResponse({"id": "x"})

    tally, found, _ = batch(answer, f"{line('a', body={'bad': 1})}\n{line('b')}")
    assert (tally.succeeded, tally.failed) == (1, 1)
    assert {one["custom_id"]: one["response"]["status_code"] for one in found} == {"a": 500, "b": 200}


def test_a_core_that_is_lost_for_good_ends_the_run() -> None:
    async def answer(request: Request) -> Response:
        await asyncio.Event().wait()
        return Response()

    async def lost() -> str:
        await asyncio.sleep(0.05)
        return "the engine core is down"

    with pytest.raises(CoreError, match=r"the engine core is down.*--resume"):
        batch(answer, line("a"), lost=lost)


def test_a_disk_that_is_full_ends_the_run() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    async def answer(request: Request) -> Response:
        return JSONResponse({"id": "x"})

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])

    async def work() -> None:
        running = BatchRun(app, Full(), most=2, done=Done(), report=print, progress=lambda tally: None)
        await running.run(numbered_lines(io.BytesIO(line("a").encode()), 1000), _never())

    with pytest.raises(PlanError, match="No space left on device"):
        asyncio.run(work())


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    given = b"\xef\xbb\xbf" + line("a").encode() + b"\r\n\xef\xbb\xbf{}"
    (_, first), (_, second) = numbered_lines(io.BytesIO(given), 1000)
    assert isinstance(first, bytes)
    assert json.loads(first)["custom_id"] == "a"
    assert second == b"\xef\xbb\xbf{}", "in the middle of a file it is none"


def test_long_lines_are_read_past() -> None:
    text = b"a" * 30 + b"\n" + b"b" * 3_000_000 + b"\nc\n\n" + b"d" * 31
    found = dict(numbered_lines(io.BytesIO(text), 30))
    assert (found[1], found[3]) == (b"a" * 30 + b"\n", b"c\n")
    for number in (2, 5):
        bad = found[number]
        assert isinstance(bad, BadLineError)
        assert bad.code == "line_too_long"
    assert 4 not in found, "it is blank"


def test_memory_stays_small_over_many_lines() -> None:
    """What is kept of a line of 400 bytes is a digest of its id: of 100,000 lines, under 24 MiB."""
    import tracemalloc

    body = {"messages": "x" * 300}

    class Lines(io.RawIOBase):
        def __init__(self) -> None:
            self.number = 0

        def readline(self, size: int | None = -1) -> bytes:
            self.number += 1
            return (line(f"id-{self.number}", body=body) + "\n").encode() if self.number <= 5_000 else b""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"id":"x"}'})

    class Nothing(io.BytesIO):
        def write(self, data: Any) -> int:
            return len(data)

    async def work() -> Tally:
        running = BatchRun(app, Nothing(), most=16, done=Done(), report=print, progress=lambda tally: None)
        return await running.run(numbered_lines(Lines(), 1000), _never(), waits=False)  # type: ignore[arg-type]

    tracemalloc.start()
    tally = asyncio.run(work())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tally.succeeded == 5_000
    assert peak < 5_000 * 200 + (1 << 20), f"{peak / 2**20:.1f} MiB"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("{", "invalid_line", "expected {"),
        ("[]", "invalid_line", "expected {"),
        ('{"custom_id": "a"}', "invalid_line", "missing required field `method`"),
        (line("a", more=1), "invalid_line", "unknown field `more`"),
        (line(""), "invalid_custom_id", "0 characters"),
        (line("a" * 513), "invalid_custom_id", "513 characters"),
    ],
)
def test_bad_lines_say_what_is_wrong(text: str, code: str, said: str) -> None:
    with pytest.raises(BadLineError) as caught:
        read_request(text.encode())
    assert caught.value.code == code
    assert said in caught.value.message.lower() or said in caught.value.message


def test_an_output_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nof years\n")
    with pytest.raises(PlanError, match="line 1 was not written by run-batch"):
        resumed(path)
    assert path.read_text() == "my notes\nof years\n"
    assert len(resumed(tmp_path / "none")) == 0


def test_lines_are_counted(tmp_path: Path) -> None:
    for text, count in (("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2)):
        path = tmp_path / "file"
        path.write_text(text)
        assert count_lines(path) == count


def test_progress_on_a_terminal_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (Terminal(), io.StringIO()):
        now = 0.0
        progress = BatchProgress(stream, 100)
        for done in range(1, 101):
            now += 0.5
            progress.show(Tally(succeeded=done))
        for number in range(30):
            progress.report(f"line {number}: wrong")
        progress.end(Tally(90, 10), "done")
        said = stream.getvalue()
        assert "40/100" in said
        assert ("\r" in said) == stream.isatty()
        assert said.count("\n") < 40
        assert "line 19: wrong" in said
        assert "line 20: wrong" not in said
        assert said.endswith("done: 90 answered, 10 failed, in 50.0 s\n")
    unknown = io.StringIO()
    progress, now = BatchProgress(unknown, None), 100.0
    progress.show(Tally(succeeded=7, failed=1))
    assert unknown.getvalue() == "requests  8, 1 failed\n"
