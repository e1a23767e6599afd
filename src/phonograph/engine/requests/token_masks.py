"""TokenMasks and BadWords: the tokens that a request's own fields allow, as bit masks.

What depends on how many tokens there are is written to the request tables once, and looked up by position on the
device: such a sequence runs ahead. What depends on which tokens there are is a constraint, as a grammar is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phonograph.engine.requests.constraints import Constraint
from phonograph.engine.requests.request import Request

Words = np.ndarray[Any, np.dtype[np.int32]]
"""A bit for every token, packed into int32, the lowest first."""
_BITS = 32
_ALL = np.uint32(2**32 - 1)


def packed(allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> Words:
    """Bits of truths, one for each token."""
    padded = np.zeros(-(-len(allowed) // _BITS) * _BITS, dtype=bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.dtype("<i4")).astype(np.int32, copy=False)


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """Which tokens may be generated before a length is reached, and from there on."""

    early: Words
    late: Words
    least_length: int
    """Tokens of prompt and output together from which on `late` holds."""

    @classmethod
    def of(cls, request: Request, vocab: int, eos_ids: Iterable[int]) -> TokenMasks | None:
        """Those of a request, for all of its sequences; None where every token may come at any time."""
        params = request.params
        single = [word[0] for word in params.bad_token_ids if len(word) == 1]
        if params.allowed_token_ids is None and not single and not params.min_tokens:
            return None
        allowed = np.ones(vocab, dtype=bool)
        if params.allowed_token_ids is not None:
            allowed[:] = False
            allowed[list(params.allowed_token_ids)] = True
        allowed[single] = False
        late = packed(allowed)
        if not params.min_tokens:
            return cls(late, late, 0)
        # Of a vocabulary that a checkpoint has rows for in part, an end may be outside: it can't come anyway.
        ends = {*params.stop_token_ids, *eos_ids}
        allowed[[token for token in ends if token < vocab]] = False
        return cls(packed(allowed), late, len(request.prompt) + params.min_tokens)


class BadWords:
    """Tokens in a row that may not be generated; what comes next may be under another constraint too."""

    def __init__(self, words: Sequence[tuple[int, ...]], vocab: int, within: Constraint | None) -> None:
        self._words = words
        self._within = within
        self._longest = max(map(len, words), default=1)
        self._last: list[int] = []
        """As many of the latest tokens as can matter."""
        self._all = packed(np.ones(vocab, dtype=bool))

    def mask(self) -> Words:
        mask = self._all.copy()
        if self._within is not None:
            allowed = self._within.mask()
            count = min(len(mask), len(allowed))
            mask[:count] &= allowed[:count]
            mask[count:] = 0
        for *before, last in self._words:
            if not before or self._last[-len(before) :] == before:
                mask.view(np.uint32)[last // _BITS] &= _ALL ^ np.uint32(1 << last % _BITS)
        return mask

    def accept(self, token: int) -> None:
        if self._within is not None:
            self._within.accept(token)
        self._last = [*self._last, token][-self._longest :]


def constrained(request: Request, vocab: int, constraints: Sequence[Constraint]) -> Sequence[Constraint]:
    """One constraint for each sequence of a request whose next token depends on those before; `constraints` are those
    of its grammar, if it has one."""
    words = [word for word in request.params.bad_token_ids if len(word) > 1]
    if not words:
        return constraints
    grammars: Sequence[Constraint | None] = constraints or [None] * request.params.n
    return [BadWords(words, vocab, within) for within in grammars]
