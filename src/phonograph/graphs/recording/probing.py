"""Probes: eager runs at sizes that no recording has, which show the dim that each axis of an output follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phonograph.graphs.inputs.tree import TreePath
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.recording.outputs import Run, trimmed_axes

Probe = Callable[[Mapping[str, int]], Run]
"""Runs the body at these sizes, or raises."""


@dataclass(frozen=True)
class Trimming:
    """How the outputs of some recordings are trimmed, and how far that is known."""

    axes: dict[TreePath, dict[int, str]] = field(default_factory=dict)
    tried: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By dim with a limit, the sizes below it that the body ran at. Where there are none, batches must fill it."""


def find_trimming(phase: Phase, smallest: int, recorded: Sequence[Run], probe: Probe, *, exact: bool) -> Trimming:
    """Trimming from the runs of all buckets, and from probes that change one dim alone, so that no axis follows two.

    Sizes go down to 1: an axis that is clamped at some length shows that only below it. A body of one bucket must run
    at one other size at least; raises the last attempt's error.
    """
    runs, tried = list(recorded[-1:] if exact else recorded), dict[str, tuple[int, ...]]()
    if not exact:
        runs += _tries(_bucketed(phase, smallest, alone=len(recorded) == 1), probe, must_run=len(recorded) == 1)
    for name, dim in phase.all_dims.items():
        if dim.limit is not None:
            ran = _tries((phase.padded(smallest) | {name: size} for size in _below(dim.limit)), probe, must_run=False)
            tried[name] = tuple(run.sizes[name] for run in ran)
            runs += ran
    return Trimming(trimmed_axes(runs), tried)


def _bucketed(phase: Phase, smallest: int, *, alone: bool) -> Iterator[Mapping[str, int]]:
    """Sizes of the bucketed dim to probe: few where buckets of several sizes have run."""
    several = _below(smallest) if smallest > phase.smallest else (smallest + 1,)
    tried = several if alone else (phase.smallest,)
    return (phase.padded(size) for size in tried if size != smallest and size >= phase.smallest)


def _below(size: int) -> tuple[int, ...]:
    if size == 1:
        return (0,)
    return tuple(dict.fromkeys(one for one in (size - 1, -(-size // 2), 2, 1) if 0 < one < size))


def _tries(extents: Iterator[Mapping[str, int]], probe: Probe, *, must_run: bool) -> list[Run]:
    runs: list[Run] = []
    failed: Exception | None = None
    for sizes in extents:
        try:
            runs.append(probe(sizes))
        except Exception as error:
            failed = error
    if must_run and not runs and failed is not None:
        raise failed
    return runs
