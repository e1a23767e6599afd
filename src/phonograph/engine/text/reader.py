"""TextReader: the tokens of one output as they come, turned to text that is safe to show, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from phonograph.engine.text.detokenizer import Detokenizer
from phonograph.engine.text.stops import StopStrings
from phonograph.engine.text.tokenizer import Tokenizer


def id_text(token: int) -> str:
    """A token in the text of an output without a tokenizer."""
    return f"{token} "


class Read(NamedTuple):
    """What a reader made of some tokens."""

    text: str
    """New, and safe to show."""
    num_tokens: int
    """How many of the tokens it took: those up to the stop string. The others are no part of the output."""
    is_stopped: bool
    """Whether a stop string ends the output here."""


class TextReader:
    """Detokenizes and watches for stop strings; without a tokenizer the text is the token ids."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: StopStrings,
        *,
        stop_ids: Collection[int] = (),
        kept_ids: Collection[int] = (),
        after: Sequence[int] = (),
        verbatim: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`stop_ids` end the output and are not part of its text; `kept_ids` are part of it though they are special;
        `after` is the prompt that the text continues. Within the first `min_tokens` no stop string ends it.

        A `verbatim` text follows a grammar: no space in front of it is the vocabulary's own.
        """
        self._detokenizer = (
            Detokenizer(tokenizer, without=stop_ids, kept=kept_ids, after=after, verbatim=verbatim)
            if tokenizer is not None
            else None
        )
        self._stops = stops
        self._stop_ids = stop_ids
        self._num_early = min_tokens
        """Tokens that are to come before a stop string counts."""

    def take(self, tokens: Sequence[int], *, is_last: bool) -> Read:
        """Read on, token by token; with the last ones, nothing is held back."""
        if self._detokenizer is None:
            return Read("".join(map(id_text, (i for i in tokens if i not in self._stop_ids))), len(tokens), False)
        text = ""
        for count, token in enumerate(tokens, 1):
            more, hit = self._stops.add(self._detokenizer.add((token,)), counts=self._num_early <= 0)
            self._num_early -= 1
            text += more
            if hit is not None:
                return Read(text, count, True)
        hit = None
        if is_last:
            rest, hit = self._stops.add(self._detokenizer.finish(), counts=self._num_early < 0)
            text += rest if hit is not None else rest + self._stops.flush()
        return Read(text, len(tokens), hit is not None)
