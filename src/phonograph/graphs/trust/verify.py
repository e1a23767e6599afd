"""verify: shows that replays are right, on random valid batches, and leaves the object that serves as it was."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from phonograph.errors import DeclarationError, InputWriteError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.phases.axes import weaker_products
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.python_state import PythonState
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.checks import Checks, told
from phonograph.graphs.trust.faults import Looks
from phonograph.graphs.trust.trial import Trial, same_memory
from phonograph.graphs.trust.untouched import untouched
from phonograph.graphs.trust.verify_report import Check, VerifyReport
from phonograph.numbers import is_whole

__all__ = ["Check", "VerifyReport", "verify", "verify_some"]

_FIRST_SEED = 1
"""Capture takes the seed 0: what a recording kept of its sample must not be what it is tried with."""


def verify(
    runner: Runner,
    *,
    batches: int = 2,
    seed: int = 0,
    tolerance: float | None = None,
    state: Sequence[torch.Tensor] = (),
    progress: Progress = silent,
) -> VerifyReport:
    """Check every recording of a runner on random valid batches.

    - facts: what recordings took for granted besides their slots is as it was.
    - inputs: the body writes to none of its inputs, and reads none that graphs leave out.
    - poison: two different poisons in unread padding and in other recordings' memory give equal bits.
    - same view: replay equals eager on the same padded view, in outputs and in the state it writes.
    - unpadded: replay is near eager without padding, element by element.
    - draws: after both, the same random numbers come next.
    - state: what a replay leaves is near what eager leaves without padding, wherever a live row may read. What padding
      writes besides is a failure, unless a slot declares its null row (`Pad.fill(0, null=True)`).

    Where an axis says that recordings stand in for weaker ones, each is also replayed on batches of the weaker
    products, and must give, bit for bit, what these get without it.

    "Near" is by dtype, and by what rounding may move each element (`rounding`). A `tolerance` (relative) takes the
    place of the dtype's, and holds for `same view` too, which wants equal bits without one: give it where a body picks
    other kernels while it is captured.

    What the body writes is found by running it, saved, and put back. Name what only custom kernels write in `state`.
    An exception in a check is that check's failure. Without a recording the report is not ok.
    """
    _check_arguments(batches, tolerance)
    begun = time.perf_counter()
    trials = _Trials(runner, seed + _FIRST_SEED, tolerance, state)
    checks: list[Check] = []
    if not runner.captured:
        return trials.report(checks, 0.0)
    with torch.no_grad(), runner.pool.using(f"verifying {runner.phase.name}"), untouched(runner):
        for done, key in enumerate(runner.captured, 1):
            found: list[Check] = []
            for index, sizes in enumerate(_sizes_to_try(runner, key, batches)):
                progress(_doing(runner, [*checks, *found]), done - 1, len(runner.captured))
                found += trials.checks(key, sizes, index)
            if all(check.passed for check in found):
                found += trials.further(key, _used_sizes(runner, key, batches))
            checks += found
            progress(_doing(runner, checks), done, len(runner.captured))
    checks += _stale(runner)
    return trials.report(checks, time.perf_counter() - begun)


def verify_some(runner: Runner, *, seconds: float, seed: int = 0, hurried: bool = False) -> VerifyReport:
    """A quick look, at start-up.

    Of every product of axes, the largest recording is replayed against eager on the same padded view, and a small one
    against eager without padding, where few tokens can be picked otherwise by rounding. As long as `seconds` last, one
    between and the largest are tried without padding too. With `hurried`, one of at most a quarter of the largest size
    is replayed in any case, of one product; of others, and the largest, only if it fits into `seconds`, by what smaller
    ones took.
    """
    begun = time.perf_counter()
    trials = _Trials(runner, seed + _FIRST_SEED, None, ())
    checks: list[Check] = []
    took: dict[ShapeKey, float] = {}
    if not runner.captured:
        return trials.report(checks, 0.0)
    with torch.no_grad(), runner.pool.using(f"verifying {runner.phase.name}"), untouched(runner):
        for key, look, is_needed in _quick_looks(runner, hurried=hurried):
            start = time.perf_counter()
            if not is_needed and start - begun + _expected(key, took) > seconds:
                continue
            checks += trials.quick_checks(key, runner.phase.padded(min(_used_sizes(runner, key, 2))), look)
            took[key] = time.perf_counter() - start
    return trials.report(checks, time.perf_counter() - begun)


def _expected(key: ShapeKey, took: Mapping[ShapeKey, float]) -> float:
    """Seconds that a look takes, on a line through the two largest of the same product; by all others before these."""
    known = sorted((one.size, seconds) for one, seconds in took.items() if one.group == key.group)
    if not known:
        return statistics.fmean(took.values()) if took else 0.0
    size, last = known[-1]
    if len(known) == 1 or key.size <= size:
        return last
    below, before = known[-2]
    return last + max(0.0, last - before) / (size - below) * (key.size - size)


_Look = Callable[[Checks], list[Check]]

_MANY_FAILURES = 3
"""After so many, rounding gets only a short look: what is wrong everywhere is told within minutes."""
_MAX_BETWEEN = 3
"""So many sizes between the largest and the smallest of a bucket are tried."""


@dataclass(eq=False)
class _Trials:
    """Tries recordings on batches, and gathers what is to be said besides."""

    runner: Runner
    seed: int
    tolerance: float | None
    state: Sequence[torch.Tensor]

    def __post_init__(self) -> None:
        phase = self.runner.phase
        self._python = PythonState(phase.code) if phase.preserve is None and self.runner.captured else None
        self._notes = dict.fromkeys(_notes(self.runner))
        self._num_failed = 0
        self._looks = Looks()

    def checks(self, key: ShapeKey, sizes: Mapping[str, int], index: int) -> list[Check]:
        """All checks of a recording on one batch, and on batches of what it stands in for."""
        trial = self._trial(key, sizes, self.seed + index)
        if isinstance(trial, Check):
            return [trial]
        if not trial.is_served:
            self._note_unserved(trial)
            return []
        found = self._checks(trial).all()
        self._note(trial)
        for weaker in weaker_products(self.runner.phase.axes, key.values):
            other = self._trial(key, sizes, self.seed + index, replace(key, values=weaker))
            found.append(other if isinstance(other, Check) else self._checks(other).stand_in())
        self._num_failed += sum(not check.passed for check in found)
        return found

    def _checks(self, trial: Trial) -> Checks:
        return Checks(trial, self.tolerance, self._looks, is_thorough=self._num_failed < _MANY_FAILURES)

    def further(self, key: ShapeKey, tried: Sequence[int]) -> list[Check]:
        """What else is tried of a recording without a failure, and told where it fails.

        Sizes between, absent inputs against None, gaps after another batch.
        """
        between = list(range(min(tried) + 1, max(tried)))
        step = -(-len(between) // _MAX_BETWEEN) or 1
        phase, found = self.runner.phase, list[Check]()
        for size in between[::step]:
            found += self._one(key, phase.padded(size), Checks.unpadded) if size not in tried else []
        smallest = phase.padded(min(tried))
        for slot in phase.slots:
            if slot.absent is not None and slot.compute is None and slot.name not in phase.without:
                served = replace(key, absent=key.absent | {slot.name})
                found += self._one(key, smallest, partial(Checks.absent, slot=slot), served)
        if self.runner.recording(key).has_gaps:
            found += self._one(key, smallest, Checks.gaps)
        return [check for check in found if not check.passed]

    def _one(
        self, key: ShapeKey, sizes: Mapping[str, int], check: Callable[[Checks], Check], served: ShapeKey | None = None
    ) -> list[Check]:
        trial = self._trial(key, sizes, self.seed, served)
        if isinstance(trial, Check):
            return [trial]
        return [check(self._checks(trial))] if trial.is_served else []

    def quick_checks(self, key: ShapeKey, sizes: Mapping[str, int], look: _Look) -> list[Check]:
        trial = self._trial(key, sizes, self.seed)
        if isinstance(trial, Check):
            return [trial]
        return look(Checks(trial, self.tolerance, self._looks, poisons=False)) if trial.is_served else []

    def report(self, checks: Sequence[Check], seconds: float) -> VerifyReport:
        return VerifyReport(tuple(checks), tuple(self._notes), len(self.runner.captured), seconds)

    def _trial(
        self, key: ShapeKey, sizes: Mapping[str, int], seed: int, served: ShapeKey | None = None
    ) -> Trial | Check:
        try:
            return Trial(self.runner, key, sizes, seed, self.state, self._python, served)
        except Exception as error:
            used = sizes[self.runner.phase.bucketed]
            return Check(key, used, "sample", passed=False, detail=told(error))

    def _note_unserved(self, trial: Trial) -> None:
        self._notes[f"{trial.key} with {trial.used} used was not tried: no replay serves {trial.extent}"] = None

    def _note(self, trial: Trial) -> None:
        if trial.num_unsaved_bytes:
            note = (
                f"{trial.num_unsaved_bytes:,} bytes of state are too large to compare. Have preserve= yield the part "
                "that live rows may read"
            )
            self._notes[note] = None


def _doing(runner: Runner, checks: Sequence[Check]) -> str:
    """Progress, with the number of failures: a failing check takes many runs."""
    num_failed = sum(not check.passed for check in checks)
    return f"verifying {runner.phase.name}{f', {num_failed} failed' if num_failed else ''}"


def _stale(runner: Runner) -> Iterator[Check]:
    """A failure for every recording while what they took for granted has changed."""
    fact = runner.stale.find()
    if fact is not None:
        detail = f"{fact.change}. Call refresh() to record again"
        yield from (Check(key, key.size, "facts", False, detail) for key in runner.captured)


def _check_arguments(batches: int, tolerance: float | None) -> None:
    if not is_whole(batches, 1):
        raise DeclarationError(f"verify(batches={batches!r}) has nothing to check. Give a whole number of at least 1.")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise DeclarationError(
            f"verify(tolerance={tolerance!r}): expected a finite number of at least 0. Give a relative difference such "
            "as 1e-3, or None for the dtype's own."
        )


def _used_sizes(runner: Runner, key: ShapeKey, batches: int) -> list[int]:
    """The full bucket, then sizes down to the smallest that this bucket serves."""
    assert runner.selection is not None
    buckets = runner.selection.sizes[key.values]
    sizes, least = buckets.sizes, runner.phase.smallest
    position = sizes.index(key.size)
    smallest = key.size if buckets.exact else max(sizes[position - 1] + 1 if position else 1, least)
    span = max(0, key.size - smallest)
    spread = [key.size - round(span * i / max(1, batches - 1)) for i in range(batches)]
    return list(dict.fromkeys(spread))


def _sizes_to_try(runner: Runner, key: ShapeKey, batches: int) -> Iterator[dict[str, int]]:
    """The first batch fills all dims, the others fill half of those with a limit.

    In the smallest recording each of these is small alone too: an axis that is trimmed by another dim shows.
    """
    limits = {name: dim.limit for name, dim in runner.phase.all_dims.items() if dim.limit is not None}
    tried = runner.tried(key)
    halves = {name: _nearest(-(-limit // 2), tried.get(name) or (limit,)) for name, limit in limits.items()}
    for index, used in enumerate(_used_sizes(runner, key, batches)):
        yield runner.phase.padded(used) | (halves if index % 2 else {})
    if key.size == min(one.size for one in runner.captured):
        yield from (runner.phase.padded(key.size) | {name: min(tried[name])} for name in limits if tried.get(name))


def _quick_looks(runner: Runner, *, hurried: bool) -> Iterator[tuple[ShapeKey, _Look, bool]]:
    """Which recordings of every product are looked at, how, and whether in any case."""
    backend = runner.backend
    groups: dict[object, list[ShapeKey]] = {}
    programs: dict[object, list[ShapeKey]] = {}
    for key in sorted(runner.captured, key=lambda key: -key.size):
        groups.setdefault(key.group, []).append(key)
        # What was compiled is never compared with the body as closely, tokens not at all, but without padding.
        programs.setdefault((key.group, None if backend.is_exact else backend.program_of(key)), []).append(key)
    small = dict.fromkeys(_smallest_padded(runner, keys) for keys in programs.values())
    largest = [keys[0] for keys in groups.values()]
    quarters = [_quarter(keys) for keys in groups.values()] if hurried else []
    needed = quarters[:1] if hurried else largest
    yield from ((key, Checks.quick_unpadded, True) for key in small)
    yield from ((key, Checks.quick_same_view, True) for key in needed)
    yield from ((key, Checks.quick_same_view, False) for key in [*quarters, *largest] if key not in needed)
    for keys in groups.values():
        middle = keys[len(keys) // 2]
        if not backend.is_exact:  # of many rows, some pick another token, and rounding takes many runs
            yield from ((key, Checks.quick_same_view, False) for key in (middle,) if key != keys[0])
            continue
        further = dict.fromkeys((middle, keys[0]))
        yield from ((key, Checks.quick_unpadded, False) for key in further if key not in small)


def _quarter(keys: Sequence[ShapeKey]) -> ShapeKey:
    """Of recordings from the largest on, the first of at most a quarter of its size; the smallest, if none is."""
    return next((key for key in keys if 4 * key.size <= keys[0].size), keys[-1])


def _smallest_padded(runner: Runner, keys: Sequence[ShapeKey]) -> ShapeKey:
    """Of recordings from the largest on, the smallest that some batch is padded for; the smallest, if there is none."""
    padded = [key for key in keys if min(_used_sizes(runner, key, 2)) < key.size]
    return (padded or keys)[-1]


def _same_memory(runner: Runner, key: ShapeKey) -> Iterator[str]:
    sizes = runner.phase.padded(key.size)
    alike = same_memory(runner, runner.phase.sample_for(key, Extent(sizes, sizes), 0))
    if alike:
        yield alike.removeprefix(". ")


def _nearest(wanted: int, sizes: Sequence[int]) -> int:
    return min(sizes, key=lambda size: abs(size - wanted))


def _notes(runner: Runner) -> Iterator[str]:
    failures = runner.report.failures if runner.report is not None else ()
    if not runner.captured and not failures:
        yield "nothing is captured: call capture() first"
    if failures:
        error = failures[0].error
        yield f"{len(failures)} recordings could not be made, and have nothing to check. The first: {error}"
        if isinstance(error, InputWriteError):
            yield from _same_memory(runner, failures[0].key)
    for slot in runner.phase.slots:
        integer = not slot.dtype.is_floating_point and slot.dtype != torch.bool
        if integer and slot.valid is None and slot.compute is None:
            yield (
                f"slot {slot.name!r} names no valid range: unless sample= draws it, only its pad value was tried, as "
                "if every row were padding. Add valid=(smallest, largest)"
            )
