"""Guidance: grammars through `llguidance`: JSON schemas, regular expressions, choices and Lark."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import tokenizers

from phonograph.engine.requests.request import GrammarSpec
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import RequestError

INSTALL = "pip install 'phonograph[grammar]'"
_ANY_FIELD = "grammar"
"""The field of errors that no request sees."""
_MOST_WORDS = 300
"""Characters of a library's explanation that a message takes."""


class Guidance:
    """Compiles grammars for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made: Any = None
        self._making = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary; without the library nothing: a request with a grammar will be refused."""
        with suppress(RequestError):
            self._vocabulary(_library(_ANY_FIELD), _ANY_FIELD)

    def _vocabulary(self, library: Any, field: str) -> Any:
        with self._making:
            if self._made is None:
                try:
                    self._made = _Vocabulary(self._tokenizer).for_library(library)
                except ValueError as error:
                    problem = f"this model's vocabulary can't follow a grammar: {error}"
                    raise RequestError(f"{problem}. Leave the grammar out.", field=field) from None
            return self._made

    def start(self, spec: GrammarSpec, count: int = 1) -> list[GuidedText]:
        """The beginnings of `count` texts that follow the grammar; one that makes no sense is refused."""
        library = _library(spec.field)
        vocabulary = self._vocabulary(library, spec.field)
        try:
            limits = library.LLParserLimits(verbose_errors=False)  # else errors quote the library's own state
            grammar = _grammar_of(spec, library.LLMatcher)
            first = GuidedText(library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits), spec.field)
        except (ValueError, _DeadEndError) as error:
            why = _on_one_line(str(error))
            problem = f"the {spec.kind} grammar can't be followed: {why}. Correct it, or leave it out."
            raise RequestError(problem, field=spec.field) from None
        return [first, *(first.again() for _ in range(count - 1))]


class _Vocabulary:
    """A model's tokens, and texts as tokens, in the form that `llguidance` takes.

    Special tokens and those that end an output are never part of a text: one that has the characters of `<|im_end|>`
    in it is spelled with other tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self._backend.encode_special_tokens = True
        self._bytes = tokenizer.token_bytes
        self._greedy: Callable[[str], list[int]] = lambda text: []
        size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_ids = list(tokenizer.eos_ids)
        if not self.eos_ids:
            raise ValueError("it has no end-of-sequence token")
        if max(self.eos_ids) >= size:
            raise ValueError(f"its end-of-sequence token {max(self.eos_ids)} is not among its {size} tokens")
        self.eos_token_id = self.eos_ids[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(tokenizer.special_ids.union(self.eos_ids))
        self._special = frozenset(self.special_token_ids)

    def for_library(self, library: Any) -> Any:
        made = library.LLTokenizer(self, eos_token=self.eos_ids)
        self._greedy = made.greedy_tokenize
        return made

    def __call__(self, text: str) -> list[int]:
        """The tokens whose bytes are exactly those of a text."""
        wanted = text.encode()
        for before in ("", "\n"):  # some vocabularies put a space in front of a text, unless something is there
            found = self._ending(self._backend.encode(before + text, add_special_tokens=False).ids, wanted)
            if found is not None and self._special.isdisjoint(found):
                return found
        return self._greedy(text)  # as where the vocabulary composes characters, and so changes the bytes

    def _ending(self, tokens: list[int], wanted: bytes) -> list[int] | None:
        """The last of the tokens, as many as are these bytes."""
        found = b""
        for place in reversed(range(len(tokens))):
            found = self._bytes(tokens[place]) + found
            if len(found) >= len(wanted):
                return tokens[place:] if found == wanted else None
        return None


class _DeadEndError(Exception):
    """No token can come next, or the library gives up looking for one."""


class GuidedText:
    """The state of one text in its grammar.

    What may come next is found when a token is accepted, not when a batch needs it: so a dead end is the failure of
    this text alone, and no step of the others has to be run again.
    """

    def __init__(self, matcher: Any, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._mask = self._next()

    def again(self) -> GuidedText:
        """A text of its own, as far in the grammar as this one."""
        return GuidedText(self._matcher.deep_copy(), self._field)

    def mask(self) -> Any:
        return self._mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        try:
            self._mask = self._next()
        except _DeadEndError as error:
            problem = _on_one_line(str(error))
            raise RequestError(f"following the grammar: {problem}. Correct it.", field=self._field) from None

    def _next(self) -> Any:
        matcher = self._matcher
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if matcher.is_error():
            raise _DeadEndError("no text follows it" if "NoExtension" in matcher.get_error() else matcher.get_error())
        if not mask.any():
            raise _DeadEndError("no token can come next")
        return mask


def _on_one_line(problem: str) -> str:
    """The library's words; it puts the reason below the place. A panic's words are about its own source."""
    if "panic" in problem or ".rs:" in problem:
        return "it is too complex"
    if "'coerce_one_of' option" in problem:  # an option of the library's, not of a request
        return "`oneOf` is not supported; write `anyOf`, of which several may hold"
    return "; ".join(line.strip() for line in problem.splitlines() if line.strip(" ^~-|")).rstrip(".")[:_MOST_WORDS]


def _grammar_of(spec: GrammarSpec, matcher: Any) -> str:
    if spec.kind == "regex":
        found: str = matcher.grammar_from_regex(spec.text)
    elif spec.kind == "lark":
        found = matcher.grammar_from_lark(spec.text)
    elif spec.kind == "choice":
        quoted = [json.dumps(option, ensure_ascii=False) for option in json.loads(spec.text)]
        options = " | ".join(quoted).replace("\x7f", "\\u007f")  # the one character that only JSON takes as it is
        found = matcher.grammar_from_lark(f"start: {options}")
    else:
        found = matcher.grammar_from_json_schema(spec.text)
    return found


def _library(field: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(f"output that follows a grammar needs llguidance. Run: {INSTALL}", field=field) from None
    return llguidance
