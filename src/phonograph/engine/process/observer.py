"""Observer protocol: request lifecycle events, for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phonograph.engine.process.traces import SequenceTrace
from phonograph.engine.requests.request import FinishReason, Request


class Observer(Protocol):
    """Called in the event loop of `AsyncLLM`, once for each event: it must return at once and may not raise."""

    def started(self, request: Request) -> None:
        """A request went to the engine core."""

    def first_token(self, seconds: float) -> None:
        """A sequence's first token came, `seconds` after its request arrived."""

    def token_gap(self, seconds: float) -> None:
        """Further tokens of a sequence came, `seconds` after those before."""

    def finished(
        self, reason: FinishReason, prompt_tokens: int, output_tokens: int, cached_tokens: int, seconds: float
    ) -> None:
        """A sequence ended, `seconds` after its request arrived; `cached_tokens` of its prompt were not computed."""

    def traced(self, trace: SequenceTrace) -> None:
        """The core's trace of a sequence that ended; none for one whose core died."""

    def rejected(self, reason: str) -> None:
        """A request was rejected: `queue_full`, `draining`, `down`, `invalid`, …: a closed set, fit for a label."""


class Observers:
    """Passes each event on to several observers."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def started(self, request: Request) -> None:
        for observer in self._observers:
            observer.started(request)

    def first_token(self, seconds: float) -> None:
        for observer in self._observers:
            observer.first_token(seconds)

    def token_gap(self, seconds: float) -> None:
        for observer in self._observers:
            observer.token_gap(seconds)

    def finished(
        self, reason: FinishReason, prompt_tokens: int, output_tokens: int, cached_tokens: int, seconds: float
    ) -> None:
        for observer in self._observers:
            observer.finished(reason, prompt_tokens, output_tokens, cached_tokens, seconds)

    def traced(self, trace: SequenceTrace) -> None:
        for observer in self._observers:
            observer.traced(trace)

    def rejected(self, reason: str) -> None:
        for observer in self._observers:
            observer.rejected(reason)
