"""Truncation: the end of a prompt that is longer than its request wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phonograph.engine.text.tokenizer import Tokenizer


def encoded_end(tokenizer: Tokenizer, text: str, most: int | None, *, add_special: bool) -> list[int]:
    """The tokens of a text, the last ones if there are more than `most`; what the tokenizer puts around it stays."""
    return end_of(lambda special: tokenizer.encode(text, add_special=special), most, add_special=add_special)


def end_of(encode: Callable[[bool], list[int]], most: int | None, *, add_special: bool) -> list[int]:
    """The same of what `encode` gives, with what the tokenizer puts around it or without."""
    tokens = encode(add_special)
    if most is None or len(tokens) <= most:
        return tokens
    bare = encode(False)
    room = most - (len(tokens) - len(bare))
    first = next((place for place in range(len(tokens)) if tokens[place : place + len(bare)] == bare), None)
    if first is None or room < 1:
        return list(last_tokens(tokens, most))
    return [*tokens[:first], *bare[-room:], *tokens[first + len(bare) :]]


def last_tokens(tokens: Sequence[int], most: int | None) -> Sequence[int]:
    """The last tokens, at most so many."""
    return tokens if most is None or len(tokens) <= most else tokens[-most:]
