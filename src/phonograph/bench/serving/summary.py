"""Summary of a load test: throughput, percentiles, errors by kind; as values, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from phonograph.bench.figures import PERCENTILES, percentile
from phonograph.bench.serving.outcome import Outcome

HOW_ITL = (
    "inter-token latency: time between arrivals of a stream, shared evenly by the tokens that arrive together; "
    "every token after the first arrival counts once"
)


@dataclass(frozen=True)
class LatencySummary:
    """Mean and nearest-rank percentiles, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    highest: float


@dataclass(frozen=True)
class Summary:
    """What a load test found."""

    seconds: float
    """From the first request sent to the end of the last response."""
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    mean_running: float
    """Requests under way, averaged over time."""
    first_token: LatencySummary | None
    token_gap: LatencySummary | None
    longest_gap: LatencySummary | None
    """For each request, its longest wait between two arrivals."""
    request: LatencySummary | None
    tokens_per_event: float
    counts_events: bool
    """Whether events stand for tokens, since the endpoint reports no usage."""
    without_text: int
    """Requests with tokens and no text: they are timed by whatever events came."""
    late: float
    """How late the client itself sent a request, 99th percentile: its own load, not the server's."""
    errors: dict[str, int]
    examples: dict[str, str]
    """One detail for each kind of error."""

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "how_token_gap": HOW_ITL}


def latency_summary(values: Sequence[float], weights: Sequence[float] | None = None) -> LatencySummary | None:
    """None for no values; a weight says how often a value counts."""
    if not values:
        return None
    p50, p95, p99 = (percentile(values, percent, weights) for percent in PERCENTILES)
    return LatencySummary(float(np.average(values, weights=weights)), p50, p95, p99, max(values))


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """The figures; latencies are of completed requests, and time and tokens of all that was sent."""
    done = [one for one in outcomes if not one.error]
    failed = [one for one in outcomes if one.error]
    seconds = max((one.end for one in outcomes), default=0.0) - min((one.sent for one in outcomes), default=0.0)
    gaps = [gap for one in done for gap in one.token_gaps()]
    tokens, events = sum(one.output_tokens for one in done), sum(one.num_events for one in done)
    late = latency_summary([one.sent - one.due for one in outcomes])
    return Summary(
        seconds=seconds,
        completed=len(done),
        failed=len(failed),
        prompt_tokens=sum(one.prompt_tokens for one in done),
        output_tokens=tokens,
        requests_per_second=len(done) / seconds if seconds else 0.0,
        output_tokens_per_second=tokens / seconds if seconds else 0.0,
        mean_running=sum(one.seconds for one in outcomes) / seconds if seconds else 0.0,
        first_token=latency_summary([one.first_token_seconds for one in done]),
        token_gap=latency_summary([value for value, _ in gaps], [weight for _, weight in gaps]),
        longest_gap=latency_summary([one.longest_gap for one in done if len(one.arrivals) > 1]),
        request=latency_summary([one.seconds for one in done]),
        tokens_per_event=tokens / events if events else 0.0,
        counts_events=any(one.usage_tokens is None for one in done),
        without_text=sum(not one.has_text for one in done),
        late=late.p99 if late else 0.0,
        errors=dict(Counter(one.error for one in failed).most_common()),
        examples={one.error: one.detail for one in reversed(failed) if one.detail},
    )


def table(summary: Summary) -> str:
    """One table for people."""
    lines = [
        f"{'requests':<24} {summary.completed:,} completed, {summary.failed:,} failed in {summary.seconds:.2f} s",
        f"{'throughput':<24} {summary.requests_per_second:,.2f} requests/s, "
        f"{summary.output_tokens_per_second:,.1f} output tokens/s",
        f"{'tokens':<24} {summary.prompt_tokens:,} prompt, {summary.output_tokens:,} output "
        f"({summary.tokens_per_event:.2f} an event)",
        f"{'running, on average':<24} {summary.mean_running:,.1f}",
        "",
        f"{'':<24} {'mean':>10} {'p50':>10} {'p95':>10} {'p99':>10} {'highest':>10}",
    ]
    for name, found in (
        ("time to first token", summary.first_token),
        ("inter-token latency", summary.token_gap),
        ("longest gap of a stream", summary.longest_gap),
        ("end to end", summary.request),
    ):
        figures = [found.mean, found.p50, found.p95, found.p99, found.highest] if found else []
        cells = [f"{shown(value):>10}" for value in figures] or [f"{'–':>10}"] * 5
        lines.append(f"{name:<24} {' '.join(cells)}")
    if summary.errors:
        lines += ["", "errors"]
        for kind, count in summary.errors.items():
            example = summary.examples.get(kind, "")
            lines.append(f"  {count:>6,} {kind}{f': {example}' if example else ''}")
    return "\n".join(lines)


def shown(seconds: float) -> str:
    """A time as people write it."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
