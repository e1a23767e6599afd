"""EngineStats: counters and state of the engine, as plain values that can be sent to another process."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.speculation import round_times
from phonograph.engine.scheduling.counts import Counts
from phonograph.graphs.phases.decisions import Reason, ShapeKey, Stats
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.coverage import Coverage


class RecordingStats(msgspec.Struct, frozen=True):
    """One recording of a phase, or the capture of one that failed."""

    label: str
    """The shape key, e.g. `decode[seqs=8, sampling=sampled]`."""
    size: int
    axes: str
    """The values of the axes that are not plain, and which inputs its batches lack; empty for the plain ones."""
    num_graphs: int
    num_bytes: int
    replays: int
    used_rows: int
    error: str = ""
    """Why the capture failed; batches of this bucket then run eagerly."""
    mistrusted: str = ""
    """How a replay differed from the eager path, and where the reproducer is; such a recording is released."""

    @property
    def is_there(self) -> bool:
        """Whether it can be replayed."""
        return not self.error and not self.mistrusted

    @property
    def padded_rows(self) -> int:
        """Padding: rows that replays computed without a sequence."""
        return self.replays * self.size - self.used_rows


class EagerStats(msgspec.Struct, frozen=True):
    """The calls that ran eagerly for one reason."""

    reason: str
    calls: int
    detail: str
    """Of the latest of them."""


class CoverageStats(msgspec.Struct, frozen=True):
    """Which batches of a phase that may come have a graph, by size and product."""

    smallest: int
    largest: int
    products: int
    batches: int
    """Sizes × products."""
    covered: int
    worst_used: int
    """The size whose replay computes the largest share of padding; 0 where nothing is replayed."""
    worst_padded: int
    gaps: tuple[str, ...]
    """The sizes of a product that run eagerly or are refused, why, and what a batch of them takes, where measured."""

    @property
    def is_full(self) -> bool:
        return self.covered == self.batches


class PhaseStats(msgspec.Struct, frozen=True):
    """What a phase has captured, and what became of its calls."""

    name: str
    backend: str
    dim: str
    """What its buckets count: `seqs` or `tokens`."""
    recordings: tuple[RecordingStats, ...]
    eager: tuple[EagerStats, ...]
    device_seconds: dict[str, float]
    """By path, `replay` or `eager`; empty where the executor does not time its passes."""
    left_out: tuple[str, ...] = ()
    """The recordings that the plan's bound has no room for, by product."""
    coverage: CoverageStats | None = None
    """None for a phase that serves no requests."""
    verified: str = ""
    """What was checked against eager before the first request; empty where nothing was."""
    num_checks: int = 0
    num_verified: int = 0
    """Recordings that were checked."""

    @property
    def replays(self) -> int:
        return sum(recording.replays for recording in self.recordings)

    @property
    def eager_calls(self) -> int:
        return sum(eager.calls for eager in self.eager)


class PassTimeStats(msgspec.Struct, frozen=True):
    """Passes, and the device time of all of them, of which some were measured."""

    passes: int
    seconds: float


class SpeculationStats(msgspec.Struct, frozen=True):
    """Acceptance of drafted tokens."""

    rounds: int
    """Rounds of sequences for which tokens were drafted."""
    tokens: int
    """Tokens that those brought, the target's own included."""
    drafted: tuple[int, ...]
    """By place in the round; a draft after the last token that its sequence may have is none."""
    accepted: tuple[int, ...]
    """By place in the round."""
    plain: dict[str, int]
    """Steps in which a sequence decoded one token, by reason."""
    steps: dict[str, int]
    """Steps with sequences that decode, by kind: `round` or `plain`."""
    times: dict[str, PassTimeStats]
    """Device time of such steps, those with prompts left out, by kind; of a kind that there was."""
    probed: int = 0
    """Sequences whose drafts were compared with the tokens of plain steps."""
    probed_tokens: int = 0
    """Tokens that rounds would have brought these, the target's own included."""


class EngineStats(msgspec.Struct, frozen=True):
    """State and counters of the engine; counters only grow in the life of a core."""

    clock: float
    """When it was gathered, in seconds of the core's monotonic clock."""
    running: int
    """Sequences that hold a row."""
    waiting: int
    total_pages: int
    free_pages: int
    cached_pages: int
    used_pages: int
    page_size: int
    steps: int
    prompt_tokens: int
    prefill_tokens: int
    generated_tokens: int
    preemptions: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    phases: tuple[PhaseStats, ...]
    shadow_checks: int = 0
    """Replays that ran a second time, eagerly."""
    shadow_mismatches: int = 0
    """Those whose replay gave other bits."""
    speculation: SpeculationStats | None = None
    """None where nothing is drafted."""
    is_strict: bool = False
    """Whether a step without a graph fails its requests."""

    @property
    def kv_use(self) -> float:
        """The share of pages that sequences hold."""
        return self.used_pages / self.total_pages if self.total_pages else 0.0


def engine_stats(core: EngineCore[Executor]) -> EngineStats:
    """Gather all figures; reads counters only, so it can be called between any two steps."""
    counts, limits, executor = core.scheduler.counts, core.scheduler.limits, core.executor
    shadow, seconds = executor.shadow, executor.timing.seconds
    return EngineStats(
        clock=time.monotonic(),
        total_pages=limits.num_pages - 1,
        page_size=limits.page_size,
        phases=tuple(
            phase_stats(name, runner, seconds, executor.coverage_of(name)) for name, runner in executor.runners.items()
        ),
        shadow_checks=shadow.num_checked if shadow is not None else 0,
        shadow_mismatches=shadow.num_wrong if shadow is not None else 0,
        speculation=_speculation_stats(core) if limits.tokens_per_row > 1 else None,
        is_strict=any(runner.options.strict for runner in executor.runners.values()),
        **_counted(counts),
    )


def _speculation_stats(core: EngineCore[Executor]) -> SpeculationStats:
    found = core.speculation.counts
    return SpeculationStats(
        found.rounds,
        found.tokens,
        found.drafted,
        found.accepted,
        dict(found.plain),
        dict(found.steps.items()),
        {kind: PassTimeStats(*time) for kind, time in round_times(core.executor).items()},
        found.probed,
        found.probed_tokens,
    )


def _counted(counts: Counts) -> dict[str, int]:
    return {
        "running": counts.running,
        "waiting": counts.waiting,
        "free_pages": counts.free_pages,
        "cached_pages": counts.cached_pages,
        "used_pages": counts.used_pages,
        "steps": counts.steps,
        "prompt_tokens": counts.prompt_tokens,
        "prefill_tokens": counts.prefill_tokens,
        "generated_tokens": counts.generated_tokens,
        "preemptions": counts.preemptions,
        "prefix_lookup_tokens": counts.prefix_lookup_tokens,
        "prefix_hit_tokens": counts.prefix_hit_tokens,
    }


def phase_stats(
    name: str, runner: Runner, timed: Mapping[tuple[str, str], float], covered: Coverage | None = None
) -> PhaseStats:
    """The figures of one phase."""
    stats = runner.stats
    rows = {row.key: row for row in runner.report.rows} if runner.report is not None else {}
    captured = frozenset(runner.captured)
    shown = sorted({*captured, *rows}, key=lambda key: key.in_table_order)
    recordings = []
    for key in shown:
        row = rows.get(key)
        made = _recording_stats(key, stats, row.num_bytes if row else 0)
        if key in captured:
            made = replace(made, num_graphs=len(runner.recording(key).graphs))
        elif (refusal := runner.refused.get(key)) is not None and refusal.reason is Reason.MISTRUSTED:
            made = replace(made, num_bytes=0, mistrusted=refusal.detail)
        else:
            made = replace(made, error=str(row.error) if row is not None else "")
        recordings.append(made)
    eager = tuple(EagerStats(r.value, calls, stats.details[r]) for r, calls in stats.eager.most_common())
    seconds = {path: value for (phase, path), value in timed.items() if phase == name}
    left_out = tuple(map(str, runner.selection.left_out)) if runner.selection is not None else ()
    stated = _coverage_stats(covered) if covered is not None else None
    verified = runner.verified
    return PhaseStats(
        name,
        runner.plan.backend,
        runner.phase.bucketed,
        tuple(recordings),
        eager,
        seconds,
        left_out,
        stated,
        verified.summary if verified is not None else "",
        verified.num_checks if verified is not None else 0,
        verified.num_recordings if verified is not None else 0,
    )


def _coverage_stats(covered: Coverage) -> CoverageStats:
    used, key = covered.worst if covered.worst is not None else (0, None)
    return CoverageStats(
        smallest=covered.sizes.start,
        largest=covered.sizes.stop - 1,
        products=covered.num_products,
        batches=covered.num_batches,
        covered=covered.num_covered,
        worst_used=used,
        worst_padded=key.size if key is not None else 0,
        gaps=tuple(map(str, covered.gaps)),
    )


def _recording_stats(key: ShapeKey, stats: Stats, num_bytes: int) -> RecordingStats:
    counts = stats.recordings[key]
    return RecordingStats(str(key), key.size, key.axes, 0, num_bytes, counts.replays, counts.used_rows)
