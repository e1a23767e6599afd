"""Ten thousand small requests, whole and streamed, some left in the middle: does memory stay where it is?"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import report
from serve import server

WINDOW = 64
"""Requests at a time."""

HEAD = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def request(port: int, number: int) -> int:
    """One request; the status, or 0 if this client left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    kind = number % 4
    body = {
        "prompt": [number % 250 + 1, number // 250 % 250, 7],
        "max_tokens": 2 + number % 7,
        "stream": kind in (0, 1),
    }
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + HEAD % len(data) + data)
    try:
        if kind == 3:  # nobody waits for this one
            return 0
        status = int((await reader.readline()).split()[1])
        if kind == 1:  # nor for the end of this one
            return status
        while line := await reader.readline():
            if b"[DONE]" in line or b'"usage"' in line:
                break
        return status
    finally:
        writer.close()


def resident(pid: int) -> float:
    """Megabytes of memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def processes(port: int) -> tuple[int, int]:
    """The front that listens there, and its core."""
    ours = [int(pid) for pid in Path("/proc/self/task").joinpath(str(_self()), "children").read_text().split()]
    front = ours[-1]
    core = int(Path(f"/proc/{front}/task/{front}/children").read_text().split()[0])
    return front, core


def _self() -> int:
    return int(Path("/proc/self").resolve().name)


async def soak(port: int, count: int, rounds: int) -> list[dict[str, Any]]:
    front, core = processes(port)
    samples: list[dict[str, Any]] = []
    for number in range(rounds):
        begin = time.perf_counter()
        first = number * count // rounds
        last = (number + 1) * count // rounds
        places = asyncio.Semaphore(WINDOW)

        async def one(number: int, places: asyncio.Semaphore = places) -> int:
            async with places:
                return await request(port, number)

        statuses = await asyncio.gather(*(one(number) for number in range(first, last)))
        assert set(statuses) <= {0, 200}, set(statuses)
        sample = {
            "requests": last,
            "front_mb": round(resident(front), 1),
            "core_mb": round(resident(core), 1),
            "requests_per_s": round((last - first) / (time.perf_counter() - begin), 1),
        }
        print(sample, flush=True)
        samples.append(sample)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    with server(["--shape", "tiny", "--device", "cpu"]) as port:
        samples = asyncio.run(soak(port, args.requests, args.rounds))
    half = samples[len(samples) // 2 - 1]
    growth = {name: round(samples[-1][name] - half[name], 1) for name in ("front_mb", "core_mb")}
    print(f"growth over the second half: {growth}")
    print(report.write("soak_cpu", {"samples": samples, "growth_of_second_half": growth}, args.out))


if __name__ == "__main__":
    main()
