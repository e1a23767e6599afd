"""Constraint protocol: which tokens a grammar allows a sequence next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from phonograph.engine.requests.request import GrammarSpec


class Constraint(Protocol):
    """How far one sequence is in its grammar."""

    def mask(self) -> Any:
        """A bit for every token, packed into an int32 array; set where the token may come next."""
        ...

    def accept(self, token: int) -> None:
        """Go on with a token that was picked."""
        ...


class GrammarCompiler(Protocol):
    """Makes constraints; one that can't be made is a RequestError."""

    def prepare(self) -> None:
        """Make now what the first constraint would make."""
        ...

    def start(self, spec: GrammarSpec, count: int = 1) -> Sequence[Constraint]:
        """For `count` sequences, each at its beginning."""
        ...
