"""Hostile clients against a server: what /health and somebody else's stream see of them.

A neighbour streams tokens and a prober asks /health all the time, alone and under each attack in turn: both for as long
in all, since the largest of many gaps grows with the time.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import report
import serve

from phonograph.bench.figures import percentile
from phonograph.bench.report import machine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
WORK = {
    *("all stop strings that may be", "1,000 lists of ids", "128 choices with logprobs", "128 streams with logprobs"),
    *("the longest prompt, scored", "the longest prompt, scored in a stream", "128 scored choices"),
    *("all tokens that may be allowed", "all bad words that may be"),
}
"""What the engine computes in full: a neighbour shares its steps with them, as with any load."""
LOCAL = b"Host: localhost\r\nContent-Type: application/json\r\n"


def post(path: str, body: object, headers: bytes = LOCAL) -> bytes:
    """A request as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), headers, len(data)) + data


def calling(arguments: str) -> dict[str, object]:
    """A message of an assistant that calls a function."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def bodies(max_chars: int, max_len: int) -> dict[str, bytes]:
    """Requests that cost much, or once did; some are refused, some are as large as a request may be."""
    few = {"max_tokens": 4}
    numbers = random.Random(3)
    dense = "".join(chr(numbers.randrange(33, 0x2000)) for _ in range(max_chars))  # several tokens a character
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    prompt = [n % 250 for n in range(max_len - 1)]
    scored = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 20}
    return {
        "stop strings of 500,000 characters": post(TEXT, {"prompt": "x", "n": 128, "stop": ["a" * 500_000] * 4}),
        "all stop strings that may be": post(
            TEXT, {"prompt": "x", "n": 128, **few, "stop": ["a" * 1023 + chr(65 + n) for n in range(16)]}
        ),
        "prompt of 7.5 MB": post(TEXT, {"prompt": "no " * 2_500_000}),
        "tokenize 7.5 MB": post("/tokenize", {"prompt": "no " * 2_500_000}),
        "longest prompt that may be": post(TEXT, {"prompt": dense, **few}),
        "tokenize the longest": post("/tokenize", {"prompt": dense}),
        "1,000 prompts of 4 kB": post(TEXT, {"prompt": ["some words " * 372] * 1000, **few}),
        "1,000 lists of ids": post(TEXT, {"prompt": [[1] * 130] * 1000, **few}),
        "100,000 messages": post(CHAT, {"messages": [HELLO] * 100_000}),
        "2,048 messages": post(CHAT, {"messages": [HELLO] * 2048, **few}),
        "a message of special tokens": post(CHAT, {"messages": [{**HELLO, "content": "<|end|>" * (max_chars // 8)}]}),
        "response to 2,048 messages": post("/v1/responses", {"input": [HELLO] * 2048, "max_output_tokens": 4}),
        "response to 10,000 parts": post(
            "/v1/responses", {"input": [{**HELLO, "content": [{"type": "input_text", "text": "a"}] * 10_000}]}
        ),
        "2 million lists": post(TEXT, b'{"prompt":"x","metadata":{"a":[' + b"[]," * 2_000_000 + b"1]}}"),
        "most lists that may be": post(TEXT, b'{"prompt":"x","metadata":{"a":[' + b"[]," * 32_000 + b"1]}}"),
        "262,000 numbers near the largest": post(
            TEXT, b'{"prompt":"x","metadata":{"a":[' + b"9e306," * 262_000 + b"1]}}"
        ),
        "most numbers near the largest": post(
            TEXT, b'{"prompt":"x","metadata":{"a":[' + b"9e306," * 64 + b"1.5," * 4096 + b"1]}}"
        ),
        "numbers of many digits": post(
            TEXT, b'{"prompt":"x","metadata":{"a":[' + (b"9" * 300 + b",") * 24_000 + b"1]}}"
        ),
        "numbers in the arguments of a call": post(
            CHAT, {"messages": [calling("[" + "9e306," * 10_000 + "1]")], **few}
        ),
        "4 million ids": post(TEXT, b'{"prompt":[' + b"1," * 4_000_000 + b"1]}"),
        "detokenize 32,000 ids": post("/detokenize", {"tokens": [1] * 32_000}),
        "choice of 100,000": post(TEXT, {"prompt": "x", "guided_choice": [str(n) for n in range(100_000)]}),
        "choice of 1,024": post(TEXT, {"prompt": "x", **few, "guided_choice": [f"{n:08}" for n in range(1024)]}),
        "1,000 optional properties": post(TEXT, {"prompt": "x", **few, "guided_json": schema}),
        "128 choices with logprobs": post(
            CHAT, {"messages": [HELLO], "n": 128, "logprobs": True, "top_logprobs": 20, **few}
        ),
        "128 streams with logprobs": post(
            CHAT, {"messages": [HELLO], "n": 128, "logprobs": True, "top_logprobs": 20, **few, "stream": True}
        ),
        "the longest prompt, scored": post(TEXT, {**scored, "prompt_logprobs": 20}),
        "the longest prompt, scored in a stream": post(TEXT, {**scored, "stream": True}),
        "128 scored choices": post(TEXT, {**scored, "prompt": [1] * 40, "n": 128, "stream": True}),
        "all tokens that may be allowed": post(
            TEXT, {"prompt": "x", **few, "allowed_token_ids": [n % 250 for n in range(32 << 10)]}
        ),
        "all bad words that may be": post(
            TEXT, {"prompt": "x", **few, "n": 128, "bad_words": [chr(33 + n % 90) * 255 + "y" for n in range(128)]}
        ),
        "5,000 headers": b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % n for n in range(5000)) + b"\r\n",
        "headers of 4 MB": b"GET / HTTP/1.1\r\nx: " + b"a" * 4_000_000,
        "5,000 requests at once": (b"GET /health HTTP/1.1\r\n" + LOCAL + b"\r\n") * 5000,
        "chunks of one byte": b"POST /v1/completions HTTP/1.1\r\n"
        + LOCAL
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nx\r\n" * 200_000,
        "metrics and status": b"GET /metrics HTTP/1.1\r\n"
        + LOCAL
        + b"\r\nGET /status.json HTTP/1.1\r\n"
        + LOCAL
        + b"\r\n",
    }


def send(port: int, data: bytes, seconds: float = 60) -> int:
    """The status of the answer; 0 where the connection ended without one, or was left after some time."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as sock:
        with suppress(ConnectionError, TimeoutError):
            sock.sendall(data)
        found = b""
        with suppress(ConnectionError, TimeoutError):
            while piece := sock.recv(65536):
                found += piece[: 1 << 16] if not found else b""
                if b"\r\n\r\n" in found and b"chunked" not in found:
                    break
                if b"[DONE]" in piece:
                    break
    return int(found[9:12]) if found.startswith(b"HTTP/1.1 ") else 0


@dataclass
class Watched:
    """What a bystander saw, in seconds."""

    health: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """In milliseconds."""
        health, gaps = self.health or [0.0], self.gaps or [0.0]
        return {
            "health_p99_ms": round(1000 * percentile(health, 99), 1),
            "health_max_ms": round(1000 * max(health), 1),
            "largest_gap_ms": round(1000 * max(gaps), 1),
            "tokens": len(gaps),
        }


class Bystanders:
    """A prober and a neighbour, each in a thread of its own, for as long as they are entered."""

    def __init__(self, port: int, tokens: int) -> None:
        self._port = port
        self._tokens = tokens
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._probe, self._stream)]
        self.seen = Watched()

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def new(self) -> Watched:
        """Begin to note anew."""
        self.seen = Watched()
        return self.seen

    def _probe(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as sock:
            while not self._is_over.wait(0.02):
                begin = time.perf_counter()
                sock.sendall(b"GET /health HTTP/1.1\r\n" + LOCAL + b"\r\n")
                found = b""
                while not found.endswith(b"}"):
                    found += sock.recv(4096)
                assert found.startswith(b"HTTP/1.1 200"), found
                self.seen.health.append(time.perf_counter() - begin)

    def _stream(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        while not self._is_over.is_set():
            with socket.create_connection(("127.0.0.1", self._port), timeout=60) as sock:
                sock.sendall(post(TEXT, body))
                last, found = 0.0, b""
                while b"[DONE]" not in found and not self._is_over.is_set():
                    found = found[-8:] + sock.recv(65536)
                    now = time.perf_counter()
                    if last:
                        self.seen.gaps.append(now - last)
                    last = now


@contextmanager
def trickled(port: int, count: int) -> Iterator[None]:
    """Connections whose headers never end."""
    opened = []
    try:
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", port), timeout=60)
            sock.sendall(b"GET / HTTP/1.1\r\nx: ")
            opened.append(sock)
        yield
    finally:
        for sock in opened:
            sock.close()


def under(attack: Callable[[], int], people: Bystanders, seconds: float) -> dict[str, Any]:
    """What the bystanders see while two clients repeat the attack."""
    seen, statuses, end = people.new(), Counter[int](), time.monotonic() + seconds

    def repeat() -> None:
        while time.monotonic() < end:
            statuses[attack()] += 1

    attackers = [threading.Thread(target=repeat) for _ in range(2)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    return {**seen.figures(), "statuses": {str(status): count for status, count in sorted(statuses.items())}}


def measure(port: int, seconds: float, max_chars: int, max_len: int) -> dict[str, Any]:
    """All attacks, one after the other."""
    found: dict[str, Any] = {}
    with Bystanders(port, min(200, max_len // 2)) as people:
        time.sleep(1)
        alone = Watched()
        # What the engine computes comes last: a long step of it would be felt by whoever comes next.
        for name, data in sorted(bodies(max_chars, max_len).items(), key=lambda one: one[0] in WORK):
            if name not in WORK:
                people.new()
                time.sleep(0.5)  # what the attack before it left is done by then
                people.seen = alone
                time.sleep(seconds)
            found[name] = under(partial(send, port, data, seconds), people, seconds)
            print(f"{name:<36} {found[name]}", flush=True)
        with trickled(port, 300):
            found["300 trickled connections"] = under(partial(send, port, b"GET / HTTP/1.1\r\n", 0.1), people, seconds)
        print(f"{'300 trickled connections':<36} {found['300 trickled connections']}", flush=True)
    found["nobody"] = alone.figures()
    print(f"{'nobody':<36} {found['nobody']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    parser.add_argument("--model", help="a folder or a GGUF file, in place of the default model")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each attack lasts")
    parser.add_argument("--max-len", type=int, default=2048)
    args = parser.parse_args()
    flags = ["--max-seqs", "16", "--max-len", str(args.max_len), *(["--model", args.model] if args.model else [])]
    with serve.server(flags) as port:
        max_chars = min(400_000, 81 * args.max_len)
        found = measure(port, args.seconds, max_chars, args.max_len)
    limit = 3 * found["nobody"]["largest_gap_ms"]
    worst = max(found.values(), key=lambda one: one["health_p99_ms"])["health_p99_ms"]
    late = [name for name, one in found.items() if name not in WORK and one["largest_gap_ms"] > limit]
    print(f"worst health p99 {worst} ms; gaps above {limit:.0f} ms under: {', '.join(late) or 'nothing'}")
    device = "cpu" if machine()["accelerator"] == "CPU only" else "cuda"
    print(report.write(f"attacks_{device}", {"seconds": args.seconds, "attacks": found}, args.out))


if __name__ == "__main__":
    main()
