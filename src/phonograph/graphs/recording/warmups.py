"""Warm-ups: two free runs of a shape. What the first makes is a constant, what the second changes too is state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from phonograph.errors import CaptureError, Frame, OutputError
from phonograph.graphs.inputs.tree import leaves, reachable
from phonograph.graphs.recording.derived_weights import is_derived
from phonograph.graphs.recording.fact import address_of, is_named
from phonograph.graphs.recording.outputs import is_near, own
from phonograph.graphs.recording.places import PLAIN, Place, Whole, same
from phonograph.graphs.recording.python_state import Moves, PythonState, line_of
from phonograph.graphs.recording.reachable import Snapshot, StateChange
from phonograph.graphs.recording.stand_ins import stand_in_for
from phonograph.graphs.recording.tensor_state import MemoryRun, SavedState

log = logging.getLogger("phonograph")

_AS_TENSOR = "Keep it in a tensor that the body writes in place, pass it in a slot, or change it in a @graph_break"
_ONLY_IN_GAPS = (
    "If only gaps read it, keep it in a tensor that they write in place, or save it and put it back with preserve=; "
    "else pass it in a slot"
)

_CALL_ONCE = "Call the function once with a real batch before capture(), or make it outside of the body"

_SIZED = "Set it in a @graph_break or outside of the body, or name it in ignore= if nothing but the body reads it"

TrialBody = Callable[[Moves | None], Any]
"""Runs the body once, and notes in `Moves` what its gaps change."""
Bind = Callable[[], TrialBody]
"""Loads a sample: the body on it."""


@dataclass(frozen=True)
class Settled:
    """What the warm-ups of one shape made, and later runs keep."""

    made: Sequence[StateChange] = ()
    """Python values that the first run made: constants."""
    holds: Sequence[torch.Tensor] = ()
    """Memory that warm-ups made and the body reads: a recording keeps it alive."""


@dataclass(frozen=True)
class _First:
    """The first of the two runs."""

    before: Snapshot
    memory: MemoryRun
    made: Sequence[StateChange]
    outputs: Any


@dataclass(frozen=True)
class _Compared:
    """What the body made in the first run, and the outputs of a later run."""

    made: Sequence[StateChange]
    outputs: Any


@dataclass(eq=False)
class Warmups:
    """Runs bodies for real, tells constants from state, and puts state back.

    Tensors that runs write are saved, and put back by `state.restore`. Python values that both runs change can't be
    recorded: the shape is refused, and they are put back at once.
    """

    python: PythonState
    state: SavedState
    may_rerun: bool
    """Whether a body may be run more often than on other ranks."""
    ignored: Sequence[str] = ()
    """Python state that does not matter, by dotted name."""
    moved: CaptureError | None = None
    """The first refusal for Python state: what one shape moves, the others may read."""
    _first: _First | None = None
    _all_made: list[StateChange] = field(default_factory=list)
    _gap_memory: set[int] = field(default_factory=set)
    """The memory of tensors that gaps were passed."""
    _has_settled: bool = False
    """Whether a shape has been warmed."""

    def first(self, bind: Bind) -> None:
        """The first run: whatever is made lazily is made here."""
        self.python.refuse_what_cant_be_undone()
        before, self._first = self.python.now, None
        self._gap_memory.clear()
        with self._undone_on_failure(before):
            with self.python.followed():
                result, memory = self._run(bind)
            made = before.changes()
            if made:
                self.python.now = self.python.taken()
            self._first = _First(before, memory, made, own(result) if made else None)

    def second(self, bind: Bind, other: Bind | None = None) -> Settled:
        """The second run: what changes now changes always. `other` loads another sample."""
        first = self._first
        assert first is not None
        with self._undone_on_failure(first.before):
            moves = Moves(self.python.now)
            _, memory = self._run(bind, moves)
            self.state.settle(first.memory, memory)
            moved = [change for change in moves.by_body.values() if not self._is_no_state(change)]
            if moved:
                self._refuse(moved, bind)
            self._refuse_collected(first, list(moves.elsewhere.values()))
            if first.made and self.may_rerun:
                by_body, outputs = self._compare(first, bind, list(moves.elsewhere.values()))
                if other is not None:
                    self._refuse_sampled(first, memory, _Compared(by_body, outputs), (bind, other))
                if self._has_settled:
                    self._refuse_sized(by_body, bind)
            made = self._without(first, list(moves.elsewhere.values()))
            self._all_made += made
            self._has_settled = True
            return Settled(made, list(memory.uses.values()))

    def note_gap(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A gap of the first run has been called."""
        tensors = (one for _, one in reachable((args, kwargs)) if isinstance(one, torch.Tensor))
        self._gap_memory.update(one.untyped_storage()._cdata for one in tensors if one.layout is torch.strided)

    def _refuse_collected(self, first: _First, elsewhere: Sequence[StateChange]) -> None:
        """Refuse if, after the second run, something still holds what a gap was passed in the first."""
        passed = self._gap_memory & first.memory.survivors()
        for change in (*elsewhere, *first.made) if passed else ():
            held = change.place.get(change.key)
            tensors = [one for _, one in reachable(held) if isinstance(one, torch.Tensor)]
            if any(one.layout is torch.strided and one.untyped_storage()._cdata in passed for one in tensors):
                problem = (
                    f"a @graph_break keeps in {change.name} a tensor that it was passed, and every replay writes to "
                    "the same memory again"
                )
                self._refuse_moved(problem, "Keep a copy (tensor.clone())", None)

    def _compare(self, first: _First, bind: Bind, elsewhere: Sequence[StateChange]) -> tuple[list[StateChange], Any]:
        """Refuse if what the first run made changes the outputs: then it is no constant. Gives what the body made, and
        the outputs.

        What gaps change counts too, since the body may read it: if it does not, only the user can know.
        """
        self.state.restore()
        with self.python.kept():
            result, _ = self._run(bind)
        origins = {self._origin(first.before, change) for change in elsewhere}
        by_body = [change for change in first.made if _identity(change.place, change.key) not in origins]
        if not near(first.outputs, result):
            self._refuse_made(by_body or first.made, self._making(first, bind), in_gaps=not by_body)
        return by_body, own(result)

    def _refuse_sampled(self, first: _First, second: MemoryRun, found: _Compared, binds: tuple[Bind, Bind]) -> None:
        """Refuse if the first run made of its inputs what later runs read: those of a sample are nobody's.

        What later runs write is state, which begins as it was when it was made.
        """
        watched = [one for one in enumerate(found.made) if not is_named(one[1].name, self.ignored)]
        ours = {at: _constants(change.now, second) for at, change in watched}
        if not any(ours.values()):
            return
        self.state.restore()
        with self.python.kept():
            first.before.restore()
            self._run(binds[1])
            theirs = {at: _constants(found.made[at].place.get(found.made[at].key), second) for at in ours}
            differing = [found.made[at] for at in ours if not _are_equal(ours[at], theirs[at])]
            self.state.restore()
            result = own(self._run(binds[0])[0]) if differing else found.outputs
        self.state.restore()
        if differing and not near(found.outputs, result):
            change = min(differing, key=lambda one: len(one.name))
            problem = f"the first run makes {change.name} of its inputs, which in a capture are a random sample"
            self._refuse_moved(problem, _CALL_ONCE, self._making(first, binds[0])(change))

    def _refuse_sized(self, made: Sequence[StateChange], bind: Bind) -> None:
        """Refuse a value that every run of this shape writes, where the shapes before it left another.

        What is written only where it differs is the key of a cache: each recording has what belongs to its own.
        """
        for change in made:
            stand_in = stand_in_for(change.now)
            if stand_in is None or stand_in_for(change.then) is None or is_named(change.name, self.ignored):
                continue
            self.state.restore()
            with self.python.kept():
                change.place.put(change.key, stand_in)
                self._run(bind)
                is_written = change.place.get(change.key) is not stand_in
                change.redo()
            self.state.restore()
            if is_written:
                change.undo()
                body = bind()
                with self.state.watching():
                    frame = line_of(change, lambda body=body: body(None))  # type: ignore[misc]
                problem = (
                    f"every run sets {change.name}, by its size ({change.then!r}, then {change.now!r}), and a replay "
                    "runs no Python"
                )
                self._refuse_moved(problem, _SIZED, frame)

    def _making(self, first: _First, bind: Bind) -> Callable[[StateChange], Frame | None]:
        """Finds the line that makes something, by one more first run."""

        def find(change: StateChange) -> Frame | None:
            if not self.may_rerun:
                return None
            self.state.restore()
            first.before.restore()
            body = bind()
            with self.state.watching():
                return line_of(change, lambda: body(None))

        return find

    def _run(self, bind: Bind, moves: Moves | None = None) -> tuple[Any, MemoryRun]:
        body = bind()
        if moves is not None:
            # Samples, computed slots and host plans are made anew for every call.
            moves.note(moves.elsewhere)
        with self.state.watching(self.python.now.tensors.values()) as memory:
            result = body(moves)
        if moves is not None:
            moves.note(moves.by_body)
        return result, memory

    @contextmanager
    def rehearsed(self, settled: Settled) -> Iterator[None]:
        """Inside, Python values are what the shape's warm-ups made; afterwards what they were before."""
        with self.python.kept():
            for change in settled.made:
                change.redo()
            yield

    def warn_if_cut_short(self, phase: str) -> None:
        """Say where there is more in Python than is watched."""
        if self.python.now.is_cut_short:
            log.warning(
                "capturing %s: the body reaches too many Python objects to watch all of them for changes. "
                "Say what it writes with Phase(preserve=…).",
                phase,
            )

    def forget(self) -> None:
        """Undo all that was made: no recording uses it."""
        for change in reversed(self._all_made):
            change.undo()

    @contextmanager
    def _undone_on_failure(self, before: Snapshot) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.python.now.restore()
            before.restore()
            self.python.now = before
            raise

    def _without(self, first: _First, moved: Sequence[StateChange]) -> list[StateChange]:
        """What was made, without what is changed outside of the body: that is restored."""
        if not moved:
            return list(first.made)
        origins = {self._origin(first.before, change) for change in moved}
        for change in first.made:
            if _identity(change.place, change.key) in origins:
                change.undo()
        undone = {_identity(change.place, change.key) for change in first.made} & origins
        for change in moved:
            if first.before.known(change.place) and _identity(change.place, change.key) not in undone:
                change.undo()
        self.python.now = self.python.taken()
        return [change for change in first.made if _identity(change.place, change.key) not in undone]

    def _origin(self, before: Snapshot, change: StateChange) -> tuple[int, Any]:
        """The nearest place on the path to a change that existed before the first run, and the key from there."""
        way = (_identity(place, key) for place, key in self.python.now.way_to(change) if before.known(place))
        return next(way, (0, None))

    def _refuse(self, changes: Sequence[StateChange], bind: Bind) -> None:
        change = min(changes, key=lambda one: len(one.name))
        frame = None
        if self.may_rerun:
            body = bind()
            with self.state.watching():
                frame = line_of(change, lambda: body(None))
            if frame is None:  # it lies in what is made anew for every run
                body = bind()
                with self.state.watching():
                    frame = line_of(self.python.now.newest_like(change), lambda: body(None))
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        problem = f"the body changes {change.name}{more} in every run, and a replay runs no Python"
        self._refuse_moved(problem, _AS_TENSOR, frame)

    def _is_no_state(self, change: StateChange) -> bool:
        return is_named(change.name, self.ignored) or is_derived(change.place.holder, change.key)

    def _refuse_moved(self, problem: str, remedy: str, frame: Frame | None) -> NoReturn:
        self.moved = self.moved or CaptureError(problem, remedy, frame=frame)
        raise CaptureError(problem, remedy, frame=frame)

    def _refuse_made(
        self, made: Sequence[StateChange], line: Callable[[StateChange], Frame | None], *, in_gaps: bool
    ) -> None:
        change = min(made, key=lambda one: len(one.name))
        if in_gaps:
            problem = (
                f"the outputs change once a @graph_break, host_plan or the sample has changed {change.name}, and trial "
                "runs can't tell whether the body reads it too, which a replay would not"
            )
        else:
            problem = (
                f"the body gives other outputs once it has changed {change.name}, and a recording has only one of them"
            )
        self._refuse_moved(problem, _ONLY_IN_GAPS if in_gaps else _AS_TENSOR, line(change))


_WRITTEN = object()
"""In the place of a tensor that later runs write: state, which begins as it was when it was made."""


def _constants(value: Any, second: MemoryRun) -> list[Any]:
    """The numbers and texts in a value, and copies of the tensors that a run does not write; others are `_WRITTEN`."""
    if isinstance(value, torch.nn.Module):
        held: list[Any] = [*value.parameters(), *value.buffers()]
    else:
        try:
            held = [leaf for _, leaf in leaves(value)]
        except OutputError:  # something that no output may hold
            held = []
    found: list[Any] = []
    for leaf in held:
        if isinstance(leaf, PLAIN):
            found.append(leaf)
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and address_of(leaf) is not None:
            is_state = leaf.untyped_storage()._cdata in second.num_writes
            found.append(_WRITTEN if is_state else leaf.detach().clone())
    return found


def _are_equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is _WRITTEN or same(one, other)


def _identity(place: Place, key: Any) -> tuple[int, Any]:
    return id(place.holder), None if isinstance(place, Whole) else key


def near(one: Any, other: Any) -> bool:
    """Whether two outputs are the same but for rounding."""
    found, wanted = dict(leaves(one)), dict(leaves(other))
    return found.keys() == wanted.keys() and all(_is_near(found[path], wanted[path]) for path in wanted)


def _is_near(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor)
    return one.shape == other.shape and one.dtype == other.dtype and is_near(one, other)
