"""Logprobs of tokens as the two kinds of answers show them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from phonograph.engine.sequence import TokenLogprob as Told
from phonograph.engine.text import Tokenizer
from phonograph.engine.text.detokenizer import LeadingSpaces
from phonograph.server.answers import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Where the tokens of one answer begin in its text: those that make up one character all where it is."""

    def __init__(self, spaces: LeadingSpaces | None = None) -> None:
        """`spaces` are those in front of the answer that its text does not have."""
        self._decoder = _utf8_decoder("replace")
        self._spaces = spaces
        self._end = 0

    def after(self, token: bytes) -> int:
        """Take in the bytes of the next token; where it begins."""
        if token and token[0] & 0xC0 != 0x80:  # it begins a character: one that is not whole stays so, as U+FFFD
            self._take(self._decoder.decode(b"", final=True))
        begin = self._end
        self._take(self._decoder.decode(token))
        return begin

    def _take(self, text: str) -> None:
        self._end += len(text if self._spaces is None else self._spaces.cut(text))


class LogprobWriter:
    """Writes tokens as texts; without a tokenizer, as `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def offsets(self, prompt: Sequence[int], *, verbatim: bool) -> TextOffsets:
        """Those of an answer that goes on where a prompt ended."""
        spaces = None if self._tokenizer is None else LeadingSpaces(self._tokenizer, prompt, verbatim=verbatim)
        return TextOffsets(spaces)

    def chat(self, found: Sequence[Told]) -> ChatLogprobs:
        """For /v1/chat/completions."""
        return ChatLogprobs([self._token(one) for one in self._said(found)])

    def text(self, found: Sequence[Told], offsets: TextOffsets) -> TextLogprobs:
        """For /v1/completions; `offsets` are those of the answer, which these tokens continue."""
        found = self._said(found)
        top = [{self._shown(token): logprob for token, logprob in one.top} for one in found]
        return TextLogprobs(
            [self._shown(one.token) for one in found],
            [one.logprob for one in found],
            top,
            [offsets.after(self._bytes(one.token)) for one in found],
        )

    def _said(self, found: Sequence[Told]) -> list[Told]:
        """Without the tokens that are no text, as the one that ends an answer: they are not in it."""
        special = self._tokenizer.special_ids if self._tokenizer is not None else frozenset[int]()
        return [one for one in found if one.token not in special]

    def _token(self, found: Told) -> TokenLogprob:
        top = [TopLogprob(self._shown(token), logprob, list(self._bytes(token))) for token, logprob in found.top]
        return TokenLogprob(self._shown(found.token), found.logprob, list(self._bytes(found.token)), top)

    def _bytes(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        return self._tokenizer.token_bytes(token)

    def _shown(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")
