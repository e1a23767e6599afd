"""ContentGuard: special tokens that are written in a chat's messages, encoded as the text that they look like.

A user who writes `<|im_end|>` into a message would otherwise end it, and could begin one of the system's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from phonograph.engine.text.tokenizer import Tokenizer

_BEGIN, _END = "\ue001", "\ue002"
"""Characters that are assigned to nothing; what is hidden stands between them as a number."""
_STEP = 32 << 10
"""Characters that are searched in one call, which holds the interpreter's lock."""
_HIDDEN = re.compile(f"{_BEGIN}(\\d+){_END}")


class ContentGuard:
    """Hides special tokens in messages while a template writes them out, and encodes the written text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {text for token in tokenizer.special_ids if (text := tokenizer.token_text(token))}
        self._texts = [_BEGIN, *sorted(special, key=lambda text: (-len(text), text))]
        """The mark itself is hidden too: what a message has of it is not taken for ours."""
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._pattern = re.compile("|".join(map(re.escape, self._texts)))
        self._longest = max(map(len, self._texts))

    def encoded(self, render: Callable[[Callable[[Any], Any]], str]) -> list[int]:
        """The ids of what `render` writes; it is given a function that hides special tokens in what it writes."""
        return self.written(render)(False)

    def written(self, render: Callable[[Callable[[Any], Any]], str]) -> Callable[[bool], list[int]]:
        """What `render` writes, to be encoded with what the tokenizer puts around a text, or without."""
        has_hidden = False

        def hide(value: Any) -> Any:
            nonlocal has_hidden
            if not any(self._next(text, 0) for text in _texts_in(value)):
                return value
            has_hidden = True
            return self._hidden(value)

        text = render(hide)
        if has_hidden:
            return lambda special: self._encoded(text, special)
        return lambda special: self._tokenizer.encode(text, add_special=special)

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            parts: list[str] = []
            place = 0
            while found := self._next(value, place):
                parts += (value[place : found.start()], f"{_BEGIN}{self._numbers[found[0]]}{_END}")
                place = found.end()
            return "".join([*parts, value[place:]])
        if isinstance(value, dict):
            return {self._hidden(name): self._hidden(part) for name, part in value.items()}
        return [self._hidden(part) for part in value] if isinstance(value, list | tuple) else value

    def _next(self, text: str, place: int) -> re.Match[str] | None:
        """The next special token in a text, looked for in steps: others wait for one of them and not for all."""
        while place < len(text):
            if found := self._pattern.search(text, place, place + _STEP):
                return found
            place += _STEP - self._longest + 1
        return None

    def _encoded(self, written: str, add_special: bool) -> list[int]:
        """As a whole, so that all around is as it would be; then each that was hidden is spelled in its place."""
        parts: list[str] = []
        hidden: list[tuple[int, int]] = []
        place = size = 0
        for found in _HIDDEN.finditer(written):
            shown = self._texts[int(found[1])]
            size += found.start() - place
            hidden.append((size, size + len(shown)))
            parts += (written[place : found.start()], shown)
            size, place = size + len(shown), found.end()
        text = "".join([*parts, written[place:]])
        return self._spelled_in(text, hidden, add_special)

    def _spelled_in(self, text: str, hidden: list[tuple[int, int]], add_special: bool) -> list[int]:
        """The ids of a text, with special tokens at these places of it spelled by others."""
        tokens, span_of = self._tokenizer.encode_places(text, add_special=add_special)
        ids: list[int] = []
        number = 0
        for place, token in enumerate(tokens):
            span = span_of(place) if token in self._tokenizer.special_ids else None
            if span is not None:
                while number < len(hidden) and hidden[number][1] <= span[0]:
                    number += 1
                if number < len(hidden) and hidden[number][0] < span[1]:
                    ids += self._spelled(text[span[0] : span[1]])
                    continue
            ids.append(token)
        return ids

    def _spelled(self, text: str) -> list[int]:
        """The tokens of a text, none of which is special: its first character, and the rest."""
        found = [token for part in (text[:1], text[1:]) if part for token in self._tokenizer.encode_exactly(part)]
        if self._tokenizer.special_ids.isdisjoint(found):
            return found
        return [token for char in text for token in self._tokenizer.encode_exactly(char)]


def _texts_in(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            waiting.extend(found)
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
