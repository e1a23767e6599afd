"""PromptWriter: prompts in a response: echoed texts, and prompt logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from phonograph.engine.requests.sequence import PromptLogprob
from phonograph.server.openai.echo import Echo
from phonograph.server.openai.logprobs import LogprobWriter
from phonograph.server.openai.responses import TextLogprobs

_encode = msgspec.json.Encoder().encode


class PromptWriter:
    """Writes the prompts of one response, and tracks what was written for each choice."""

    def __init__(
        self,
        logprobs: LogprobWriter,
        echo: Callable[[int], Echo] | None = None,
        num_top: int | None = None,
        num_ranked: int | None = None,
    ) -> None:
        """`echo` makes that of a choice, with as many alternatives of its tokens as `num_top`; `num_ranked` is how many
        vLLM's form of them has. None: there is no such thing."""
        self._logprobs = logprobs
        self._echo = echo
        self._num_top = num_top
        self._num_ranked = num_ranked
        self._echoes: dict[int, Echo] = {}
        """By choice, once its text is written."""

    @property
    def is_ranked(self) -> bool:
        return self._num_ranked is not None

    @property
    def echoes(self) -> bool:
        return self._echo is not None

    def is_new(self, choice: int) -> bool:
        """Whether the echo of a choice is still to be written."""
        return self._echo is not None and choice not in self._echoes

    def text(self, choice: int) -> str:
        """The echoed text of a choice, once; empty after that."""
        if self._echo is None or choice in self._echoes:
            return ""
        self._echoes[choice] = self._echo(choice)
        return self._echoes[choice].text

    def end_of(self, choice: int) -> int:
        """Characters in front of the output of a choice whose echo is written."""
        return len(self._echoes[choice].text) if choice in self._echoes else 0

    def columns(self, choice: int, found: Sequence[PromptLogprob]) -> Iterator[TextLogprobs]:
        """The entries of further tokens of an echo; the first one's comes with the others, or alone."""
        if self._num_top is None or choice not in self._echoes:
            return
        echo = self._echoes[choice]
        if not echo.num_placed:
            yield self._logprobs.first_of_prompt(echo.tokens[0], *echo.place(1))
        if found:
            yield self._logprobs.prompt(found, self._num_top, echo.place(len(found)))

    def ranked(self, blocks: Iterable[list[PromptLogprob]]) -> Iterator[list[bytes]]:
        """Logprobs of a whole prompt in vLLM's form, as encoded list items."""
        yield [b"null"]
        for block in blocks:
            yield [_encode(self._logprobs.ranked(block, self._num_ranked or 0))[1:-1]]


def together(parts: Iterable[TextLogprobs]) -> TextLogprobs:
    """One after the other, as one."""
    whole = TextLogprobs([], [], [], [])
    for part in parts:
        whole.tokens.extend(part.tokens)
        whole.token_logprobs.extend(part.token_logprobs)
        whole.top_logprobs.extend(part.top_logprobs)
        whole.text_offset.extend(part.text_offset)
    return whole
