"""Request log: a line for each request; its texts only where `--log-prompts` is on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from phonograph.engine.process.generation import Delta, Generation
from phonograph.server.http.failures import failure_of

log = logging.getLogger("phonograph.requests")

_MOST_WORDS = 1000
"""Characters of a reason that a log line shows."""


class RequestLog:
    """Follows one request to its end."""

    def __init__(self, name: str, *, with_texts: bool) -> None:
        self._name = name
        self._with_texts = with_texts
        self._texts: dict[int, str] = {}
        self._begin = time.monotonic()

    def prompt(self, text: object) -> None:
        """The prompt of the request."""
        if self._with_texts:
            log.info("%s prompt: %r", self._name, text)

    def outputs(self, deltas: Sequence[Delta]) -> None:
        """What the model generated."""
        if self._with_texts:
            for delta in deltas:
                self._texts[delta.choice] = self._texts.get(delta.choice, "") + delta.text

    def failed(self, error: Exception) -> str:
        """The outcome of a request that failed; what is wrong with a request may quote it."""
        failure = failure_of(error)
        why = " ".join((failure.detail or str(error)).split())[:_MOST_WORDS]
        return f"failed ({why})" if self._with_texts or failure.status >= 500 else f"failed (status {failure.status})"

    def end(self, generation: Generation, outcome: str) -> None:
        """Log the outcome, with token counts and seconds."""
        for choice, text in self._texts.items():
            log.info("%s output %d: %r", self._name, choice, text)
        usage, seconds = generation.usage, time.monotonic() - self._begin
        log.info(
            "%s %s: %d prompt tokens (%d cached), %d output tokens in %.3f s",
            *(self._name, outcome, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, seconds),
        )
