"""Start, death, resurrection and end of a server: whoever waits gets an answer, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phonograph.cli.main import main
from phonograph.engine.llm import LLM
from phonograph.engine.requests.request import SamplingParams
from server.clients import Connection
from server.conftest import TINY_FLAGS, Server, serving

TEXT = "/v1/completions"
LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ends(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_alive(pid)


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


async def begun(server: Server, count: int, **changes: Any) -> list[Connection]:
    """Streams that have got their first event."""
    opened = [
        await Connection.open(port_of(server), TEXT, {"prompt": f"number {n}", "stream": True, **LONG, **changes})
        for n in range(count)
    ]
    for connection in opened:
        assert await connection.head() == 200
    return opened


def test_the_screen_says_what_is_served_and_what_to_try(tiny_server: Server) -> None:
    shown = "\n".join(tiny_server.lines)
    assert "model     tiny: LlamaForCausalLM, 2 layers, float32" in shown
    assert "decode.backend   disabled  measured" in shown
    assert "8 sequences of at most 512 tokens at a time" in shown
    line = next(line for line in tiny_server.lines if line.startswith("try "))
    if shutil.which("curl") is not None:
        found = subprocess.run(line.removeprefix("try"), shell=True, check=True, capture_output=True, timeout=60)
        assert b'"object":"chat.completion"' in found.stdout


def test_a_core_that_is_killed_is_told_of_and_comes_back(tiny_model: Path, offline: LLM) -> None:
    async def load(server: Server) -> None:
        streams = await begun(server, 4)
        whole = await Connection.open(port_of(server), TEXT, {"prompt": "x", **LONG})
        os.kill(server.core_pid, signal.SIGKILL)
        for connection in streams:
            *_, last = [event async for event in connection.events()]
            assert last["error"]["code"] == "core_down"
            assert "SIGKILL" in last["error"]["message"]
            await connection.close()
        error = (await whole.body())["error"]
        assert (whole.status, error["code"]) == (503, "core_down")

    with serving("--model", str(tiny_model), *TINY_FLAGS, "--drain-timeout", "600") as server:
        first = server.core_pid
        asyncio.run(load(server))
        down = server.get("/health")
        assert down.status_code == 503
        assert "SIGKILL" in down.json()["reason"]
        assert server.post(TEXT, {"prompt": "x"}).status_code == 503
        server.waits_until("/health", 200)
        assert server.core_pid != first
        body = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 12}
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        assert server.post(TEXT, body).json()["choices"][0]["text"] == offline.generate("abc", params)[0].text
        _a_second_signal_does_not_wait(server)


def _a_second_signal_does_not_wait(server: Server) -> None:
    async def load() -> None:
        (stream,) = await begun(server, 1)
        server.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(server.waits_until, "/health", 503)
        server.process.send_signal(signal.SIGINT)
        *_, last = [event async for event in stream.events()]
        # Without its end, or with it, if it was quicker than the signals.
        assert last.get("error", {}).get("code") == "core_down" or last["choices"][0]["finish_reason"] == "length"

    core = server.core_pid
    asyncio.run(load())
    assert server.process.wait(30) == 0
    assert ends(core)


def test_on_sigterm_what_runs_is_finished_and_what_comes_is_refused(tiny_model: Path, offline: LLM) -> None:
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    expected = [done.text for done in offline.generate([f"number {n}" for n in range(12)], params)]

    async def load(server: Server) -> list[str]:
        streams = await begun(server, 8)
        # These wait for a place.
        streams += [
            await Connection.open(port_of(server), TEXT, {"prompt": f"number {n}", "stream": True, **LONG})
            for n in range(8, 12)
        ]
        await asyncio.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.waits_until, "/health", 503)
        refused = await Connection.open(port_of(server), TEXT, {"prompt": "late"})
        error = (await refused.body())["error"]
        assert (refused.status, error["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        found = []
        for stream in streams:
            found.append("".join([event["choices"][0]["text"] async for event in stream.events()]))
            await stream.close()
        return found

    with serving("--model", str(tiny_model), *TINY_FLAGS) as server:
        core = server.core_pid
        assert asyncio.run(load(server)) == expected
        assert server.process.wait(30) == 0
        assert ends(core)
        assert any("finishing 12 sequences" in line for line in server.lines)


def test_a_core_that_is_lost_for_good_ends_the_server(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), *TINY_FLAGS, "--max-restarts", "0") as server:
        os.kill(server.core_pid, signal.SIGKILL)
        assert server.process.wait(30) == 2
        time.sleep(0.1)
        said = [line for line in server.lines if line.startswith("phonograph: ")]
        assert len(said) == 1
        assert "SIGKILL" in said[0]
        assert "it will not be restarted. The server stops." in said[0]


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--shape", "tiny", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"listening on 127.0.0.1:{port}" in said
    assert "Choose another --host or --port" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/nowhere"], "does not exist"),
        (["--shape", "gpt-9"], "known: qwen3-8b"),
        (["--api-key", ""], "an API key is empty"),
        (["--api-key-file", "/nowhere"], "reading /nowhere"),
        (["--request-timeout", "0"], "above 0 seconds"),
        (["--max-body-bytes", "0"], "at least 1"),
    ],
)
def test_bad_flags_say_what_to_do(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_core_that_can_not_start_ends_the_server() -> None:
    flags = ["--shape", "tiny", "--device", "cpu", "--max-len", "1", "--port", "0"]
    command = [sys.executable, "-m", "phonograph", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "phonograph: limits: max_len must be a whole number of at least 2, found 1 (int)." in done.stderr
    assert "Traceback" not in done.stderr
