"""Logprobs: of tokens, as responses of chats and of completions show them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count

from phonograph.engine.requests.sequence import TokenLogprob
from phonograph.engine.text import Tokenizer
from phonograph.engine.text.detokenizer import LeadingSpaces
from phonograph.engine.text.reader import id_text
from phonograph.server.openai.responses import ChatLogprobs, ChatTokenLogprob, TextLogprobs, TopLogprob

_CACHED = 1 << 16
"""Tokens whose texts and bytes are kept."""
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Where the tokens of one output begin in its text: those that make up one character all where it is."""

    def __init__(self, spaces: LeadingSpaces | None = None) -> None:
        """`spaces` are those in front of the output that its text does not have."""
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
    """Writes tokens as texts; without a tokenizer, or with `by_id`, as `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer | None, *, with_special: bool = False, by_id: bool = False) -> None:
        """`with_special`: special tokens are part of the text, and so of the logprobs."""
        self._tokenizer = tokenizer
        self._left_out = frozenset[int]() if with_special or tokenizer is None else tokenizer.special_ids
        self._by_id = by_id
        self._entry = lru_cache(_CACHED)(self._looked_up)

    def offsets(self, prompt: Sequence[int], *, verbatim: bool) -> TextOffsets:
        """Those of an output that goes on where a prompt ended."""
        spaces = None if self._tokenizer is None else LeadingSpaces(self._tokenizer, prompt, verbatim=verbatim)
        return TextOffsets(spaces)

    def chat(self, found: Sequence[TokenLogprob]) -> ChatLogprobs:
        """For /v1/chat/completions."""
        return ChatLogprobs([self._token(one) for one in self._said(found)])

    def text(self, found: Sequence[TokenLogprob], offsets: TextOffsets) -> TextLogprobs:
        """For /v1/completions; `offsets` are those of the output, which these tokens continue."""
        found = self._said(found)
        names = [self._names(one) for one in found]
        return TextLogprobs(
            [of[one.token] for of, one in zip(names, found, strict=True)],
            [one.logprob for one in found],
            [{of[token]: logprob for token, logprob in one.top} for of, one in zip(names, found, strict=True)],
            [offsets.after(self._text_bytes(one.token)) for one in found],
        )

    def _names(self, found: TokenLogprob) -> dict[int, str]:
        """A name of its own for each token: its text, or OpenAI's way to write bytes that are none.

        Where tokens have the same text, as `x` and `<0x78>`, the likeliest has it as its name.
        """
        names: dict[int, str] = {}
        taken: set[str] = set()
        for token in dict.fromkeys([*(token for token, _ in found.top), found.token]):
            name = next(name for name in self._possible_names(token) if name not in taken)
            names[token] = name
            taken.add(name)
        return names

    def _possible_names(self, token: int) -> Iterator[str]:
        if self._by_id:
            yield f"token_id:{token}"
        written = self._bytes(token)
        with suppress(UnicodeDecodeError):
            yield written.decode()
        yield "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)
        yield f"token_id:{token}"
        yield from (f"token_id:{token}#{number}" for number in count())

    def _said(self, found: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Without the tokens that are no text, as the end-of-sequence token: they are not in the text."""
        return [one for one in found if one.token not in self._left_out]

    def _token(self, found: TokenLogprob) -> ChatTokenLogprob:
        top = []
        for token, logprob in found.top:
            shown, written = self._entry(token)
            top.append(TopLogprob(shown, logprob, written))
        shown, written = self._entry(found.token)
        return ChatTokenLogprob(shown, found.logprob, written, top)

    def _text_bytes(self, token: int) -> bytes:
        """Those that the text of an output has of a token."""
        return id_text(token).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def _bytes(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        return self._tokenizer.token_bytes(token)

    def _looked_up(self, token: int) -> tuple[str, list[int]]:
        """Its text and its bytes; a list for each entry would keep the collector of garbage busy."""
        written = self._bytes(token)
        return f"token_id:{token}" if self._by_id else written.decode("utf-8", "replace"), list(written)
