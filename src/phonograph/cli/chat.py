"""`phonograph chat`: talk to the model."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from phonograph.cli.flags import add_engine_flags, add_sampling_flags, arguments_from, greedy_by_default, params_from
from phonograph.errors import RequestError
from phonograph.graphs.progress import bar

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.requests.request import SamplingParams

HELP = "talk to the model"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer line by line, until an empty one."""
    params = params_from(args)
    llm = arguments_from(args).open(bar())
    params = greedy_by_default(params, llm.sampling)
    print("Type a message; an empty line or Ctrl-D ends.", file=sys.stderr)
    messages: list[dict[str, object]] = []
    while True:
        try:
            said = input("> ")
        except EOFError:
            return 0
        if not said.strip():
            return 0
        messages.append({"role": "user", "content": said})
        if answer := _answer(llm, messages, params):
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()


def _answer(llm: LLM, messages: list[dict[str, object]], params: SamplingParams) -> str:
    """Print the answer as it comes; where it has no room, the oldest question and answer are forgotten."""
    answer, room = "", min(params.max_tokens, llm.limits.max_len // 2)
    try:
        while len(messages) > 1 and llm.chat_length(messages) + room > llm.limits.max_len:
            print("(the context is full: the oldest question is forgotten)", file=sys.stderr)
            del messages[:2]
        for text in llm.stream_chat(messages, params):
            answer += text
            print(text, end="", flush=True)
        print()
    except RequestError as error:
        print(f"phonograph: {error}", file=sys.stderr)
    return answer
