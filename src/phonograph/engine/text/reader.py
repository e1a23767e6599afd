"""Reads the tokens of one answer as they come: text that is safe to show, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from phonograph.engine.text.detokenizer import Detokenizer
from phonograph.engine.text.stops import StopStrings
from phonograph.engine.text.tokenizer import Tokenizer


class TextReader:
    """Detokenizes and watches for stop strings; without a tokenizer the text is the token ids."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: StopStrings,
        *,
        stop_ids: Collection[int] = (),
        after: Sequence[int] = (),
        verbatim: bool = False,
    ) -> None:
        """`stop_ids` end the answer and are not part of its text; `after` is the prompt that the text continues.

        A `verbatim` text follows a grammar: no space in front of it is the vocabulary's own.
        """
        self._detokenizer = (
            Detokenizer(tokenizer, without=stop_ids, after=after, verbatim=verbatim) if tokenizer is not None else None
        )
        self._stops = stops

    def take(self, tokens: Iterable[int], *, is_last: bool) -> tuple[str, bool]:
        """The new text, and whether a stop string ends it here; with the last tokens, nothing is held back."""
        if self._detokenizer is None:
            return "".join(f"{token} " for token in tokens), False
        text, hit = self._stops.add(self._detokenizer.add(tokens))
        if hit is None and is_last:
            rest, hit = self._stops.add(self._detokenizer.finish())
            text += rest
            if hit is None:
                text += self._stops.flush()
        return text, hit is not None
