"""Stop strings in a stream of text: what may still become one is held back, everything else is given out at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phonograph.errors import RequestError


@dataclass
class _State:
    """The longest end of the text so far that begins some stop string (Aho and Corasick's automaton)."""

    depth: int
    """How long that end is."""
    next: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None
    """The state of the next shorter such end."""
    hit: str | None = None
    """The longest stop string that is complete here."""


class StopStrings:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    Of two that are completed by the same character the longer one counts, so that nothing of it is given out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"reading stop strings: found {stops!r}; expected a list of strings that are not empty.")
        self._start = _automaton(stops)
        self._state = self._start
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that can be given out, and the stop string that ends it if one is found; nothing comes after it."""
        if self.hit is not None:
            return "", self.hit
        if not self._start.next:
            return text, None
        state, held = self._state, self._held + text
        for place in range(len(self._held), len(held)):
            state = _step(self._start, state, held[place])
            if state.hit is not None:
                self._held, self.hit = "", state.hit
                return held[: place + 1 - len(state.hit)], state.hit
        self._state, self._held = state, held[len(held) - state.depth :]
        return held[: len(held) - state.depth], None

    def flush(self) -> str:
        """What is still held back, when no more text comes."""
        rest, self._held, self._state = self._held, "", self._start
        return rest


def _step(start: _State, state: _State, char: str) -> _State:
    while char not in state.next:
        if state.shorter is None:
            return start
        state = state.shorter
    return state.next[char]


def _automaton(stops: Sequence[str]) -> _State:
    start = _State(0)
    for stop in stops:
        state = start
        for char in stop:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.hit = stop
    # Shorter states first: each is finished before the longer ones look at it.
    waiting = deque(start.next.values())
    for state in waiting:
        state.shorter = start
    while waiting:
        state = waiting.popleft()
        for char, longer in state.next.items():
            longer.shorter = _step(start, state.shorter or start, char)
            longer.hit = longer.hit or longer.shorter.hit
            waiting.append(longer)
    return start
