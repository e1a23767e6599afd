"""The loop of the engine core: grammars compiled beside it, the heartbeat of an idle device, and its log."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from phonograph import CoreError, RequestError
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.process import core_loop
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.process.channel import Channel, frame
from phonograph.engine.process.core_loop import CoreLoop
from phonograph.engine.process.messages import (
    Add,
    Cancel,
    CheckIntegrity,
    FromCore,
    IntegrityReport,
    Logged,
    Output,
    Shutdown,
    StepOutput,
    ToCore,
)
from phonograph.engine.requests.request import FinishReason, GrammarSpec, Request, SamplingParams

ARGUMENTS = EngineArguments(
    shape="tiny",
    device="cpu",
    options=EngineOptions(max_seqs=4, max_tokens=32, max_len=64, page_size=8, cache_tokens=256),
)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
SLOW = replace(GREEDY, grammar=GrammarSpec("lark", "slow"))
WRONG = replace(GREEDY, grammar=GrammarSpec("lark", "wrong"))
PANIC = replace(GREEDY, grammar=GrammarSpec("lark", "panic"))
INTERRUPTED = replace(GREEDY, grammar=GrammarSpec("lark", "interrupted"))


class Sevens:
    """Nothing but the token 7 may come."""

    def mask(self) -> Any:
        allowed = np.zeros(256, dtype=bool)
        allowed[7] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token == 7


class Panic(BaseException):
    """As that of a Rust library."""


class SlowGrammars:
    """Takes until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def prepare(self) -> None:
        """There is nothing to share."""

    def start(self, spec: GrammarSpec, count: int = 1) -> list[Sevens]:
        if spec.text == "wrong":
            raise RequestError("the grammar makes no sense")
        if spec.text == "panic":
            raise Panic("no Exception")
        if spec.text == "interrupted":
            raise KeyboardInterrupt
        assert self.let_go.wait(60)
        return [Sevens() for _ in range(count)]


class Front:
    """The other end of a core loop that runs in a thread."""

    def __init__(self, core: EngineCore[Executor], ours: socket.socket, theirs: socket.socket) -> None:
        self._channel = Channel(ours)
        self._thread = threading.Thread(target=CoreLoop(core, Channel(theirs)).run)
        self._thread.start()
        self._asked: list[str] = []
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        self.heard: list[Output] = []
        self.checked: list[IntegrityReport] = []

    def tell(self, *messages: ToCore) -> None:
        self._channel.sock.sendall(frame(msgspec.msgpack.encode(messages)))

    def ask(self, name: str, params: SamplingParams, seconds: float | None = None) -> None:
        now = time.monotonic()
        self._asked.append(name)
        self.tell(
            Add(Request(name, (3, 4, 5), params, arrival=now, deadline=None if seconds is None else now + seconds))
        )

    def receive(self, seconds: float) -> list[bytes]:
        return self._channel.receive(wait=seconds)

    def listen(self) -> None:
        arrived = self.receive(5)
        assert arrived or self._thread.is_alive(), "the loop has ended; its exception is among the warnings"
        for data in arrived:
            match self._decode(data):
                case StepOutput(outputs):
                    self.heard += outputs
                case IntegrityReport() as found:
                    self.checked.append(found)

    def end_of(self, name: str) -> Output:
        while True:
            for output in self.heard:
                if output.request_id == name and output.finish is not None:
                    return output
            self.listen()

    def check(self) -> IntegrityReport:
        self.checked.clear()
        self.tell(CheckIntegrity())
        while not self.checked:
            self.listen()
        return self.checked[0]

    def end(self) -> None:
        """Leaves nothing behind: the next loop has the same scheduler."""
        self.tell(*(Cancel(name) for name in self._asked))
        while (counts := self.check().counts).running or counts.waiting:
            pass
        self.check()  # a turn later, the last step is committed
        self.tell(Shutdown())
        self._thread.join(60)
        assert not self._thread.is_alive()

    def tokens(self, name: str) -> list[int]:
        self.end_of(name)
        return [token for output in self.heard if output.request_id == name for token in output.tokens]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return ARGUMENTS.open()


@pytest.fixture
def grammars() -> SlowGrammars:
    return SlowGrammars()


@pytest.fixture
def front(llm: LLM, grammars: SlowGrammars) -> Iterator[Front]:
    ours, theirs = socket.socketpair()
    core = EngineCore(llm.core.scheduler, llm.executor, grammars)
    with ours, theirs:
        found = Front(core, ours, theirs)
        yield found
        grammars.let_go.set()
        found.end()


def test_who_has_no_grammar_does_not_wait_for_one_to_be_compiled(front: Front, grammars: SlowGrammars) -> None:
    front.ask("slow", SLOW)
    front.ask("plain", GREEDY)
    assert len(front.tokens("plain")) == 5
    assert not any(output.request_id == "slow" for output in front.heard)
    grammars.let_go.set()
    assert front.tokens("slow") == [7] * 5


def test_a_request_that_is_given_up_while_its_grammar_is_compiled_leaves_nothing(
    front: Front, grammars: SlowGrammars
) -> None:
    front.ask("slow", SLOW)
    front.tell(Cancel("slow"))
    grammars.let_go.set()
    front.ask("plain", GREEDY)
    front.end_of("plain")
    found = front.check()
    assert not found.problem
    assert found.counts.running == 0
    assert not any(output.request_id == "slow" for output in front.heard)


def test_a_grammar_that_makes_no_sense_is_refused(front: Front) -> None:
    front.ask("wrong", WRONG)
    refusal = front.end_of("wrong")
    assert (refusal.refused, refusal.error) == (True, "the grammar makes no sense")


def test_a_compiler_that_breaks_breaks_nothing_else(front: Front) -> None:
    front.ask("panic", PANIC)
    front.ask("plain", GREEDY)
    said = front.end_of("panic")
    assert "can't be compiled" in said.error
    assert "no Exception" not in said.error  # nothing of the inside
    assert said.field == "grammar"
    assert len(front.tokens("plain")) == 5


def test_a_ctrl_c_while_a_grammar_is_compiled_is_no_refusal(llm: LLM, grammars: SlowGrammars) -> None:
    core = EngineCore(llm.core.scheduler, llm.executor, grammars)
    with pytest.raises(KeyboardInterrupt):
        core.add(Request("interrupted", (3, 4, 5), INTERRUPTED, arrival=time.monotonic()))
    assert not core.scheduler.counts.waiting


def test_a_deadline_holds_while_a_grammar_is_compiled(front: Front) -> None:
    front.ask("late", replace(SLOW, n=2), seconds=0.05)
    front.end_of("late")
    ends = [(output.index, output.finish) for output in front.heard if output.request_id == "late"]
    while len(ends) < 2:
        front.listen()
        ends = [(output.index, output.finish) for output in front.heard if output.request_id == "late"]
    assert ends == [(0, FinishReason.DEADLINE), (1, FinishReason.DEADLINE)]


def test_who_compiles_and_does_nothing_else_is_quiet(front: Front) -> None:
    front.ask("slow", SLOW)
    end, count = time.monotonic() + 0.6, 0
    while time.monotonic() < end:
        count += len(front.receive(0.05))
    assert count <= 6  # figures four times a second, and those from before


def test_more_descriptors_than_select_takes(llm: LLM) -> None:
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(frame(b"here"))
            assert theirs.fileno() > 1024
            assert Channel(theirs).receive_one() == b"here"
    finally:
        for number in opened:
            os.close(number)


def test_the_log_takes_what_is_no_text() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handler = core_loop._ToFront(Channel(theirs))
        handler.handle(logging.LogRecord("x", logging.WARNING, "", 0, "a path: %s", ("\udcff",), None))
        found = msgspec.msgpack.decode(Channel(ours).receive_one(), type=FromCore)
    assert found == Logged(logging.WARNING, "a path: \\udcff")


def test_an_idle_device_is_asked_whether_it_is_there(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_loop, "HEARTBEAT_SECONDS", 0.01)
    stats = llm.executor.runners["idle"].stats
    before = stats.eager.total()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        front = Front(llm.core, ours, theirs)
        end = time.monotonic() + 60
        while stats.eager.total() < before + 3 and time.monotonic() < end:
            time.sleep(0.01)
        front.ask("plain", GREEDY)
        asked_between = front.tokens("plain")
        front.end()
    assert stats.eager.total() >= before + 3
    assert asked_between == llm.generate([[3, 4, 5]], GREEDY)[0].tokens


def test_what_the_core_logs_is_in_the_log_of_the_front(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(ARGUMENTS, asked=5)  # type: ignore[arg-type]
    with pytest.raises(CoreError):
        asyncio.run(AsyncLLM(broken).start())
    assert any(text.startswith("core: the engine core can't continue\nTraceback") for text in caplog.messages)
