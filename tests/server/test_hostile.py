"""Whatever bytes come: an answer below 500 within seconds, and a server that is as well as before."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest

from server.conftest import Server
from server.test_http import CHAT, HELLO, TEXT

LOCAL = b"Host: localhost\r\n"
TYPED = LOCAL + b"Content-Type: application/json\r\n"


def post(path: str, body: object, more: bytes = b"") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), TYPED + more, len(data)) + data


def text(**fields: Any) -> bytes:
    return post(TEXT, {"prompt": "x", "max_tokens": 2, **fields})


def chat(**fields: Any) -> bytes:
    return post(CHAT, {"messages": HELLO, "max_tokens": 2, **fields})


def raw(line: bytes, headers: bytes = TYPED, body: bytes = b"") -> bytes:
    return line + b"\r\n" + headers + b"\r\n" + body


UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: abc\r\nSec-WebSocket-Version: 13\r\n"
PREFLIGHT = b"Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n"
HOSTILE: dict[str, bytes] = {
    "nothing that is HTTP": b"\x00\xff\x16\x03\x01garbage\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"x" * 200,
    "HTTP/9.9": raw(b"GET / HTTP/9.9"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "long URL": raw(b"GET /" + b"a" * 20_000 + b" HTTP/1.1"),
    "URL of a megabyte": raw(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1"),
    "URL of any bytes": raw(b"GET /v1/models/%00%ff%0a%0d%0aX-A:b HTTP/1.1"),
    "URL that climbs": raw(b"GET /page/../../etc/passwd HTTP/1.1"),
    "absolute URL": raw(b"GET http://localhost/health HTTP/1.1"),
    "query": raw(b"GET /status.json?since=" + b"9" * 5000 + b" HTTP/1.1"),
    "many headers": raw(b"GET / HTTP/1.1", TYPED + b"".join(b"a%d: b\r\n" % n for n in range(5000))),
    "header of 100 kB": raw(b"GET / HTTP/1.1", TYPED + b"x: " + b"a" * 100_000 + b"\r\n"),
    "header without an end": b"GET / HTTP/1.1\r\nx: " + b"a" * 4_000_000,
    "space before a colon": raw(b"GET /health HTTP/1.1", b"Host : localhost\r\n"),
    "NUL in a header": raw(b"GET /health HTTP/1.1", b"Host: local\x00host\r\n"),
    "folded header": raw(b"GET /health HTTP/1.1", b"Host: localhost\r\n  folded\r\n"),
    "length below 0": raw(b"POST /v1/completions HTTP/1.1", TYPED + b"Content-Length: -5\r\n"),
    "length beyond numbers": raw(b"POST /v1/completions HTTP/1.1", TYPED + b"Content-Length: " + b"9" * 30 + b"\r\n"),
    "length of 10 GB": raw(b"POST /v1/completions HTTP/1.1", TYPED + b"Content-Length: 9999999999\r\n"),
    "two lengths": raw(b"POST /v1/completions HTTP/1.1", TYPED + b"Content-Length: 5\r\nContent-Length: 6\r\n"),
    "length and chunks": raw(
        b"POST /v1/completions HTTP/1.1", TYPED + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"
    ),
    "chunk of no length": raw(b"POST /v1/completions HTTP/1.1", TYPED + b"Transfer-Encoding: chunked\r\n", b"zz\r\n"),
    "unknown coding": raw(
        b"POST /v1/completions HTTP/1.1", TYPED + b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"
    ),
    "websocket": raw(b"GET / HTTP/1.1", TYPED + UPGRADE),
    "websocket at a POST route": raw(b"GET /v1/completions HTTP/1.1", TYPED + UPGRADE),
    "h2c": post(TEXT, {"prompt": "x"}, b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"),
    "CONNECT": raw(b"CONNECT evil.example:80 HTTP/1.1"),
    "OPTIONS *": raw(b"OPTIONS * HTTP/1.1"),
    "preflight": raw(b"OPTIONS /v1/completions HTTP/1.1", TYPED + PREFLIGHT),
    "TRACE": raw(b"TRACE / HTTP/1.1"),
    "unknown method": raw(b"BREW / HTTP/1.1"),
    "HEAD": raw(b"HEAD /health HTTP/1.1"),
    "no host": raw(b"GET /health HTTP/1.1", b""),
    "another host": raw(b"GET /health HTTP/1.1", b"Host: evil.example\r\n"),
    "form": text().replace(b"application/json", b"application/x-www-form-urlencoded"),
    "gzip": post(TEXT, b"\x1f\x8b", b"Content-Encoding: gzip\r\n"),
    "unknown expectation": post(TEXT, {"prompt": "x", "max_tokens": 2}, b"Expect: wonders\r\n"),
    "GET with half a body": raw(b"GET /health HTTP/1.1", TYPED + b"Content-Length: 1000\r\n", b"xx"),
    "half a surrogate": post(TEXT, b'{"prompt":"\\ud83d"}'),
    "number beyond floats": post(TEXT, b'{"prompt":"x","temperature":1e999}'),
    "number of 100,000 digits": post(TEXT, b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}"),
    "float of 100,000 digits": post(TEXT, b'{"prompt":"x","temperature":1' + b"0" * 100_000 + b"}"),
    "name of 100,000 characters": post(TEXT, b'{"prompt":"x","' + b"q" * 100_000 + b'":1}'),
    "the same name again": post(TEXT, b'{"prompt":"x","prompt":[1],"prompt":5}'),
    "deep lists": post(TEXT, b'{"prompt":"x","metadata":{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}}"),
    "escapes": post(TEXT, b'{"prompt":"' + b'\\\\\\"' * 20_000 + b'","user":"\\\\"}'),
    "long stop strings": text(n=128, stop=["a" * 50_000] * 3),
    "stop strings at the limit": text(n=8, stop=["a" * 1023 + chr(65 + n) for n in range(16)]),
    "many choices": text(guided_choice=[str(n) for n in range(20_000)]),
    "choices at the limit": text(guided_choice=[f"{n:08}" for n in range(1024)]),
    "optional properties": text(guided_json={"type": "object", "properties": {f"p{n}": {} for n in range(3000)}}),
    "pattern of patterns": text(guided_regex="((a{1,1000}){1,1000}){1,1000}"),
    "nested pattern": text(guided_regex="(" * 5000 + "a" + ")" * 5000),
    "pattern that nothing matches": text(guided_regex=r"[^\s\S]"),
    "grammar without an end": text(guided_grammar='start: a\na: "x" a'),
    "schema that refers to itself": text(guided_json={"$ref": "#"}),
    "schema from elsewhere": text(guided_json={"$ref": "file:///etc/passwd"}),
    "names that the template does not read": chat(chat_template_kwargs={"messages": [], "x": 1}),
    "template in a message": post(CHAT, {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}], "max_tokens": 2}),
    "tool calls of any form": post(
        CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": 5}]}], "max_tokens": 2}
    ),
    "tools of any form": chat(tools=[{"type": "function", "function": {"name": "x" * 10_000, "parameters": [[]]}}]),
    "all logprobs": chat(n=128, logprobs=True, top_logprobs=20, max_tokens=512),
    "unknown token": text(logit_bias={"4000000000": 1}),
    "stop tokens": text(stop_token_ids=[2**40]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_client_gets_an_answer(tiny_server: Server, name: str) -> None:
    host, port = tiny_server.url.removeprefix("http://").split(":")
    begin = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        with suppress(ConnectionError):
            sock.sendall(HOSTILE[name])
        found = b""
        with suppress(ConnectionError):
            while b"\r\n\r\n" not in found and (piece := sock.recv(65536)):
                found += piece
    assert found.startswith(b"HTTP/1.1 "), found
    assert 200 <= int(found[9:12]) < 500, found
    assert time.monotonic() - begin < 10
    assert tiny_server.get("/health").status_code == 200
