"""Logprobs of tokens as the two kinds of answers show them."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.engine.sequence import TokenLogprob as Told
from phonograph.engine.text import Tokenizer
from phonograph.server.answers import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob


class LogprobWriter:
    """Writes tokens as texts; without a tokenizer, as `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def chat(self, found: Sequence[Told]) -> ChatLogprobs:
        """For /v1/chat/completions."""
        return ChatLogprobs([self._token(one) for one in self._said(found)])

    def text(self, found: Sequence[Told], offset: int) -> tuple[TextLogprobs, int]:
        """For /v1/completions, and the offset in the answer's text after these tokens."""
        found = self._said(found)
        tokens = [self._shown(one.token) for one in found]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top = [{self._shown(token): logprob for token, logprob in one.top} for one in found]
        return TextLogprobs(tokens, [one.logprob for one in found], top, offsets), offset

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
