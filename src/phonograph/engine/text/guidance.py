"""Grammars through `llguidance`: JSON schemas, regular expressions, choices and Lark."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any

import numpy as np

from phonograph.engine.request import GrammarSpec
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import RequestError

INSTALL = "pip install 'phonograph[grammar]'"
_MOST_WORDS = 500
"""Characters of a library's explanation that a message takes."""


class Guidance:
    """Compiles grammars for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made: Any = None
        self._making = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary; without the library, nothing: who asks for a grammar will hear of it."""
        with suppress(RequestError):
            self._vocabulary(_library())

    def _vocabulary(self, library: Any) -> Any:
        with self._making:
            if self._made is None:
                eos = list(self._tokenizer.eos_ids)
                try:
                    self._made = library.LLTokenizer(self._tokenizer.to_json(), eos_token=eos)
                except ValueError as error:
                    problem = f"this model's vocabulary can't follow a grammar: {error}"
                    raise RequestError(f"{problem}. Leave the grammar out.") from None
            return self._made

    def start(self, spec: GrammarSpec, count: int = 1) -> list[GuidedText]:
        """The beginnings of so many texts that follow the grammar; one that makes no sense is refused."""
        library = _library()
        vocabulary = self._vocabulary(library)
        try:
            first = library.LLMatcher(vocabulary, _grammar_of(spec, library.LLMatcher), log_level=0)
            problem = first.get_error() if first.is_error() else ""
        except ValueError as error:
            problem = str(error)
        if problem:
            why = _on_one_line(problem)
            raise RequestError(f"the {spec.kind} grammar can't be followed: {why}. Correct it, or leave it out.")
        return [GuidedText(first), *(GuidedText(first.deep_copy()) for _ in range(count - 1))]


class GuidedText:
    """How far one text is in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> Any:
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise RequestError(f"following the grammar: {_on_one_line(self._matcher.get_error())}")


def _on_one_line(problem: str) -> str:
    """The library's words; it puts the reason below the place."""
    return "; ".join(line.strip() for line in problem.splitlines() if line.strip(" ^~-|")).rstrip(".")[:_MOST_WORDS]


def _grammar_of(spec: GrammarSpec, matcher: Any) -> str:
    if spec.kind == "regex":
        found: str = matcher.grammar_from_regex(spec.text)
    elif spec.kind == "lark":
        found = matcher.grammar_from_lark(spec.text)
    elif spec.kind == "choice":
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(spec.text))
        found = matcher.grammar_from_lark(f"start: {options}")
    else:
        found = matcher.grammar_from_json_schema(spec.text)
    return found


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(f"output that follows a grammar needs llguidance. Run: {INSTALL}") from None
    return llguidance
