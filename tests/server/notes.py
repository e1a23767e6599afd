"""An observer for tests."""

from __future__ import annotations

from typing import Any

from phonograph.engine.process.traces import SequenceTrace
from phonograph.engine.requests.request import FinishReason, Request


class Notes:
    """Writes down what an observer is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.traces: list[SequenceTrace] = []

    def started(self, request: Request) -> None:
        self.events.append(("started", request.id))

    def first_token(self, seconds: float) -> None:
        self.events.append(("first_token", seconds))

    def token_gap(self, seconds: float) -> None:
        self.events.append(("token_gap", seconds))

    def finished(
        self, reason: FinishReason, prompt_tokens: int, output_tokens: int, cached_tokens: int, seconds: float
    ) -> None:
        self.events.append(("finished", reason, prompt_tokens, output_tokens, cached_tokens, seconds))

    def traced(self, trace: SequenceTrace) -> None:
        self.traces.append(trace)

    def rejected(self, reason: str) -> None:
        self.events.append(("rejected", reason))

    def names(self) -> list[str]:
        return [event[0] for event in self.events]
