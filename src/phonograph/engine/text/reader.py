"""TextReader: the tokens of one output as they come, turned to text that is safe to show, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phonograph.engine.text.detokenizer import Detokenizer
from phonograph.engine.text.stops import StopStrings
from phonograph.engine.text.tokenizer import Tokenizer


def id_text(token: int) -> str:
    """A token in the text of an output without a tokenizer."""
    return f"{token} "


@dataclass(frozen=True)
class TextForm:
    """What the text of an output has besides what was written for people to read."""

    with_special: bool = False
    """Tokens that the vocabulary calls special, but for those that end the output."""
    with_stop: bool = False
    """What ends the output: a stop string, or a token. A special one is only seen with `with_special`, or where a stop
    string is its text."""


class Read(NamedTuple):
    """What a reader made of some tokens."""

    text: str
    """New, and safe to show."""
    widths: list[int]
    """Of the tokens that it took, those up to the stop string: characters that each completes, in text that may be held
    back until later. The other tokens are no part of the output."""
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
        form: TextForm = TextForm(),
    ) -> None:
        """`stop_ids` end the output and are no part of its text, if its form does not say so; `kept_ids` are part of it
        though they are special; `after` is the prompt that the text continues. Within the first `min_tokens` no stop
        string ends it.

        A `verbatim` text follows a grammar: no space in front of it is the vocabulary's own.
        """
        self._ends = () if form.with_stop else stop_ids
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special=not form.with_special,
                without=self._ends,
                kept=[*kept_ids, *(_named(tokenizer, stops) if form.with_stop else ())],
                after=after,
                verbatim=verbatim,
            )
        self._stops = stops
        self._form = form
        self._num_early = min_tokens
        """Tokens that are to come before a stop string counts."""

    def take(self, tokens: Sequence[int], *, is_last: bool) -> Read:
        """Read on, token by token; with the last ones, nothing is held back."""
        if self._detokenizer is None:
            texts = ["" if token in self._ends else id_text(token) for token in tokens]
            return Read("".join(texts), list(map(len, texts)), False)
        text = ""
        widths: list[int] = []
        for token in tokens:
            new = self._detokenizer.add((token,))
            widths.append(len(new))
            more, hit = self._stops.add(new, counts=self._num_early <= 0)
            self._num_early -= 1
            text += more
            if hit is not None:
                return Read(text + self._shown(hit), widths, True)
        hit = None
        if is_last:
            rest, hit = self._stops.add(self._detokenizer.finish(), counts=self._num_early < 0)
            text += rest + (self._shown(hit) if hit is not None else self._stops.flush())
        return Read(text, widths, hit is not None)

    def _shown(self, stop: str) -> str:
        return stop if self._form.with_stop else ""


def _named(tokenizer: Tokenizer, stops: StopStrings) -> list[int]:
    """Tokens that a stop string is the text of."""
    found = (tokenizer.token_id(stop) for stop in stops.texts)
    return [token for token in found if token is not None]
