"""`phonograph chat` as a person meets it: keys, history, several lines, interrupts; and Ctrl-C early in any command."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phonograph.engine.checkpoints import default_model
from phonograph.errors import CheckpointError
from terminals import CTRL_C, CTRL_D, UP, Terminal, terminal

ANSWER = "The capital of France is Paris."
FLAGS = ("--device", "cpu", "--max-len", "512", "--verify", "off")


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def chat(home: Path) -> Iterator[Terminal]:
    with terminal("chat", *FLAGS, "--max-tokens", "400", home=home) as opened:
        opened.until("Type a message")
        opened.until("> ")
        yield opened


def test_a_conversation_with_commands(chat: Terminal, home: Path) -> None:
    chat.type("What is the capital of France?\n")
    chat.until(ANSWER)
    chat.until("> ")
    chat.type("\n")
    chat.until("> ")
    chat.type("/help\n")
    shown = chat.until("> ")
    assert "/explain" in shown
    assert "/clear" in shown
    chat.type("/explain\n")
    chat.until("KV cache: ")
    chat.until("> ")
    chat.type("/clear\n")
    chat.until("a new conversation")
    chat.type("/explane\n")
    chat.until("there is no command '/explane'")
    chat.type("/quit\n")
    assert chat.status() == 0
    kept = home / "phonograph" / "chat_history"
    assert "What is the capital of France?" in kept.read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.slow
def test_history_is_there_the_next_time(chat: Terminal, home: Path) -> None:
    chat.type("What is the capital of France?\n")
    chat.until(ANSWER)
    chat.until("> ")
    chat.type(CTRL_D)
    assert chat.status() == 0
    with terminal("chat", *FLAGS, home=home) as again:
        again.until("> ")
        again.type(UP + b"\n")
        again.until(ANSWER)
        again.type("/quit\n")
        assert again.status() == 0
    with terminal("chat", *FLAGS, "--no-history", home=home / "other") as without:
        without.until("> ")
        without.type("/quit\n")
        assert without.status() == 0
    assert not (home / "other").exists()


@pytest.mark.slow
def test_messages_of_several_lines(chat: Terminal) -> None:
    chat.type("What is the capital\\\n")
    chat.until("… ")
    chat.type("of France?\n")
    chat.until("Paris")
    chat.until("> ")
    chat.type('"""What is the capital\n')
    chat.until("… ")
    chat.type('of France?"""\n')
    chat.until("Paris")
    chat.until("> ")
    chat.type(CTRL_D)
    assert chat.status() == 0


def test_an_interrupt_stops_an_answer_and_not_the_program(chat: Terminal) -> None:
    chat.type("Write a long story about a whale, with many chapters.\n")
    chat.until("whale,", seconds=30)
    time.sleep(1.0)
    chat.type(CTRL_C)
    chat.until("(stopped)")
    chat.until("> ")
    chat.type("/clear\n")
    chat.until("> ")
    chat.type("What is the capital of France?\n")
    chat.until(ANSWER)
    chat.until("> ")
    chat.type("half a line")
    chat.until("half a line")
    chat.interrupt("> ")
    chat.interrupt("(Ctrl-C again, or Ctrl-D, quits)")
    chat.until("> ")
    chat.type(CTRL_C)
    assert chat.status(again=CTRL_C) == 0
    assert "Traceback" not in chat.screen


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.6, 2.5, 4.0])
@pytest.mark.parametrize(
    "command",
    [
        ("chat", *FLAGS),
        ("generate", "--prompt", "x", "--max-tokens", "400", *FLAGS),
        ("explain", "--trace", "--device", "emulated", "--max-len", "512"),
        ("verify", "--device", "emulated", "--max-len", "512"),
        ("serve", "--device", "emulated", "--max-len", "512", "--port", "0"),
    ],
    ids=lambda command: command[0] if isinstance(command, tuple) else None,
)
def test_an_early_interrupt_ends_quietly(command: tuple[str, ...], seconds: float, home: Path) -> None:
    with terminal(*command, home=home) as opened:
        time.sleep(seconds)
        opened.type(CTRL_C)
        time.sleep(0.1)
        if command[0] == "chat" and "> " in opened.screen:  # quicker than the key: there it asks again
            opened.type(CTRL_D)
        status = opened.status()
    assert status == 130 or "serving" in opened.screen or "Type a message" in opened.screen, opened.screen
    assert "Traceback" not in opened.screen
    assert "KeyboardInterrupt" not in opened.screen
