"""Bad words: texts that may not be generated, as the tokens that they are in a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import RequestError


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The same, with the tokens of its bad words among those that may not come. Without a tokenizer it is refused."""
    if not params.bad_words:
        return params
    if tokenizer is None:
        problem = "without a tokenizer there is no text that could be forbidden"
        raise RequestError(f"reading bad words: {problem}. Give bad_token_ids.", field="bad_words")
    spelled = (spelling for word in params.bad_words for spelling in _spellings(word, tokenizer))
    return replace(params, bad_token_ids=tuple(dict.fromkeys((*params.bad_token_ids, *spelled))))


def _spellings(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """As vLLM has it: the word as it is within another, and at the beginning of one where that is a token of its own
    and takes no more tokens."""
    bare = word.lstrip() or word
    within = tuple(tokenizer.encode(bare, add_special=False))
    if not within:
        problem = f"the word {word[:40]!r} has no tokens in this model's vocabulary"
        raise RequestError(f"reading bad words: {problem}. Leave it out.", field="bad_words")
    yield within
    beginning = tuple(tokenizer.encode(" " + bare, add_special=False))
    if len(beginning) == len(within) and beginning[0] != within[0]:
        yield beginning
