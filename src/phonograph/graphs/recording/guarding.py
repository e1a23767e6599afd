"""Guarding: two runs of a shape from different samples, before it is recorded, and what they do differently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from phonograph.devices.op_trace import OpTrace
from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.fields import path_of
from phonograph.graphs.inputs.tree import Item, reachable
from phonograph.graphs.phases.context import Current
from phonograph.graphs.phases.decisions import RecordingGroup, ShapeKey
from phonograph.graphs.phases.phase import Phase, Sample
from phonograph.graphs.planning.kinds import GuardMode
from phonograph.graphs.recording.frozen_values import Difference, find_difference
from phonograph.graphs.recording.memory_names import names_of_memory

GuardedSizes = Literal["all", "ends"]
"""Every recording, or the largest and the smallest of each product; where one of these differs, the others too."""
_FIRST_SEED, _OTHER_SEEDS = 0, range(1, 7)
_MAX_NAMED = 3
_PLAIN = (bool, int, float, complex, str)


@dataclass(frozen=True)
class GuardOptions:
    """Whether the guard is on, and which recordings it checks."""

    mode: GuardMode = "refuse"
    sizes: GuardedSizes = "all"

    def __post_init__(self) -> None:
        for name, value, known in (("guard", self.mode, GuardMode), ("guarded sizes", self.sizes, GuardedSizes)):
            if value not in get_args(known):
                raise DeclarationError(f"{name} is {value!r}; expected one of {', '.join(get_args(known))}.")


@dataclass(frozen=True)
class Finding:
    """A shape whose ops depend on the sample."""

    key: ShapeKey
    difference: Difference

    def __str__(self) -> str:
        return f"{self.key}: {self.difference}"


@dataclass(frozen=True)
class Drawn:
    """A sample, and how much of every dim it uses."""

    extent: Extent
    sample: Sample


Attempt = Callable[[ShapeKey, Callable[[ShapeKey], None]], None]
"""Runs one step of a key that has not failed; what it raises is the key's failure, and ranks meet after it."""
Trace = Callable[[ShapeKey, Drawn, OpTrace], None]
"""Runs the key's body on what was drawn, followed by the trace; leaves state as it was."""


@dataclass(eq=False)
class Guard:
    """The guard of one phase."""

    phase: Phase
    trace: Trace
    measure: Callable[[Any, Mapping[str, Any]], Mapping[str, int]]
    """Takes a batch and its keyword arguments; how much of every dim they use."""
    max_others: int = 3
    """The most samples that the first is compared with; 1 where all ranks must run equally often."""
    findings: list[Finding] = field(default_factory=list)
    _first: tuple[Drawn, OpTrace] | None = None

    def look(
        self, keys: Sequence[ShapeKey], options: GuardOptions, attempt: Attempt, *, trims: bool
    ) -> dict[ShapeKey, Difference]:
        """Run the keys that the options name, each step an attempt of its own; returns all that get no recording.

        What one size shows holds for the others of its product: other samples might have shown it there too.
        """
        for key in guarded(keys, options.sizes):
            fewest = fewest_rows(key, keys) if trims else key.size
            attempt(key, self.first)
            attempt(key, partial(self.compare, fewest=fewest))
        if options.mode != "refuse":
            return {}
        by_key = {found.key: found.difference for found in self.findings}
        by_group = {key.group: difference for key, difference in by_key.items()}
        return {key: by_key.get(key, by_group[key.group]) for key in keys if key.group in by_group}

    def first(self, key: ShapeKey) -> None:
        """The run on the sample that a recording is made with."""
        self._first, drawn, trace = None, drawn_for(self.phase, key, _FIRST_SEED), self._new_trace()
        self.trace(key, drawn, trace)
        self._first = drawn, trace

    def compare(self, key: ShapeKey, fewest: int) -> None:
        """Runs on other samples, some of as few rows as the recording serves; what one does differently is noted."""
        assert self._first is not None
        (drawn, trace), self._first = self._first, None
        for other in self._others(key, fewest, drawn):
            second = self._new_trace()
            self.trace(key, other, second)
            batches = [part for one in (drawn, other) for part in (one.sample.batch, one.sample.kwargs)]
            difference = find_difference(trace, second, partial(names_of_memory, self.phase.code, batches))
            if difference is not None:
                self.findings.append(Finding(key, self._explained(difference, drawn.sample, other.sample)))
                return

    def _explained(self, difference: Difference, one: Sample, other: Sample) -> Difference:
        """With the values that the samples differ in, and that are no slot: one of them is at fault."""
        ours, theirs = _plain_values(self.phase, one), _plain_values(self.phase, other)
        apart = [path for path in (ours | theirs) if ours.get(path) != theirs.get(path)]
        if not apart:
            return difference
        more = ", …" if len(apart) > _MAX_NAMED else ""
        told = f"{difference.problem}. The samples differ in {', '.join(apart[:_MAX_NAMED])}{more}, which is no slot"
        return replace(difference, problem=told)

    def _new_trace(self) -> OpTrace:
        # What a host plan makes is put back after the run, and has its name only until then.
        planned = self.phase.host_plan is not None
        return OpTrace(find_names=partial(names_of_memory, self.phase.code) if planned else None)

    def _others(self, key: ShapeKey, fewest: int, first: Drawn) -> list[Drawn]:
        """Other valid samples; several where they differ in what is no slot, which a replay would not see.

        Where calls that differ in such values are not replayed anyway, one that is like the first.
        """
        plain = _plain_values(self.phase, first.sample)
        if self.phase.compares_others:
            drawn = list(self._drawn(key, key.size, plain))
            return ([one for one in drawn if _plain_values(self.phase, one.sample) == plain] or drawn)[:1]
        drawn = list(self._drawn(key, fewest, plain))
        unlike = {str(found): one for one in drawn if (found := _plain_values(self.phase, one.sample)) != plain}
        return list(unlike.values())[: self.max_others] or drawn[:1]

    def _drawn(self, key: ShapeKey, used: int, plain: Mapping[str, object]) -> Iterator[Drawn]:
        for seed in _OTHER_SEEDS if plain else _OTHER_SEEDS[:1]:
            yield self._partial(key, used, seed) if used < key.size else drawn_for(self.phase, key, seed)

    def _partial(self, key: ShapeKey, used: int, seed: int) -> Drawn:
        """A sample that does not fill its recording."""
        sizes = self.phase.padded(used)
        try:
            sample = self.phase.sample_for(key, Extent(sizes, sizes), seed)
            measured = self.measure(sample.batch, sample.kwargs)
        except Exception:  # only the sample function knows whether it can make samples of this size
            return drawn_for(self.phase, key, seed)
        return Drawn(Extent(measured, self.phase.padded(key.size)), sample)


def guarded(keys: Sequence[ShapeKey], sizes: GuardedSizes) -> list[ShapeKey]:
    """The keys to look at, in their order."""
    if sizes == "all":
        return list(keys)
    by_group: dict[RecordingGroup, list[int]] = {}
    for key in keys:
        by_group.setdefault(key.group, []).append(key.size)
    return [key for key in keys if key.size in (min(by_group[key.group]), max(by_group[key.group]))]


def fewest_rows(key: ShapeKey, keys: Sequence[ShapeKey]) -> int:
    """Few rows that the recording of a key serves: about half of it, and more than the next smaller one holds."""
    smaller = [one.size for one in keys if one.group == key.group and one.size < key.size]
    return max(max(smaller, default=0) + 1, key.size // 2)


def following(trace: OpTrace, now: Current) -> Current:
    """What is current while a trace follows a body: gaps are left out, but for what they are passed and give."""

    def on_gap(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        made = [leaf for _, leaf in reachable(result) if isinstance(leaf, torch.Tensor)]
        code = getattr(inspect.unwrap(function), "__code__", None)
        names = code.co_varnames[inspect.ismethod(function) : code.co_argcount] if code is not None else ()
        given = {names[at] if at < len(names) else f"argument {at}": value for at, value in enumerate(args)}
        trace.add_gap(getattr(function, "__qualname__", type(function).__qualname__), given | kwargs, made)

    return replace(now, around_gap=trace.paused, on_gap=on_gap)


def drawn_for(phase: Phase, key: ShapeKey, seed: int = _FIRST_SEED) -> Drawn:
    """A sample that fills the recording of a key; without a seed, the one that it is made with."""
    padded = phase.padded(key.size)
    extent = Extent(padded, padded)
    return Drawn(extent, phase.sample_for(key, extent, seed))


def _plain_values(phase: Phase, sample: Sample) -> dict[str, object]:
    """The numbers and texts of a sample that no buffer is loaded with, by path."""
    loaded = {slot.path for slot in phase.slots if slot.name not in phase.without}
    loaded |= {path_of(dim.field) for dim in phase.all_dims.values() if dim.field is not None}
    found: dict[str, object] = {}
    for path, leaf in [*reachable(sample.batch), *reachable(dict(sample.kwargs))]:
        steps = tuple(str(step.key) if isinstance(step, Item) else step for step in path)
        if isinstance(leaf, _PLAIN) and not any(steps[: len(one)] == one for one in loaded):
            found[str(path)] = leaf
    return found
