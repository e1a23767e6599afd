"""TokenIds: the ids of prompts and outputs in responses, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from phonograph.engine.process.generation import Delta

_CHARS = 8
"""Of a token id in a response."""


class TokenIds:
    """Of one response: ids of its prompts, each with `n` choices, and of what is new; nothing without prompts."""

    def __init__(self, prompts: Sequence[Sequence[int]] = (), n: int = 1) -> None:
        self._prompts = prompts
        self._n = n
        self._told: set[int] = set()

    @property
    def size(self) -> int:
        """Of the prompts' ids, in characters."""
        return _CHARS * self._n * sum(map(len, self._prompts))

    def output(self, delta: Delta) -> list[int] | UnsetType:
        """Those of a delta."""
        return delta.tokens if self._prompts else UNSET

    def prompt(self, choice: int = 0) -> Sequence[int] | UnsetType:
        """Those of a choice's prompt, the first time that they are asked for."""
        if not self._prompts or choice in self._told:
            return UNSET
        self._told.add(choice)
        return self._prompts[choice // self._n]
