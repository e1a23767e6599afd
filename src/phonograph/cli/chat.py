"""`phonograph chat`: talk to the model."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from phonograph import settings
from phonograph.cli.flags import add_engine_flags, add_sampling_flags, arguments_from, greedy_by_default, params_from
from phonograph.cli.line_editor import LineEditor
from phonograph.errors import RequestError
from phonograph.graphs.progress import bar

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.requests.request import SamplingParams

HELP = "talk to the model"
_COMMANDS = {
    "/help": "this list",
    "/explain": "the plan, what is captured, and why steps ran eagerly",
    "/clear": "start a new conversation",
    "/quit": "quit; so do Ctrl-D, and Ctrl-C twice at an empty prompt",
}
_INPUT = (
    'A line that ends in \\ goes on in the next; """ begins and ends a message of several lines.\n'
    "A message that begins with a slash is written with two. Ctrl-C stops an answer."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--no-history", action="store_true", help="don't save the input history")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer message by message, until the input ends."""
    params = params_from(args)
    llm = arguments_from(args).open(bar())
    editor = LineEditor(None if args.no_history else settings.state_folder() / "chat_history")
    chat = _Chat(llm, greedy_by_default(params, llm.sampling))
    _tell("Type a message; /help shows the commands, Ctrl-D quits.")
    try:
        return _talk(chat, editor)
    finally:
        editor.save()


def _talk(chat: _Chat, editor: LineEditor) -> int:
    is_leaving = False
    while True:
        try:
            said = editor.read()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if is_leaving and not editor.typed:
                return 0
            is_leaving = not editor.typed
            if is_leaving:
                _tell("(Ctrl-C again, or Ctrl-D, quits)")
            continue
        is_leaving = False
        if said.strip() and not chat.take(said):
            return 0


class _Chat:
    """A conversation."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._messages: list[dict[str, object]] = []

    def take(self, said: str) -> bool:
        """Run a command, or answer a message; False to quit."""
        if said.startswith("/") and not said.startswith("//"):
            return self._obey(said.strip())
        self._messages.append({"role": "user", "content": said[1:] if said.startswith("//") else said})
        if answer := self._answer():
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()
        return True

    def _obey(self, command: str) -> bool:
        if command in ("/quit", "/exit"):
            return False
        if command == "/clear":
            self._messages.clear()
            _tell("(a new conversation)")
        elif command == "/explain":
            print(self._llm.explain())
        elif command == "/help":
            print("\n".join([*(f"{name:<10}{what}" for name, what in _COMMANDS.items()), "", _INPUT]))
        else:
            _tell(
                f"phonograph: there is no command {command[:40]!r}. /help lists them; // begins a message with a slash."
            )
        return True

    def _answer(self) -> str:
        """Stream the answer; where the context is full, the oldest question and answer are dropped."""
        llm, messages, params, answer = self._llm, self._messages, self._params, ""
        room = min(params.max_tokens, llm.limits.max_len // 2)
        try:
            while len(messages) > 1 and llm.chat_length(messages) + room > llm.limits.max_len:
                _tell("(the context is full: the oldest question is dropped)")
                del messages[:2]
            with _interruptible() as is_stopped, closing(_as_generator(llm, messages, params)) as texts:
                for text in texts:
                    answer += text
                    print(text, end="", flush=True)
                    if is_stopped():
                        _tell(" (stopped)")
                        return answer
            print()
        except RequestError as error:
            _tell(f"phonograph: {error}")
        return answer


def _as_generator(llm: LLM, messages: list[dict[str, object]], params: SamplingParams) -> Generator[str, None, None]:
    yield from llm.stream_chat(messages, params)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C lets the running step finish; the second does not wait."""
    count = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
