"""Reasoning: parser that separates reasoning from the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from phonograph.server.openai.tool_calls import overlap
from phonograph.server.openai.tool_formats import Mentions


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around reasoning; both may be special tokens of the vocabulary."""

    name: str
    opening: str
    closing: str

    def is_open(self, prompt: str, begun: str = "") -> bool:
        """Whether a message of which this much is `begun`, after a prompt with this end, is inside of reasoning.

        A tag amid other text is only mentioned.
        """
        return self.closing not in begun and (
            prompt.rstrip().endswith(self.opening) or begun.lstrip().startswith(self.opening)
        )


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")

FORMATS = {"think": THINK, "deepseek_r1": THINK, "qwen3": THINK, "mistral": MISTRAL}
"""By the names that `--reasoning-parser` takes; two are vLLM's names for the same tags."""
CHOICES = ("auto", "none", *FORMATS)


def format_of(template: Mentions) -> ReasoningFormat | None:
    """The format of which a template contains a tag: one that only opens reasoning has no closing tag."""
    marks = ((one, mark) for one in (THINK, MISTRAL) for mark in (one.opening, one.closing))
    return next((one for one, mark in marks if template.mentions(mark)), None)


class _At(Enum):
    START = "only spaces, or a partial opening tag, so far"
    INSIDE = "reasoning"
    AFTER = "after reasoning, only spaces so far"
    ANSWER = "content"


class ReasoningReader:
    """Parses one output as it streams: first reasoning, then the answer, both stripped of surrounding spaces.

    An output has reasoning if it begins with the opening tag, or if the prompt `is_open`, ending inside of reasoning.
    An output that ends before the closing tag has no answer.
    """

    def __init__(self, format: ReasoningFormat, *, is_open: bool = False) -> None:
        self._format = format
        self._is_open = is_open
        self._at = _At.START
        self._held = ""
        self._said_some = False
        self._num_read = 0
        """Characters, up to the closing tag's end."""

    @property
    def is_inside(self) -> bool:
        """Whether reasoning is open."""
        return self._at is _At.INSIDE or (self._at is _At.START and self._is_open)

    @property
    def num_chars(self) -> int:
        """Characters of the output so far that are reasoning, up to the end of its closing tag."""
        return 0 if self._at is _At.START and not self._is_open else self._num_read

    @property
    def is_over(self) -> bool:
        """Whether nothing that comes is reasoning."""
        return self._at in (_At.AFTER, _At.ANSWER)

    def add(self, text: str) -> tuple[str, str]:
        """New text of the reasoning, and of the answer."""
        if self._at is _At.ANSWER:
            return "", text
        self._held += text
        if self._at is not _At.AFTER:
            self._num_read += len(text)
        if self._at is _At.START and not self._begun():
            return "", ""
        thought = self._inside() if self._at is _At.INSIDE else ""
        if self._at is _At.AFTER:
            self._held = self._held.lstrip()
            self._at = _At.ANSWER if self._held else _At.AFTER
        if self._at is _At.ANSWER:
            answer, self._held = self._held, ""
            return thought, answer
        return thought, ""

    def _begun(self) -> bool:
        """Decide whether the output has reasoning; whether that is known."""
        opening, begun = self._format.opening, self._held.lstrip()
        if begun.startswith(opening):  # some models repeat the opening tag that their prompt ends with
            self._at, self._held = _At.INSIDE, begun[len(opening) :]
        elif opening.startswith(begun):
            return False
        else:
            self._at = _At.INSIDE if self._is_open else _At.ANSWER
            self._num_read = self._num_read if self._is_open else 0
        return True

    def _inside(self) -> str:
        closing = self._format.closing
        thought, closed, rest = self._held.partition(closing)
        if closed:
            self._at, self._held = _At.AFTER, rest
            self._num_read -= len(rest)
        else:
            keep = overlap(thought, closing)
            thought = thought[: len(thought) - keep]
            self._held = self._held[len(thought.rstrip()) :]
        thought = thought.rstrip()
        if not self._said_some:
            thought = thought.lstrip()
            self._said_some = bool(thought)
        return thought

    def finish(self) -> tuple[str, str]:
        """Text that was held back until the output ended."""
        held, self._held = self._held, ""
        if self._at is _At.INSIDE or (self._at is _At.START and self._is_open):
            return (held if self._said_some else held.lstrip()).rstrip(), ""
        return "", held if self._at is _At.START else ""
