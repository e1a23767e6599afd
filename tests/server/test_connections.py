"""Connections that nobody should wait for: endless headers, silence, floods, other languages, other people's pages."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from phonograph.cli import serve
from phonograph.cli.main import main
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.errors import PlanError
from phonograph.server.app import create_app
from phonograph.server.options import ServerOptions
from server.conftest import TINY_FLAGS, Server, serving
from server.test_http import CHAT, GREEDY, HELLO, JSON, TEXT, error_of, events

HOST = b"Host: localhost\r\n"
FEW = 24


def connect(server: Server, seconds: float = 20) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=seconds)


def talk(server: Server, data: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error body of the answer to some bytes."""
    with connect(server) as sock:
        sock.sendall(data)
        return answer(sock)


def answer(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    found = b""
    while not (length := re.search(rb"content-length: (\d+)", found)) or len(found.partition(b"\r\n\r\n")[2]) < int(
        length[1]
    ):
        piece = sock.recv(65536)
        assert piece, found
        found += piece
    assert b"content-type: application/json" in found
    return int(found[9:12]), json.loads(found.partition(b"\r\n\r\n")[2])["error"]


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[Server]:
    """A server with short patience and room for few connections."""
    flags = ("--head-timeout", "1", "--max-connections", str(FEW), "--body-timeout", "2")
    with serving("--model", str(tiny_model), *TINY_FLAGS, *flags) as server:
        yield server


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, 431, "at most 65,536"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", 431, "at most 65,536"),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % n for n in range(200)), 431, "at most 128"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414, "the URL: found 9,001 bytes; at most 8,192"),
        (b"\x16\x03\x01\x00\xc8" + b"x" * 200, 400, "not valid HTTP"),
        (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400, "not valid HTTP"),
        (b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: -5\r\n\r\n", 400, "not valid HTTP"),
        (
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
            + HOST
            + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
            400,
            "not valid HTTP",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
            + HOST
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + b"1\r\nx\r\n" * 20_000,
            400,
            "chunks of a few bytes",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
            + HOST
            + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            400,
            "the Transfer-Encoding is 'gzip, chunked'; expected chunked",
        ),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "0 Host headers"),
        (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400, "2 Host headers"),
        (b"GET /health HTTP/1.1\r\nHost: evil.example:8000\r\n\r\n", 403, "names 'evil.example:8000'"),
    ],
)
def test_what_is_no_request_gets_an_error_body(guarded: Server, data: bytes, status: int, says: str) -> None:
    found, error = talk(guarded, data)
    assert found == status
    assert says in error["message"]


def test_headers_have_little_time_and_so_has_silence(guarded: Server) -> None:
    begin = time.monotonic()
    with connect(guarded) as silent, connect(guarded) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(4):  # still sending when the time is over
            time.sleep(0.2)
            slow.sendall(b"a: b\r\n")
        for sock in (silent, slow):
            status, error = answer(sock)
            assert (status, error["code"]) == (408, "head_timeout")
            assert sock.recv(1) == b""
    assert time.monotonic() - begin < 10


def test_a_second_request_has_as_little_time(guarded: Server) -> None:
    with connect(guarded) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        found = b""
        while not found.endswith(b"}"):
            found += sock.recv(65536)
        assert found.startswith(b"HTTP/1.1 200")
        sock.sendall(b"GET /health HTTP/1.1\r\nHo")
        assert answer(sock)[0] == 408


def test_a_body_that_nobody_reads_ends_the_connection(guarded: Server) -> None:
    with connect(guarded) as sock:
        sock.sendall(b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 1000000\r\n\r\n")
        assert answer(sock)[0] == 404
        with pytest.raises(OSError):  # noqa: PT012 (the connection ends under the loop)
            for _ in range(100):
                sock.sendall(b"x")
                time.sleep(0.1)


def test_a_trickled_body_is_given_up(guarded: Server) -> None:
    with connect(guarded) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST)
        sock.sendall(b'Content-Length: 1000\r\n\r\n{"prompt": ')
        assert answer(sock) == (408, answer_of_late_body())


def answer_of_late_body() -> dict[str, Any]:
    message = "the body did not arrive within 2 s. Send it faster, or make it smaller."
    return {"message": message, "type": "invalid_request_error", "param": None, "code": "body_timeout"}


def test_idle_connections_make_room_for_requests(guarded: Server) -> None:
    flood = [connect(guarded) for _ in range(3 * FEW)]
    try:
        assert guarded.get("/health").status_code == 200
        assert any("connections are open, as many as can be" in line for line in guarded.lines)
    finally:
        for sock in flood:
            sock.close()


def test_bodies_on_their_way_make_room_too(guarded: Server) -> None:
    flood = [connect(guarded) for _ in range(2 * FEW)]
    try:
        for sock in flood:
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST)
                sock.sendall(b"Content-Length: 1000\r\n\r\n{")
        time.sleep(0.1)
        assert guarded.get("/health").status_code == 200
    finally:
        for sock in flood:
            sock.close()


def test_pipelined_requests_are_answered_up_to_a_number(guarded: Server) -> None:
    with connect(guarded) as sock:
        sock.sendall((b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") * 100)
        found = b""
        while piece := sock.recv(65536):
            found += piece
    assert found.count(b"HTTP/1.1 200 OK") == 17  # one runs, the others wait


def test_a_pipelined_body_that_is_too_large_to_wait_ends_the_connection_after_the_answers(guarded: Server) -> None:
    body = json.dumps({"prompt": "abc", **GREEDY}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST
    first = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connect(guarded) as sock:
        sock.sendall(first + first + head + b"Content-Length: 100000\r\n\r\n" + b" " * 100_000)
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65536):
                found += piece
    assert found.count(b"HTTP/1.1 200 OK") == 2, found


@pytest.mark.parametrize("size", [1, 50, 100_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_that_would_speak_http_2_keeps_its_body(guarded: Server, size: int, is_chunked: bool) -> None:
    body = json.dumps({"prompt": "abc", **GREEDY}).encode()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST + upgrade
    if is_chunked:
        request = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    data = request + request + b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close, upgrade\r\nUpgrade: x\r\n\r\n"
    with connect(guarded) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            sock.sendall(data[start : start + size])
        found = b""
        while piece := sock.recv(65536):
            found += piece
    assert found.count(b"HTTP/1.1 200 OK") == 3, found
    assert found.count(b'"text":') == 2


def test_a_stream_over_http_1_0_has_no_chunks(guarded: Server) -> None:
    body = json.dumps({"prompt": "abc", **GREEDY, "stream": True}).encode()
    with connect(guarded) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n" + HOST)
        sock.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        found = b""
        while piece := sock.recv(65536):
            found += piece
    head, _, rest = found.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert events(rest)
    assert rest.endswith(b"data: [DONE]\n\n")


# -- other people's pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_body_that_a_web_page_could_send_is_refused(tiny_server: Server, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind is not None else {}
    said = httpx.post(tiny_server.url + TEXT, content=b'{"prompt": "x"}', headers=headers, timeout=60)
    assert 'curl -H "Content-Type: application/json"' in error_of(said, 415)["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON"])
def test_json_may_be_called_by_its_names(tiny_server: Server, kind: str) -> None:
    body = json.dumps({"prompt": "x", **GREEDY})
    assert httpx.post(tiny_server.url + TEXT, content=body, headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize("charset", ["latin-1", "UTF-16", '"iso-8859-1"', "utf-8x"])
def test_json_is_utf_8(tiny_server: Server, charset: str) -> None:
    headers = {"Content-Type": f"application/json; charset={charset}"}
    said = httpx.post(tiny_server.url + TEXT, content=b'{"prompt": "\xe9"}', headers=headers, timeout=60)
    assert error_of(said, 415)["code"] == "unsupported_charset"


def test_a_compressed_body_is_refused(tiny_server: Server) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    said = httpx.post(tiny_server.url + TEXT, content=b"\x1f\x8b", headers=headers, timeout=60)
    assert error_of(said, 415)["code"] == "unsupported_encoding"


def test_no_page_of_another_origin_is_let_in(tiny_server: Server) -> None:
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    said = httpx.options(tiny_server.url + CHAT, headers=asked)
    assert said.status_code == 405
    assert not any(name.startswith("access-control") for name in said.headers)
    rebound = httpx.get(tiny_server.url + "/v1/models", headers={"Host": "evil.example"})
    assert error_of(rebound, 403)["code"] == "invalid_host"


def test_hosts_and_origins_and_keys_by_flag(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# for everybody\n\n  first  \nsecond\n")
    flags = ["--allowed-hosts", "model.example", "--cors-origins", "http://ours.example", "--api-key-file", str(keys)]
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    options = serve._options(parser.parse_args(flags))
    assert options.api_keys == ("first", "second")
    app = create_app(AsyncLLM(EngineArguments(shape="tiny", device="cpu")), options)

    async def work() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://model.example") as client:
            assert (await client.get("/health", headers={"Host": "127.0.0.1"})).status_code == 403
            assert (await client.get("/health")).json()["status"] == "starting"
            asked = {"Origin": "http://ours.example", "Access-Control-Request-Method": "POST"}
            asked["Access-Control-Request-Headers"] = "authorization, content-type"
            said = await client.options(CHAT, headers=asked)
            assert said.headers["access-control-allow-origin"] == "http://ours.example"
            said = await client.options(CHAT, headers={**asked, "Origin": "http://evil.example"})
            assert error_of(said, 400)["code"] == "cors_refused"
            assert "access-control-allow-origin" not in said.headers
            for key, status in (("first", 200), ("second", 200), ("# for everybody", 401)):
                said = await client.get("/openapi.json", headers={"Authorization": f"Bearer {key}"})
                assert said.status_code == status

    asyncio.run(work())


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (ServerOptions(), {"localhost", "127.0.0.1", "::1"}),
        (ServerOptions(host="127.0.0.2"), {"localhost", "127.0.0.1", "::1", "127.0.0.2"}),
        (ServerOptions(host="0.0.0.0"), set()),
        (ServerOptions(host="0.0.0.0", allowed_hosts=("a.example",)), {"a.example"}),
        (ServerOptions(allowed_hosts=("*",)), set()),
    ],
)
def test_which_hosts_are_let_in(options: ServerOptions, hosts: set[str]) -> None:
    assert set(options.hosts) == hosts


@pytest.mark.parametrize(
    ("options", "is_open"),
    [
        (ServerOptions(), False),
        (ServerOptions(host="::1"), False),
        (ServerOptions(host="0.0.0.0"), True),
        (ServerOptions(host="::"), True),
        (ServerOptions(host="gpu7"), True),
        (ServerOptions(host="0.0.0.0", api_keys=("key",)), False),
    ],
)
def test_a_server_that_others_reach_without_a_key_is_open(options: ServerOptions, is_open: bool) -> None:
    assert options.is_open is is_open


@pytest.mark.parametrize("origin", ["ok.example", "https://", "https://ok.example/", "https://ok.example/a", ""])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--shape", "tiny", "--port", "0", "--cors-origins", origin]) == 2
    assert "is not as browsers send it" in capsys.readouterr().err
    ServerOptions(cors_origins=("*", "null", "https://ok.example", "http://[::1]:8000", "chrome-extension://abc"))


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r\n")
    assert serve._keys(tmp_path / "keys") == ["first", "second"]


@pytest.mark.parametrize("content", ["", "\n \n", "# only a comment\n"])
def test_a_key_file_without_a_key_opens_nothing(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(content)
    assert main(["serve", "--shape", "tiny", "--port", "0", "--api-key-file", str(keys)]) == 2
    assert "there is no key in it" in capsys.readouterr().err


# -- what runs out ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_without_descriptors_still_answers_and_says_so(tiny_model: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96)); "
        "sys.argv[0] = 'phonograph'; runpy.run_module('phonograph', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "serve", "--model", str(tiny_model), *TINY_FLAGS]
    with serving(command=command) as server:
        flood = [connect(server) for _ in range(150)]
        try:
            for _ in range(3):
                assert server.get("/health").status_code == 200
            flood += [connect(server) for _ in range(150)]
            assert server.get("/health").status_code == 200
            for sock in flood[-40:]:  # what is refused lingers, and must not take the last descriptors either
                with contextlib.suppress(ConnectionError):
                    sock.sendall(b"no HTTP\r\n\r\n")
            flood += [connect(server) for _ in range(40)]
            assert server.get("/health").status_code == 200
            assert any("connections are open" in line for line in server.lines)
        finally:
            for sock in flood:
                sock.close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-", ">&-"])
def test_standard_streams_may_be_closed(tmp_path: Path, closed: str) -> None:
    """What is written goes nowhere, and above all not into a file that was opened since."""
    code = (
        "import os, sys; from phonograph.cli.main import main; "
        "assert main(['serve', '--shape', 'tiny', '--api-key-file', sys.argv[1]]) == 2; "
        "other = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY); assert other > 2, other; "
        "[stream.flush() for stream in (sys.stdout, sys.stderr)]; [os.fstat(n) for n in range(3)]"
    )
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    missing, other = tmp_path / "missing", tmp_path / "other"
    assert subprocess.run([*command, str(missing), str(other)], check=False, timeout=60).returncode == 0
    assert other.read_bytes() == b""


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", "2>&- >/dev/full", ">&- 2>/dev/full"])
def test_a_full_disk_or_a_closed_stream_ends_what_is_written_and_not_the_server(tiny_model: Path, streams: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    flags = ["--model", str(tiny_model), "--device", "cpu", "--max-seqs", "2", "--port", str(port)]
    command = [sys.executable, "-m", "phonograph", "serve", *flags]
    with subprocess.Popen(["sh", "-c", f'exec "$@" {streams}', "sh", *command]) as process:
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
            while True:
                assert process.poll() is None
                try:
                    if httpx.get(url + "/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert time.monotonic() < end
                time.sleep(0.1)
            time.sleep(0.3)
            said = httpx.post(url + CHAT, json={"messages": HELLO, **GREEDY}, timeout=60)
            assert said.status_code == 200
        finally:
            process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": -1}, r"port must be a whole number of at least 0 and at most 65535, found -1 \(int\)"),
        ({"port": 65536}, "port must be a whole number of at least 0 and at most 65535"),
        ({"max_queue": 1.5}, r"max_queue must be a whole number of at least 0, found 1\.5 \(float\)"),
        ({"max_body_bytes": 0}, "max_body_bytes must be a whole number of at least 1"),
        ({"max_connections": True}, r"max_connections must be a whole number of at least 1, found True \(bool\)"),
        ({"max_prompt_chars": 0}, "max_prompt_chars must be a whole number of at least 1"),
        ({"head_timeout": 0}, "head_timeout must be above 0 seconds, found 0"),
        ({"request_timeout": math.nan}, "request_timeout must be above 0 seconds, found nan"),
        ({"drain_timeout": "30"}, r"drain_timeout must be above 0 seconds, found '30' \(str\)"),
    ],
)
def test_options_that_no_server_can_keep_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=f"server options: {said}"):
        ServerOptions(**given)


def test_a_time_may_be_without_end() -> None:
    assert ServerOptions(drain_timeout=math.inf, request_timeout=None).drain_timeout == math.inf
