"""Detokenizer and TextReader: text out of tokens as they come, never half a character, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from phonograph.engine.text.stops import StopStrings
from phonograph.engine.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer. All that `add` and `finish` return, in a row, is `tokenizer.decode` of all ids.

    A text that comes `after` a prompt is what the prompt's own text goes on with: some vocabularies put a space in
    front of every text, and where the prompt has it already, one in front of the answer belongs to the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        without: Collection[int] = (),
        after: Iterable[int] = (),
    ) -> None:
        """`without`: tokens that are no text in this answer, whatever the vocabulary says of them."""
        self._tokenizer = tokenizer
        self._skipped = (tokenizer.special_ids if skip_special else frozenset()).union(without)
        self._decoder = _utf8_decoder("replace")
        self._num_spaces = tokenizer.num_leading_spaces
        for token in after:
            if not self._num_spaces:
                break
            if token not in tokenizer.special_ids:
                self._started(tokenizer.token_bytes(token).decode("utf-8", "replace"))

    def add(self, token_ids: Iterable[int]) -> str:
        """The new text that these tokens complete; the beginning of a character is kept for the next call."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        new = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        return self._started(self._decoder.decode(new))

    def finish(self) -> str:
        """The rest: a character that was never completed becomes U+FFFD."""
        return self._started(self._decoder.decode(b"", final=True))

    def _started(self, text: str) -> str:
        """The text without the spaces that the vocabulary put in front."""
        if not self._num_spaces or not text:
            return text
        rest = text.lstrip(" ")
        num_cut = min(len(text) - len(rest), self._num_spaces)
        self._num_spaces = 0 if rest else self._num_spaces - num_cut
        return text[num_cut:]


class Read(NamedTuple):
    """What a reader made of some tokens."""

    text: str
    """New, and safe to show."""
    num_tokens: int
    """How many of the tokens it took: those up to the stop string. The others are no part of the answer."""
    is_stopped: bool
    """Whether a stop string ends the answer here."""


class TextReader:
    """Detokenizes and watches for stop strings; without a tokenizer the text is the token ids."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: StopStrings,
        *,
        stop_ids: Collection[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        """`stop_ids` end the answer and are not part of its text; `after` is the prompt that the text continues."""
        self._detokenizer = Detokenizer(tokenizer, without=stop_ids, after=after) if tokenizer is not None else None
        self._stops = stops

    def take(self, tokens: Sequence[int], *, is_last: bool) -> Read:
        """Read on, token by token; with the last ones, nothing is held back."""
        if self._detokenizer is None:
            return Read("".join(f"{token} " for token in tokens), len(tokens), False)
        text = ""
        for count, token in enumerate(tokens, 1):
            more, hit = self._stops.add(self._detokenizer.add((token,)))
            text += more
            if hit is not None:
                return Read(text, count, True)
        hit = None
        if is_last:
            rest, hit = self._stops.add(self._detokenizer.finish())
            text += rest if hit is not None else rest + self._stops.flush()
        return Read(text, len(tokens), hit is not None)
