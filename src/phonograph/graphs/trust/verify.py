"""Verification: replays against poison, against eager on the same view, and against eager without padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.errors import DeclarationError, VerifyError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.fields import fields_of
from phonograph.graphs.inputs.registry import LoadMode
from phonograph.graphs.inputs.tree import TreePath
from phonograph.graphs.phases.axes import weaker_products
from phonograph.graphs.phases.context import Current, Stage, entering
from phonograph.graphs.phases.decisions import ShapeKey
from phonograph.graphs.phases.phase import Sample
from phonograph.graphs.recording.outputs import is_near, largest_difference
from phonograph.graphs.recording.python_state import PythonState
from phonograph.graphs.recording.tensor_state import SavedState, generators_restored
from phonograph.graphs.recording.weight_caches import weights_uncached
from phonograph.graphs.running.runner import Runner
from phonograph.numbers import is_whole

_MAX_STATE_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """One comparison on one batch."""

    key: ShapeKey
    used: int
    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons, and what could not be tried."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def raise_if_failed(self) -> None:
        """Raise with every failed check."""
        if not self.ok:
            raise VerifyError(str(self))

    def __str__(self) -> str:
        keys = {check.key for check in self.checks}
        lines = [f"verify: {len(self.checks)} checks on {len(keys)} recordings, {len(self.failures)} failed"]
        lines += [f"  {c.key} with {c.used} used: {c.name}: {c.detail}" for c in self.failures]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def verify(
    runner: Runner,
    *,
    batches: int = 2,
    seed: int = 0,
    tolerance: float | None = None,
    state: Sequence[torch.Tensor] = (),
) -> VerifyReport:
    """Check every recording of a runner on random valid batches.

    1. poison: two different poisons in unread padding and in other recordings' memory give equal bits.
    2. same view: replay equals eager on the same padded view, in outputs and in the state it writes.
    3. unpadded: replay is near eager without padding.

    Where an axis says that recordings stand in for weaker ones, each is also replayed on batches of the weaker
    products, and must give, bit for bit, what these get without it.

    A `tolerance` (relative) holds for 3, and for 2, which wants equal bits without one: give it where a body
    picks other kernels while it is captured.

    What the body writes is found by running it, saved, and put back, Python values too: the object that serves is left
    as it was. Name what only custom kernels write in `state`. Where padding writes, a note says so: it is right if
    no request uses that place.
    """
    _check_arguments(batches, tolerance)
    checks: list[Check] = []
    python = PythonState(runner.phase.code) if runner.phase.preserve is None else None
    notes, padding_writes = list(_notes(runner)), ""
    with torch.no_grad(), runner.pool.using(f"verifying {runner.phase.name}"):
        for key in runner.captured:
            for index, sizes in enumerate(_sizes_to_try(runner, key, batches)):
                verification = _Verification(runner, key, sizes, seed + index, tolerance, state, python)
                if not verification.is_served:
                    continue
                checks += verification.run()
                for weaker in _weaker(runner, key):
                    served = _Verification(runner, key, sizes, seed + index, tolerance, state, python, served=weaker)
                    checks.append(served.check_stand_in())
                if not padding_writes and verification.is_written_by_padding():
                    padding_writes = f"first seen in {key} with {sizes[runner.phase.bucketed]} used"
    if padding_writes:
        notes.append(
            f"padding writes state that a run without padding leaves alone ({padding_writes}). No request may "
            "use that place: keep a null row for pad values."
        )
    return VerifyReport(tuple(checks), tuple(notes))


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
    sizes = buckets.sizes
    position = sizes.index(key.size)
    smallest = key.size if buckets.exact else (sizes[position - 1] + 1 if position else min(1, key.size))
    span = key.size - smallest
    spread = [key.size - round(span * i / max(1, batches - 1)) for i in range(batches)]
    return list(dict.fromkeys(spread))


def _weaker(runner: Runner, key: ShapeKey) -> list[ShapeKey]:
    """What the key's recording may stand in for."""
    return [replace(key, values=product) for product in weaker_products(runner.phase.axes, key.values)]


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


def _nearest(wanted: int, sizes: Sequence[int]) -> int:
    return min(sizes, key=lambda size: abs(size - wanted))


def _notes(runner: Runner) -> Iterator[str]:
    if not runner.captured:
        yield "nothing is captured: call capture() first"
    for slot in runner.phase.slots:
        integer = not slot.dtype.is_floating_point and slot.dtype != torch.bool
        if integer and slot.valid is None and slot.compute is None:
            yield (
                f"slot {slot.name!r} names no valid range: unless sample= draws it, only its pad value was tried, as "
                "if every row were padding. Add valid=(smallest, largest)"
            )


class _Verification:
    """The three checks of one recording on one batch."""

    def __init__(
        self,
        runner: Runner,
        key: ShapeKey,
        sizes: Mapping[str, int],
        seed: int,
        tolerance: float | None,
        state: Sequence[torch.Tensor],
        python: PythonState | None,
        served: ShapeKey | None = None,
    ) -> None:
        self._runner = runner
        self._served = served if served is not None else key
        """The key whose batches are tried: the recording's own, or one that it stands in for."""
        self._python = python
        self._key = key
        self._seed = seed
        self._tolerance = tolerance
        phase = runner.phase
        self._extent = Extent(sizes, phase.padded(key.size))
        self._unpadded = Extent(sizes, sizes)
        self._used = sizes[phase.bucketed]
        self._sample: Sample = phase.sample_for(self._served, self._unpadded, seed)
        measured = runner.registry.measure(self._sample.batch, self._sample.kwargs)
        self._extent = Extent(measured, phase.padded(key.size))
        self._unpadded = Extent(measured, measured)
        if python is not None:
            python.reach([*fields_of(self._sample.batch), *self._sample.kwargs.values()])
        self._state = list(state)
        self._elements = list(state)

    @property
    def is_served(self) -> bool:
        """Whether a replay serves the sample: it must fill the dims that the body ran at one size of only."""
        used, padded = self._extent.used, self._extent.padded
        return all(sizes or used[name] == padded[name] for name, sizes in self._runner.tried(self._key).items())

    def run(self) -> list[Check]:
        if self._runner.phase.preserve is None:
            self._state += self._written()
        first, _ = self._replay(pattern=0)
        second, replayed_state = self._replay(pattern=1)
        eager, eager_state = self._eager(padded=True)
        unpadded, _ = self._eager(padded=False)
        same = self._compare("same view", second, eager, self._tolerance or 0.0)
        if same.passed and not self._tolerance:
            same = self._compare("same view, state", _numbered(replayed_state), _numbered(eager_state), 0.0)
        return [
            self._compare("poison", first, second, 0.0),
            same,
            self._compare("unpadded", second, unpadded, None),
        ]

    def check_stand_in(self) -> Check:
        """Whether the recording gives batches of a weaker product the bits that they get without it."""
        if self._runner.phase.preserve is None:
            self._state += self._written()
        is_recorded = self._served in self._runner.captured
        tolerance = 0.0 if is_recorded else self._tolerance or 0.0
        found, state = self._replay(pattern=1)
        wanted, wanted_state = self._replay(pattern=1, of=self._served) if is_recorded else self._eager(padded=True)
        name = f"stands in for {self._served}"
        check = self._compare(name, found, wanted, tolerance)
        further = [str(path) for path in found if path not in wanted]
        if further:
            return replace(check, passed=False, detail=f"puts out {further[0]} as well, which no caller expects")
        if check.passed and not tolerance:
            check = self._compare(f"{name}, state", _numbered(state), _numbered(wanted_state), 0.0)
        return check

    def is_written_by_padding(self) -> bool:
        """Whether a run with padding writes what one without leaves alone.

        Both begin with noise in the place of all floating-point state: what padding writes may be there already.
        """
        if not self._elements or not self._extent.is_padded:
            return False
        numbers = torch.Generator().manual_seed(self._seed)
        noise = [
            torch.randn(state.shape, generator=numbers).to(state) if state.is_floating_point() else state.clone()
            for state in self._elements
        ]
        padded, unpadded = (self._after_noise(noise, padded=one) for one in (True, False))
        states = zip(noise, padded, unpadded, strict=True)
        return any(bool((_differs(one, was) & ~_differs(other, was)).any()) for was, one, other in states)

    def _after_noise(self, noise: Sequence[torch.Tensor], *, padded: bool) -> list[torch.Tensor]:
        with self._restored():
            for state, random in zip(self._elements, noise, strict=True):
                state.copy_(random)
            found = self._eager(padded=padded)[1]
            return [state.view(known.dtype) for state, known in zip(found, self._elements, strict=True)]

    def _written(self) -> list[torch.Tensor]:
        """All memory from outside that the body writes, as bytes; found by runs whose effects are undone."""
        saved = SavedState(_MAX_STATE_BYTES)
        suspects = self._python.now.tensors.values() if self._python is not None else ()
        followed = self._python.followed() if self._python is not None else nullcontext()
        try:
            with followed:
                for padded in (True, False):
                    self._eager(padded=padded, watching=saved.watching(suspects))
        finally:
            saved.restore()
        if saved.skipped_bytes:
            raise VerifyError(
                f"verifying {self._key}: the body writes {saved.skipped_bytes:,} bytes of tensors too large to copy. "
                "Give the phase a `preserve` that saves the rows that a batch touches."
            )
        self._elements += saved.elements
        return saved.memory

    def _replay(self, pattern: int, of: ShapeKey | None = None) -> tuple[dict[TreePath, Any], list[torch.Tensor]]:
        runner, phase, key = self._runner, self._runner.phase, of if of is not None else self._key
        with self._restored():
            view = runner.registry.load(
                self._sample.batch, self._extent, kwargs=self._sample.kwargs, without=phase.without, anew=True
            )
            runner.registry.poison_unread(self._extent, pattern)
            runner.memory.poison(pattern)
            if phase.host_plan is not None:
                phase.host_plan(view.batch, self._extent)
            live = runner.registry.live(
                self._sample.batch, self._extent, kwargs=self._sample.kwargs, without=phase.without
            )
            with entering(Current(phase.name, runner.plan.backend, Stage.REPLAYING, live.batch)):
                runner.recording(key).replay()
            outputs = runner.parts(runner.trimmed(key, self._extent.used))
            return outputs, [t.clone() for t in self._state]

    def _eager(
        self, *, padded: bool, watching: AbstractContextManager[object] = nullcontext()
    ) -> tuple[dict[TreePath, Any], list[torch.Tensor]]:
        runner, phase = self._runner, self._runner.phase
        extent = self._extent if padded else self._unpadded
        mode = LoadMode.GRAPH if padded else LoadMode.EAGER
        without = phase.without if padded else phase.eager_without
        with self._restored():
            view = runner.registry.load(
                self._sample.batch, extent, mode=mode, kwargs=self._sample.kwargs, without=without, anew=True
            )
            if padded:
                runner.registry.poison_unread(extent, 1)
            with watching:
                outputs = self._forward(view.batch, view.kwargs, extent)
            if padded:
                outputs = runner.trim(self._key, outputs, extent.used)
            return runner.parts(outputs), [t.clone() for t in self._state]

    def _forward(self, batch: Any, kwargs: Mapping[str, Any], extent: Extent) -> Any:
        runner, phase = self._runner, self._runner.phase
        if phase.host_plan is not None:
            phase.host_plan(batch, extent)
        live = batch
        if extent.is_padded:
            live = runner.registry.live(self._sample.batch, extent, kwargs=self._sample.kwargs).batch
        with entering(Current(phase.name, runner.plan.backend, Stage.EAGER, live)), weights_uncached():
            return phase.forward(batch, kwargs)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """The same state and random numbers for every run, and afterwards what was there before."""
        held = [t.clone() for t in self._state]
        preserve = self._runner.phase.preserve
        with (
            generators_restored(self._runner.device),
            self._python.kept() if self._python is not None else nullcontext(),
            preserve(self._sample.batch) if preserve is not None else nullcontext(),
        ):
            self._seed_generators()
            try:
                yield
            finally:
                for tensor, before in zip(self._state, held, strict=True):
                    tensor.copy_(before)

    def _seed_generators(self) -> None:
        # torch.manual_seed would seed every kind of device that torch knows, and keep a stack trace for each.
        torch.default_generator.manual_seed(self._seed)
        self._runner.device.seed(self._seed)

    def _compare(
        self, name: str, found: Mapping[TreePath, Any], wanted: Mapping[TreePath, Any], tolerance: float | None
    ) -> Check:
        details = [
            f"output {path or '(the only one)'} {problem}"
            for path in wanted
            if (problem := self._difference(found.get(path), wanted[path], tolerance))
        ]
        return Check(self._key, self._used, name, not details, "; ".join(details))

    def _difference(self, found: Any, wanted: Any, tolerance: float | None) -> str:
        if not isinstance(wanted, torch.Tensor):
            return ""
        if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
            return f"has shape {tuple(getattr(found, 'shape', ()))}, expected {tuple(wanted.shape)}"
        if found.dtype != wanted.dtype:
            return f"is {found.dtype}, expected {wanted.dtype}"
        if is_near(found, wanted, 0.0 if tolerance == 0.0 else self._tolerance):
            return ""
        return f"differs by up to {largest_difference(found, wanted):.3g}"


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors have other bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.itemsize, torch.uint8)
    return one.view(bits) != other.view(bits)


def _numbered(tensors: Sequence[torch.Tensor]) -> dict[TreePath, Any]:
    return {TreePath((f"state {index}",)): tensor for index, tensor in enumerate(tensors)}
