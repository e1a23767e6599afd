"""AnswerReader: splits an output, as it streams, into reasoning, content and tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phonograph.server.openai.reasoning import ReasoningFormat, ReasoningReader
from phonograph.server.openai.responses import FunctionCall
from phonograph.server.openai.tool_calls import ToolCallReader
from phonograph.server.openai.tool_formats import HERMES, ToolFormat


@dataclass(frozen=True)
class Thought:
    """A piece of reasoning."""

    text: str


Part = Thought | str | FunctionCall
"""A plain str is content."""


@dataclass(frozen=True)
class Reading:
    """How to parse the outputs of one request."""

    tools: tuple[str, ...] = ()
    """Names of the functions that may be called."""
    format: ToolFormat = HERMES
    max_calls: int | None = None
    reasoning: ReasoningFormat | None = None
    thinks: bool = False
    """Whether the prompt ends inside of reasoning."""
    kept_tokens: frozenset[int] = frozenset()
    """Special tokens that are kept in the text: tags that the parsers look for."""
    takes_bare: bool = True
    """Whether an output that is only the JSON of tool calls, without tags, counts as tool calls."""

    def after(self, end_of_prompt: str, begun: str = "") -> Reading:
        """The same for outputs after a prompt with this end, and after what is `begun` of the message."""
        marks = self.reasoning
        return self if marks is None else replace(self, thinks=marks.is_open(end_of_prompt, begun))

    def reader(self) -> AnswerReader:
        """For one output."""
        return AnswerReader(self)


class AnswerReader:
    """Parses one output as it streams. The concatenated parts don't depend on how the text is split into pieces."""

    def __init__(self, reading: Reading) -> None:
        marks = reading.reasoning
        self._reasoning = ReasoningReader(marks, is_open=reading.thinks) if marks is not None else None
        self._calls = _calls_of(reading) if reading.tools else None
        self.num_thought = 0
        """Tokens of the reasoning, its tags included."""
        self._num_chars = 0
        """That these tokens complete."""
        self._uncounted = deque[int]()
        """Widths of the tokens after them."""

    def add(self, text: str, widths: Sequence[int] = ()) -> list[Part]:
        """Parts that are new, in order. `widths` are the characters that each new token completes."""
        thought, rest = self._reasoning.add(text) if self._reasoning is not None else ("", text)
        self._count(widths)
        said: Sequence[Part] = self._calls.add(rest) if self._calls is not None else [rest] if rest else []
        return [*([Thought(thought)] if thought else []), *said]

    def finish(self) -> list[Part]:
        """Parts that were held back until the output ended."""
        if self._reasoning is not None and self._reasoning.is_inside:
            self.num_thought += len(self._uncounted)
        thought, rest = self._reasoning.finish() if self._reasoning is not None else ("", "")
        said: list[Part] = []
        if self._calls is not None:
            said += [*(self._calls.add(rest) if rest else []), *self._calls.finish()]
        elif rest:
            said.append(rest)
        return [*([Thought(thought)] if thought else []), *said]

    def _count(self, widths: Sequence[int]) -> None:
        """Tokens are here no later than their text: the one that ends the reasoning is known once its text is read."""
        if self._reasoning is None:
            return
        self._uncounted.extend(widths)
        while self._uncounted and self._num_chars < self._reasoning.num_chars:
            self._num_chars += self._uncounted.popleft()
            self.num_thought += 1
        if self._reasoning.is_over:
            self._uncounted.clear()


def _calls_of(reading: Reading) -> ToolCallReader:
    return ToolCallReader(reading.tools, reading.format, reading.max_calls, takes_bare=reading.takes_bare)


def joined(parts: Sequence[Part]) -> tuple[str, str, list[FunctionCall]]:
    """Reasoning, content and tool calls, each in order."""
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    said = "".join(part for part in parts if isinstance(part, str))
    return thought, said, [part for part in parts if isinstance(part, FunctionCall)]
