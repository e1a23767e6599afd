"""Outcome: what came of one request, and when each of its tokens arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Outcome:
    """One request as the client saw it; times are in seconds from the start of the test."""

    due: float
    sent: float = 0.0
    end: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, events with output that were read together)."""
    prompt_tokens: int = 0
    usage_tokens: int | None = None
    """Output tokens as the endpoint counts them; None if it does not say."""
    has_text: bool = True
    """Whether `arrivals` are of events with output; else of all, since none had any, and yet there are tokens."""
    error: str = ""
    """The kind of error, a few words; empty for success."""
    detail: str = ""

    @property
    def num_events(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def output_tokens(self) -> int:
        """As the endpoint says; events are counted where it says nothing."""
        return self.usage_tokens if self.usage_tokens is not None else self.num_events

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def seconds(self) -> float:
        return self.end - self.sent

    @property
    def longest_gap(self) -> float:
        """The longest wait between two arrivals; 0 where everything came at once."""
        times = [time for time, _ in self.arrivals]
        return max((late - early for early, late in pairwise(times)), default=0.0)

    def token_gaps(self) -> list[tuple[float, float]]:
        """(seconds, how many tokens waited that long since the token before).

        Tokens that arrive together share the time since the last arrival evenly. An event stands for as many tokens as
        this stream's events had on average, by the endpoint's own count.
        """
        if not self.num_events or not self.output_tokens:
            return []
        per_event = self.output_tokens / self.num_events
        gaps = []
        for (early, _), (late, events) in pairwise(self.arrivals):
            tokens = events * per_event
            gaps.append(((late - early) / tokens, tokens))
        return gaps
