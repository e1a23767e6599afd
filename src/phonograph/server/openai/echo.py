"""Echo: a prompt as the beginning of its completions, with the places of its tokens in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from phonograph.engine.text import Tokenizer
from phonograph.engine.text.detokenizer import LeadingSpaces
from phonograph.engine.text.reader import id_text
from phonograph.server.openai.logprobs import TextOffsets


@dataclass(frozen=True)
class Echo:
    """What is shown of a prompt."""

    text: str
    """As it was sent; of token ids, all of them decoded."""
    tokens: Sequence[int]
    offsets: Sequence[int]
    """Where each token begins in the text; those that the tokenizer has put around it have no width."""


def echo_of(tokenizer: Tokenizer | None, given: str | Sequence[int], tokens: Sequence[int]) -> Echo:
    """The echo of a prompt that became these tokens; a part of a text that was cut off is not shown."""
    if tokenizer is None:
        texts = [id_text(token) for token in tokens]
        return Echo("".join(texts), tokens, list(accumulate(map(len, texts[:-1]), initial=0)))
    text = given if isinstance(given, str) else tokenizer.decode(tokens, skip_special=False)
    return Echo(text, tokens, _offsets(tokenizer, text, tokens))


def _offsets(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> list[int]:
    offsets, found = TextOffsets(LeadingSpaces(tokenizer)), list[int]()
    for token in tokens:
        written = tokenizer.token_bytes(token)
        if token in tokenizer.special_ids and not text.startswith(written.decode("utf-8", "replace"), offsets.end):
            written = b""
        found.append(min(offsets.after(written), len(text)))
    return found
