"""AnswerReader: an output as it comes, told apart into what is thought, what is said and what is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phonograph.server.openai.reasoning import ReasoningFormat, ReasoningReader
from phonograph.server.openai.responses import FunctionCall
from phonograph.server.openai.tool_calls import ToolCallReader
from phonograph.server.openai.tool_formats import HERMES, ToolFormat


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


Part = Thought | str | FunctionCall
"""A text without a class around it is said."""


@dataclass(frozen=True)
class Reading:
    """How the outputs of one request are to be read."""

    tools: tuple[str, ...] = ()
    """Names that may be called."""
    format: ToolFormat = HERMES
    max_calls: int | None = None
    reasoning: ReasoningFormat | None = None
    thinks: bool = False
    """Whether the prompt ends with the mark of a thought."""
    last_of_thought: int | None = None
    """The token of the mark that ends a thought, where it is one token."""
    kept_tokens: frozenset[int] = frozenset()
    """Special tokens that are text here: marks that readers look for."""
    takes_bare: bool = True
    """Whether an output that is nothing but the JSON of calls is calls, though it has no marks."""

    def after(self, end_of_prompt: str, *, continues: bool) -> Reading:
        """The same, of outputs that come after such a prompt; one that `continues` a message may be amid a thought."""
        marks = self.reasoning
        if marks is None:
            return self
        is_open = marks.is_open(end_of_prompt) if continues else end_of_prompt.rstrip().endswith(marks.opening)
        return replace(self, thinks=is_open)

    def reader(self) -> AnswerReader:
        """For one output."""
        return AnswerReader(self)


class AnswerReader:
    """Reads one output as it comes. All parts in a row are the same, however it comes in pieces."""

    def __init__(self, reading: Reading) -> None:
        marks = reading.reasoning
        self._reasoning = ReasoningReader(marks, is_open=reading.thinks) if marks is not None else None
        self._calls = _calls_of(reading) if reading.tools else None
        self._last_of_thought = reading.last_of_thought
        self.num_thought = 0
        """Tokens of what was thought, its last mark included."""
        self._num_tokens = 0
        self._has_thought = False

    def add(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """What is new, in its order."""
        self._count(tokens)
        thought, rest = self._reasoning.add(text) if self._reasoning is not None else ("", text)
        said: Sequence[Part] = self._calls.add(rest) if self._calls is not None else [rest] if rest else []
        return [*([Thought(thought)] if thought else []), *said]

    def finish(self) -> list[Part]:
        """What is left when the output has ended."""
        if self._reasoning is not None and self._reasoning.is_inside and self._last_of_thought is not None:
            self.num_thought = self._num_tokens
        thought, rest = self._reasoning.finish() if self._reasoning is not None else ("", "")
        said: list[Part] = []
        if self._calls is not None:
            said += [*(self._calls.add(rest) if rest else []), *self._calls.finish()]
        elif rest:
            said.append(rest)
        return [*([Thought(thought)] if thought else []), *said]

    def _count(self, tokens: Sequence[int]) -> None:
        if self._has_thought or self._last_of_thought is None:
            return
        if self._last_of_thought in tokens:
            self._has_thought = True
            self.num_thought = self._num_tokens + list(tokens).index(self._last_of_thought) + 1
        self._num_tokens += len(tokens)


def _calls_of(reading: Reading) -> ToolCallReader:
    return ToolCallReader(reading.tools, reading.format, reading.max_calls, takes_bare=reading.takes_bare)


def joined(parts: Sequence[Part]) -> tuple[str, str, list[FunctionCall]]:
    """What was thought, said and called, each in its order."""
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    said = "".join(part for part in parts if isinstance(part, str))
    return thought, said, [part for part in parts if isinstance(part, FunctionCall)]
