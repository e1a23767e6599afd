"""What the tests of the server share: a tiny model, and servers as processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch

from phonograph.engine.checkpoints import default_model
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.errors import CheckpointError
from server import tiny

TINY_FLAGS = ("--device", "cpu", "--max-seqs", "8", "--port", "0", "--log-level", "info")


@dataclass
class Server:
    """A running `phonograph serve`."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)
    """What it has written."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def core_pid(self) -> int:
        """The core is the front's only child."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.post("/tokenize", {"prompt": text}).json()["tokens"]
        return found

    def waits_until(self, path: str, status: int, seconds: float = 60) -> httpx.Response:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.get(path)
            if found.status_code == status:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{path} gave {found.status_code} instead of {status} for {seconds} s: {found.text}")

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def serving(*flags: str, command: Sequence[str] = ()) -> Iterator[Server]:
    """Start a server, wait until its screen is whole, and end it after the test."""
    command = command or [sys.executable, "-m", "phonograph", "serve", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        server = Server(process, "")
        told = threading.Event()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                server.lines.append(line.rstrip("\n"))
                if found := re.match(r"serving +(http://\S+)", line):
                    server.url = found[1]
                elif line.startswith("try "):  # the last line of the screen
                    told.set()
            told.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            assert told.wait(120), server.lines
            assert server.url, "\n".join(server.lines)
            yield server
        finally:
            server.stop(signal.SIGKILL)


@pytest.fixture(scope="package", autouse=True)
def _one_thread_each() -> Iterator[None]:
    """What these tests start is tiny: further threads would only take turns with those of the other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield tiny.write(Path(folder) / "tiny")


@pytest.fixture(scope="session")
def offline(tiny_model: Path) -> LLM:
    """The same model in this process: what servers must equal."""
    return LLM(tiny_model, device="cpu", options=EngineOptions(max_seqs=32))


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with serving("--model", str(tiny_model), *TINY_FLAGS, "--max-queue", "300", "--max-body-bytes", "200000") as server:
        yield server


@pytest.fixture(scope="session")
def real_server() -> Iterator[Server]:
    """The default model."""
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    with serving("--device", "cpu", "--max-len", "512", "--port", "0") as server:
        yield server
