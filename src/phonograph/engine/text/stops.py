"""StopStrings: finds stop strings in a stream of text; only what may still become one is held back.

One that is the text of a special token stands for that token.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import RequestError


def with_special_stops(params: SamplingParams, tokenizer: Tokenizer | None, vocab: int) -> SamplingParams:
    """The same, ending at special tokens too that a stop string is the text of: they are no text, and so would never
    be found there. The string stays, as the model may spell it with other tokens. Without a tokenizer it is refused."""
    if tokenizer is None:
        if params.stop:
            problem = "without a tokenizer there is no text that could end an output"
            raise RequestError(f"reading stop strings: {problem}. Send stop_token_ids.", field="stop")
        return params
    named = [tokenizer.token_id(stop) for stop in params.stop]
    ids = [i for i in named if i is not None and i in tokenizer.special_ids and i < vocab]
    more = tuple(dict.fromkeys((*params.stop_token_ids, *ids)))
    return replace(params, stop_token_ids=more) if len(more) > len(params.stop_token_ids) else params


class _Pattern:
    """One stop string, with the table of Knuth, Morris and Pratt; the table grows only as far as text has matched."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]
        """By the length of a beginning of the stop string: its longest shorter end that is a beginning too."""

    def step(self, matched: int, char: str) -> int:
        """How many characters of the stop string the text ends with, once this one is added to `matched` of them."""
        text = self.text
        while matched and text[matched] != char:
            matched = self._border(matched)
        return matched + 1 if text[matched] == char else 0

    def passed(self, matched: int) -> int:
        """As many characters as the text ends with where a match of the whole is not to count."""
        return self._border(matched) if matched == len(self.text) else matched

    def _border(self, size: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) <= size:
            border, char = borders[-1], text[len(borders) - 1]
            while border and text[border] != char:
                border = borders[border]
            borders.append(border + 1 if text[border] == char else 0)
        return borders[size]


class StopStrings:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    Of two that are completed by the same character the longer one counts, so that nothing of it is given out.
    The choices of a request share the patterns: `again` makes the search of a further choice.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            problem = f"found {repr(stops)[:100]}; expected a list of strings that are not empty"
            raise RequestError(f"reading stop strings: {problem}.", field="stop")
        self._patterns = tuple(_Pattern(stop) for stop in dict.fromkeys(stops))
        self._beginnings = re.compile("|".join(re.escape(char) for char in {stop[0] for stop in stops}))
        self._begin()

    @property
    def texts(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(pattern.text for pattern in self._patterns)

    def again(self) -> StopStrings:
        """A search of its own for the same stop strings."""
        made = copy.copy(self)
        made._begin()
        return made

    def _begin(self) -> None:
        self._matched = [0] * len(self._patterns)
        """By pattern: how many of its characters the text ends with."""
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """The text that can be given out, and the stop string that ends it if one is found; nothing comes after it.

        A stop string whose last character does not count is passed over; one that only begins there may still come.
        """
        if self.hit is not None:
            return "", self.hit
        if not self._patterns:
            return text, None
        held, place, matched = self._held + text, len(self._held), self._matched
        while place < len(held):
            if not any(matched):  # nothing has begun: skip to a character that begins one
                found = self._beginnings.search(held, place)
                if found is None:
                    break
                place = found.start()
            char = held[place]
            place += 1
            matched = [pattern.step(size, char) for pattern, size in zip(self._patterns, matched, strict=True)]
            hits = [p.text for p, size in zip(self._patterns, matched, strict=True) if size == len(p.text)]
            if hits and not counts:
                matched = [p.passed(size) for p, size in zip(self._patterns, matched, strict=True)]
            elif hits:
                self._held, self.hit = "", max(hits, key=len)
                return held[: place - len(self.hit)], self.hit
        self._matched, kept = matched, len(held) - max(matched)
        self._held = held[kept:]
        return held[:kept], None

    def flush(self) -> str:
        """What is still held back, when no more text comes."""
        rest, self._held, self._matched = self._held, "", [0] * len(self._patterns)
        return rest
