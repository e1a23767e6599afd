"""What HTTP costs: the same prompts offline and streamed from `phonograph serve`, in turns, on one machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import report

from phonograph.bench.report import machine
from phonograph.bench.workloads import w1
from phonograph.engine.options import EngineOptions
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.requests.request import SamplingParams

Prompts = list[list[int]]

HEAD = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Stream(asyncio.Protocol):
    """One streamed request: counts bytes and chunks, and keeps the end, where the usage is."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end = b""
        self.num_chunks = 0
        self.first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.first = self.first or time.perf_counter()
        self.num_chunks += 1
        self.end = (self.end + data)[-1000:]
        if b"[DONE]" in self.end and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the server left: {self.end.decode()}"))


async def over_http(port: int, prompts: Prompts, new_tokens: int) -> dict[str, float]:
    """All prompts at once; the seconds until the last answer is complete."""
    loop = asyncio.get_running_loop()
    requests = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        requests.append(b"POST /v1/completions HTTP/1.1\r\n" + HEAD % len(data) + data)
    begin = time.perf_counter()
    opened = [await loop.create_connection(partial(Stream, request), "127.0.0.1", port) for request in requests]
    streams = [stream for _, stream in opened]
    await asyncio.gather(*(stream.done for stream in streams))
    seconds = time.perf_counter() - begin
    tokens = sum(int(re.findall(rb'"completion_tokens":(\d+)', stream.end)[-1]) for stream in streams)
    assert tokens == len(prompts) * new_tokens, tokens
    first = statistics.median(stream.first - begin for stream in streams)
    return {"seconds": seconds, "median_first_token_s": first, "chunks": sum(s.num_chunks for s in streams)}


@contextmanager
def server(flags: list[str]) -> Iterator[int]:
    """A server in a process of its own; its port."""
    command = [sys.executable, "-m", "phonograph", "serve", "--port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if line.startswith("serving"))
            yield int(re.findall(r"http://\S+:(\d+)", line)[0])
        finally:
            process.terminate()


def workload(name: str) -> tuple[Prompts, int]:
    """Prompts and new tokens: a steady batch of 16, or 256 prompts of 32 to 511 tokens."""
    if name == "batch16":
        return [list(range(100 + n, 132 + n)) for n in range(16)], 128
    batch = w1()
    return list(batch.prompts), batch.new_tokens


def measure(args: argparse.Namespace) -> dict[str, Any]:
    prompts, new_tokens = workload(args.workload)
    new_tokens = args.tokens or new_tokens
    # Two engines share the device's memory, the server's comes first; every round computes its prompts anew.
    arguments = EngineArguments(shape=args.shape, options=EngineOptions(max_seqs=args.max_seqs, prefix_cache=False))
    flags = ["--max-seqs", str(args.max_seqs), "--memory", "0.45", "--no-prefix-cache"]
    flags += ["--shape", args.shape] if args.shape else []
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    offline: list[float] = []
    http: list[dict[str, float]] = []
    with server(flags) as port:
        llm = arguments.open()
        asyncio.run(over_http(port, prompts[:4], 8))
        llm.generate(prompts[:4], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        for _ in range(args.rounds):
            begin = time.perf_counter()
            llm.generate(prompts, params)
            offline.append(time.perf_counter() - begin)
            http.append(asyncio.run(over_http(port, prompts, new_tokens)))
            print(f"offline {offline[-1]:.2f} s, over HTTP {http[-1]['seconds']:.2f} s", flush=True)
    total = len(prompts) * new_tokens
    ratios = [there / here["seconds"] for there, here in zip(offline, http, strict=True)]
    return {
        "workload": args.workload,
        "requests": len(prompts),
        "new_tokens": new_tokens,
        "offline_tokens_per_s": [round(total / seconds, 1) for seconds in offline],
        "http_tokens_per_s": [round(total / one["seconds"], 1) for one in http],
        "ratio_of_each_round": [round(ratio, 3) for ratio in ratios],
        "ratio_of_medians": round(statistics.median(offline) / statistics.median(one["seconds"] for one in http), 3),
        "ratio_of_best": round(min(offline) / min(one["seconds"] for one in http), 3),
        "median_first_token_s": round(statistics.median(one["median_first_token_s"] for one in http), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    parser.add_argument("--workload", choices=("batch16", "w1"), default="batch16")
    parser.add_argument("--shape", help="random weights instead of the default model, e.g. qwen3-8b")
    parser.add_argument("--max-seqs", type=int, default=16)
    parser.add_argument("--tokens", type=int, help="new tokens of each request, in place of the workload's")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures = measure(args)
    for name, value in figures.items():
        print(f"{name:<24} {value}")
    device = "cpu" if machine()["accelerator"] == "CPU only" else "cuda"
    print(report.write(f"serve_{device}", figures, args.out))


if __name__ == "__main__":
    main()
