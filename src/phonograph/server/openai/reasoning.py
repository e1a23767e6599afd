"""Reasoning: what a model thinks before it answers, told from the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from phonograph.server.openai.tool_calls import overlap
from phonograph.server.openai.tool_formats import Mentions


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around what a model thinks; both may be special tokens of a vocabulary."""

    name: str
    opening: str
    closing: str

    def is_open(self, text: str) -> bool:
        """Whether a text that the output continues ends inside of it."""
        return text.rfind(self.opening) > text.rfind(self.closing)


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")

FORMATS = {"think": THINK, "deepseek_r1": THINK, "qwen3": THINK, "mistral": MISTRAL}
"""By the names that `--reasoning-parser` takes; two are those of vLLM for the same marks."""
CHOICES = ("auto", "none", *FORMATS)


def format_of(template: Mentions) -> ReasoningFormat | None:
    """The format whose marks a template writes or reads."""
    return next((one for one in (THINK, MISTRAL) if template.mentions(one.closing)), None)


class _At(Enum):
    START = "nothing but spaces, or the beginning of a mark, was said"
    INSIDE = "it thinks"
    AFTER = "it has thought, and only spaces followed"
    ANSWER = "it answers"


class ReasoningReader:
    """Reads one output as it comes: first what is thought, then the answer, both without the spaces around them.

    An output thinks if it begins with the mark, or if the prompt `is_open`: its last words are the mark. One that ends
    before the second mark has no answer.
    """

    def __init__(self, format: ReasoningFormat, *, is_open: bool = False) -> None:
        self._format = format
        self._is_open = is_open
        self._at = _At.START
        self._held = ""
        self._said_some = False

    @property
    def is_inside(self) -> bool:
        """Whether a thought has begun and not ended."""
        return self._at is _At.INSIDE

    def add(self, text: str) -> tuple[str, str]:
        """What is new of the thought, and of the answer."""
        if self._at is _At.ANSWER:
            return "", text
        self._held += text
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
        """Whether it is known if the output thinks."""
        opening, begun = self._format.opening, self._held.lstrip()
        if begun.startswith(opening):  # some models repeat the mark that their prompt ends with
            self._at, self._held = _At.INSIDE, begun[len(opening) :]
        elif opening.startswith(begun):
            return False
        else:
            self._at = _At.INSIDE if self._is_open else _At.ANSWER
        return True

    def _inside(self) -> str:
        closing = self._format.closing
        thought, closed, rest = self._held.partition(closing)
        if closed:
            self._at, self._held = _At.AFTER, rest
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
        """What is left when the output has ended."""
        held, self._held = self._held, ""
        if self._at is _At.INSIDE or (self._at is _At.START and self._is_open):
            return (held if self._said_some else held.lstrip()).rstrip(), ""
        return "", held if self._at is _At.START else ""
