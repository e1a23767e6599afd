"""Detokenizer: text from tokens as they come: never half a character, and never the same work twice."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from phonograph.engine.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class LeadingSpaces:
    """Spaces that some vocabularies put in front of every text, which are not part of it.

    A text that comes `after` a prompt is what the prompt's own text goes on with: where the prompt has them already,
    those in front of the output belong to it. In a `verbatim` text they do too: a grammar has required them.
    """

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int] = (), *, verbatim: bool = False) -> None:
        self._num_left = 0 if verbatim else tokenizer.num_leading_spaces
        for token in after:
            if not self._num_left:
                break
            if token not in tokenizer.special_ids:
                self.cut(tokenizer.token_bytes(token).decode("utf-8", "replace"))

    def cut(self, text: str) -> str:
        """The next part of the text, without them."""
        if not self._num_left or not text:
            return text
        rest = text.lstrip(" ")
        num_cut = min(len(text) - len(rest), self._num_left)
        self._num_left = 0 if rest else self._num_left - num_cut
        return text[num_cut:]


class Detokenizer:
    """The text of one output. All that `add` and `finish` return, in a row, is `tokenizer.decode` of all ids, but for
    spaces in front of a text that comes `after` another, or is taken `verbatim` (see `LeadingSpaces`)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        without: Collection[int] = (),
        kept: Collection[int] = (),
        after: Iterable[int] = (),
        verbatim: bool = False,
    ) -> None:
        """`without`: tokens that are no text in this output, whatever the vocabulary says of them; `kept`: special ones
        that are text in it."""
        self._tokenizer = tokenizer
        self._skipped = (tokenizer.special_ids if skip_special else frozenset()).difference(kept).union(without)
        self._decoder = _utf8_decoder("replace")
        self._started = LeadingSpaces(tokenizer, after, verbatim=verbatim).cut

    def add(self, token_ids: Iterable[int]) -> str:
        """The new text that these tokens complete; the beginning of a character is kept for the next call."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        new = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        return self._started(self._decoder.decode(new))

    def finish(self) -> str:
        """The rest: a character that was never completed becomes U+FFFD."""
        return self._started(self._decoder.decode(b"", final=True))
