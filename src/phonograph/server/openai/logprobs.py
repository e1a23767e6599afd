"""Logprobs: entries of tokens in the forms of chat completions, completions and vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import count

from phonograph.engine.requests.sequence import PromptLogprob, TokenLogprob
from phonograph.engine.text import Tokenizer
from phonograph.engine.text.detokenizer import LeadingSpaces
from phonograph.engine.text.reader import id_text
from phonograph.server.openai.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    RankedLogprob,
    TextLogprobs,
    TopLogprob,
)

_CACHED = 1 << 16
"""Tokens whose texts and bytes are kept."""
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Text offsets of one output's tokens; tokens that together make up one character share its offset."""

    def __init__(self, spaces: LeadingSpaces | None = None) -> None:
        """`spaces` is how many leading spaces of the output its text lacks."""
        self._decoder = _utf8_decoder("replace")
        self._spaces = spaces
        self.end = 0
        """Of the text so far."""

    def after(self, token: bytes) -> int:
        """Add the bytes of the next token; returns its offset."""
        if token and token[0] & 0xC0 != 0x80:  # it starts a new character: an incomplete one before it stays U+FFFD
            self._take(self._decoder.decode(b"", final=True))
        begin = self.end
        self._take(self._decoder.decode(token))
        return begin

    def _take(self, text: str) -> None:
        self.end += len(text if self._spaces is None else self._spaces.cut(text))


class LogprobWriter:
    """Writes tokens as texts; without a tokenizer, or with `by_id`, as `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer | None, *, with_special: bool = False, by_id: bool = False) -> None:
        """`with_special`: special tokens are part of the text, and so of the logprobs."""
        self._tokenizer = tokenizer
        self._left_out = frozenset[int]() if with_special or tokenizer is None else tokenizer.special_ids
        self._by_id = by_id
        self._entry = lru_cache(_CACHED)(self._looked_up)

    def offsets(self, prompt: Sequence[int], *, verbatim: bool) -> TextOffsets:
        """Offsets of an output that continues a prompt."""
        spaces = None if self._tokenizer is None else LeadingSpaces(self._tokenizer, prompt, verbatim=verbatim)
        return TextOffsets(spaces)

    def chat(self, found: Sequence[TokenLogprob]) -> ChatLogprobs:
        """For /v1/chat/completions."""
        return ChatLogprobs([self._token(one) for one in self._said(found)])

    def text(self, found: Sequence[TokenLogprob], offsets: TextOffsets, *, every: bool = False) -> TextLogprobs:
        """For /v1/completions; `offsets` are those of the output, which these tokens continue.

        With `every`, tokens that are no text have an entry too: after an echo, clients count tokens.
        """
        if every:
            silent = self._left_out.intersection(one.token for one in found)
            return self._columns(
                found, [offsets.after(b"" if one.token in silent else self._text_bytes(one.token)) for one in found]
            )
        found = self._said(found)
        return self._columns(found, [offsets.after(self._text_bytes(one.token)) for one in found])

    def first_of_prompt(self, token: int, offset: int) -> TextLogprobs:
        """Of a prompt's first token, which has no logprob."""
        return TextLogprobs([next(self._possible_names(token))], [None], [None], [offset])

    def prompt(self, found: Sequence[TokenLogprob], num_top: int, offsets: list[int]) -> TextLogprobs:
        """Of further tokens of an echoed prompt, at these offsets."""
        if found and len(found[0].top) > num_top:
            found = [replace(one, top=one.top[:num_top]) for one in found]
        return self._columns(found, offsets)

    def _columns(self, found: Sequence[TokenLogprob], offsets: list[int]) -> TextLogprobs:
        names = [self._names(one) for one in found]
        return TextLogprobs(
            [of[one.token] for of, one in zip(names, found, strict=True)],
            [one.logprob for one in found],
            [{of[token]: logprob for token, logprob in one.top} for of, one in zip(names, found, strict=True)],
            offsets,
        )

    def ranked(self, found: Sequence[PromptLogprob], num_top: int) -> list[dict[str, RankedLogprob]]:
        """Of tokens of a prompt, as vLLM shows them: by token id, the prompt's own first."""
        shown = []
        for one in found:
            entries = {one.token: RankedLogprob(one.logprob, one.rank, self._entry(one.token)[0])}
            for rank, (token, logprob) in enumerate(one.top[:num_top], 1):
                entries[token] = RankedLogprob(logprob, rank, self._entry(token)[0])
            shown.append({str(token): entry for token, entry in entries.items()})
        return shown

    def _names(self, found: TokenLogprob) -> dict[int, str]:
        """A distinct name for each token: its text, or OpenAI's `bytes:…` form where it is not valid UTF-8.

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
        """Without special tokens, such as end-of-sequence: they are not in the text."""
        return [one for one in found if one.token not in self._left_out]

    def _token(self, found: TokenLogprob) -> ChatTokenLogprob:
        top = []
        for token, logprob in found.top:
            shown, written = self._entry(token)
            top.append(TopLogprob(shown, logprob, written))
        shown, written = self._entry(found.token)
        return ChatTokenLogprob(shown, found.logprob, written, top)

    def _text_bytes(self, token: int) -> bytes:
        """The bytes that a token contributes to the text of an output."""
        return id_text(token).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def _bytes(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        return self._tokenizer.token_bytes(token)

    def _looked_up(self, token: int) -> tuple[str, list[int]]:
        """Its text and its bytes; a list per entry would burden the garbage collector."""
        written = self._bytes(token)
        return f"token_id:{token}" if self._by_id else written.decode("utf-8", "replace"), list(written)
