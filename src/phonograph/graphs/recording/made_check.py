"""Made check: what a backend makes of a body gives what the body gives, before it is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from phonograph.devices import Device
from phonograph.errors import CaptureError
from phonograph.graphs.inputs.tree import leaves
from phonograph.graphs.phases.context import Current
from phonograph.graphs.phases.decisions import RecordingGroup, ShapeKey
from phonograph.graphs.recording.backends import WarmUp
from phonograph.graphs.recording.binding import Binder, Noting
from phonograph.graphs.recording.carried import FieldReads
from phonograph.graphs.recording.guarding import GuardedSizes
from phonograph.graphs.recording.outputs import is_near, own
from phonograph.graphs.recording.places import PLAIN
from phonograph.graphs.recording.tensor_state import generators_restored

_APART = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.2}
"""How far a compiler that rounds in its own way may be off, by the coarsest dtype that it computes in: root mean square
over that of the values."""
_MOST_FAR = 0.5
"""Share of the vectors that a run writes to its state which may be further off: after another pick all differ."""
Kept = Callable[[ShapeKey], AbstractContextManager[None]]
"""Makes Python values those of a shape."""
Watched = Callable[[ShapeKey, Current], AbstractContextManager[None]]
"""Takes a shape and what is current while its body runs; inside, what is read is noted."""
Program = tuple[RecordingGroup, int] | ShapeKey
"""One of those that were made for a product; a shape that none was made for stands for itself."""
_REMEDY = (
    "It takes another branch, as code does that asks torch.compiler.is_compiling() or current().stage, or a fake= is "
    "wrong: compute the same in both, or use backend='breakable', which traces nothing"
)


def _unwatched(key: ShapeKey, now: Current) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its outputs, and the memory that bodies write, each a copy."""

    outputs: Any
    state: Sequence[torch.Tensor]
    live: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By name, the state that live rows may read, where the phase says which that is."""
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The same before the run."""


@dataclass(eq=False)
class MadeCheck:
    """Runs what a backend made of a body, and the body, from the same state and draws."""

    binder: Binder
    device: Device
    may_rerun: bool
    sizes: GuardedSizes = "all"
    """With "ends", the largest and the smallest shape of each program are compared, and speak for all of it."""
    keys: Sequence[ShapeKey] = ()
    """The shapes that something was made for."""
    _compared: set[ShapeKey] = field(default_factory=set)
    _reads: dict[Program, FieldReads] = field(default_factory=dict)
    _rehearsed: dict[ShapeKey, Outcome] = field(default_factory=dict)
    _tuned: set[Program] = field(default_factory=set)
    """Programs that have run."""
    _wrong: dict[Program, CaptureError] = field(default_factory=dict)

    def reads_of(self, key: ShapeKey) -> FieldReads:
        """What the body reads of its batches, which a capture can't tell. A program is traced once, so that all of its
        sizes have frozen what the body read at one of them."""
        return self._reads.setdefault(self._program(key), FieldReads())

    def is_asked(self, key: ShapeKey, failed: Container[ShapeKey]) -> bool:
        """Whether a shape is to be compared, as far as is known: where an end has failed, the next one is an end."""
        if key not in self.keys or key in self._compared:
            return False
        program = self._program(key)
        if self.sizes == "all" or isinstance(program, ShapeKey):
            return True
        left = [one.size for one in self.keys if one not in failed and self._program(one) == program]
        return program not in self._wrong and key.size in (min(left), max(left))

    def rehearse(self, key: ShapeKey, kept: Kept) -> Any:
        """A rehearsal of what was made, to be compared; what it returned."""
        program = self._program(key)
        if program not in self._tuned:  # kernels serve all sizes, and are loaded and tuned when they first run
            self._run(key, kept, WarmUp.FREE, as_written=False)
            self._tuned.add(program)
        result, self._rehearsed[key] = self._run(key, kept, WarmUp.REHEARSAL, as_written=False)
        return result

    def compare(self, key: ShapeKey, kept: Kept, watched: Watched) -> None:
        """Refuse what gives otherwise than the body itself, whose reads are noted in the same run."""
        if key not in self._rehearsed:
            self.rehearse(key, kept)
        noting = None if self.binder.phase.compares_others else self.reads_of(key).noting
        made, body = self._rehearsed.pop(key), self.run_body(key, kept, watched, noting)
        again = partial(self.run_body, key, kept, _unwatched) if self.may_rerun else None
        try:
            refuse_another_result(made, body, again, self.binder.backend.rounds_in(key))
        except CaptureError as error:
            self._wrong[self._program(key)] = error
            raise
        self._compared.add(key)

    def refused(self) -> dict[ShapeKey, CaptureError]:
        """All shapes whose program is wrong at one of its ends."""
        wrong = [(key, self._wrong.get(self._program(key))) for key in self.keys if self.sizes == "ends"]
        return {key: CaptureError(one.problem, one.remedy, shape=str(key)) for key, one in wrong if one is not None}

    def _program(self, key: ShapeKey) -> Program:
        number = self.binder.backend.program_of(key)
        return (key.group, number) if number >= 0 else key

    def run_body(self, key: ShapeKey, kept: Kept, watched: Watched, noting: Noting | None = None) -> Outcome:
        """One run of the body itself."""
        return self._run(key, kept, WarmUp.FREE, noting, watched, as_written=True)[1]

    def _run(
        self,
        key: ShapeKey,
        kept: Kept,
        kind: WarmUp,
        noting: Noting | None = None,
        watched: Watched = _unwatched,
        *,
        as_written: bool,
    ) -> tuple[Any, Outcome]:
        trial = self.binder.trial(key, noting=noting, as_written=as_written)
        with kept(key), generators_restored(self.device), trial as bound:
            before = _copies(bound.state)
            with watched(key, bound.now):
                result = self.binder.backend.warm_up(key, bound.body, kind)
            written = [tensor.clone() for tensor in self.binder.state.elements]
            return result, Outcome(own(result), written, _copies(bound.state), before)


def _copies(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def refuse_another_result(
    made: Outcome, body: Outcome, again: Callable[[], Outcome] | None, rounds_in: torch.dtype | None
) -> None:
    """Refuse what gives otherwise than the body; but for results that the body itself gives otherwise `again`, by the
    same measure, as when gaps read a clock. What was made may round in its own way, in a dtype; None for not at all."""
    found = dict(_other_results(made, body, rounds_in))
    if found and again is not None:
        own = dict(_other_results(again(), body, rounds_in))
        found = {name: wrong for name, wrong in found.items() if name not in own}
    for name, wrong in found.items():
        raise CaptureError(f"the traced body gives another result than the body itself: {name} {wrong}", _REMEDY)


def _other_results(made: Outcome, body: Outcome, rounds_in: torch.dtype | None) -> Iterator[tuple[str, str]]:
    """What is made of a body gives otherwise than the body, on one sample: names, and how it is wrong."""
    found, wanted = dict(leaves(made.outputs)), dict(leaves(body.outputs))
    if found.keys() != wanted.keys():
        yield "outputs", f"{sorted(map(str, found))} in place of {sorted(map(str, wanted))}"
        return
    pairs = [(f"output {path}" if path else "the output", found[path], wanted[path]) for path in wanted]
    pairs += [
        (f"tensor {at} that it writes", *both) for at, both in enumerate(zip(made.state, body.state, strict=False))
    ]
    for name, one, other in pairs:
        wrong = _wrong(one, other, rounds_in)
        if wrong:
            yield name, wrong
    for name, wrong in _wrong_state(made, body, rounds_in):
        yield f"the state {name}", wrong


def _wrong_state(made: Outcome, body: Outcome, rounds_in: torch.dtype | None) -> Iterator[tuple[str, str]]:
    """State that live rows may read. What rounds in its own way may pick another token, and then all that follows from
    it differs: half of the vectors that are written must be near."""
    for name, wanted in body.live.items():
        found, start = made.live[name], body.before[name]
        if rounds_in is None:
            wrong = _wrong(found, wanted, None)
        elif wanted.is_floating_point() and wanted.dim():
            written = ((found != start) | (wanted != start)).any(-1)
            limit = _limit(wanted.dtype, rounds_in)
            wrong = _far(found[written].double(), wanted[written].double(), limit) if bool(written.any()) else ""
        else:
            wrong = ""
        if wrong:
            yield name, wrong


def _limit(*dtypes: torch.dtype) -> float:
    """How far apart values of one dtype may be that were computed in another: log-probabilities in float32 are no more
    exact than the logits."""
    return max(_APART.get(dtype, 0.5) for dtype in dtypes)


def _far(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> str:
    """Vectors of which half are further off than they may be, by their lengths."""
    is_same = (found == wanted) | (found.isnan() & wanted.isnan())
    apart = torch.where(is_same, 0.0, found - wanted).norm(dim=-1)
    size = torch.where(wanted.isfinite(), wanted, 0.0).norm(dim=-1)
    away = apart / size.clamp_min(torch.finfo(torch.float64).tiny)
    share = float((~(away <= limit)).double().mean())
    return f"differs in {share:.0%} of the vectors that it writes" if share > _MOST_FAR else ""


def _wrong(found: Any, wanted: Any, rounds_in: torch.dtype | None) -> str:
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        is_same = type(found) is type(wanted) and (not isinstance(wanted, PLAIN) or repr(found) == repr(wanted))
        return "" if is_same else f"is {_described(found)}, not {_described(wanted)}"
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"is {_described(found)}, not {_described(wanted)}"
    if rounds_in is None:
        return "" if is_near(found, wanted) else _apart(found, wanted)
    # A rounded sum may pick another token.
    return (
        _apart(found, wanted)
        if wanted.is_floating_point() and _distance(found, wanted) > _limit(wanted.dtype, rounds_in)
        else ""
    )


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference over that of the values, where both are finite; infinite where NaN is in
    the place of a number, or numbers in the place of nothing but zeros."""
    if bool((found.isnan() & ~wanted.isnan()).any()):
        return math.inf
    both = found.isfinite() & wanted.isfinite()
    one, other = (tensor[both].double() for tensor in (found, wanted))
    if not one.numel():
        return 0.0
    apart, size = (float(values.square().mean().sqrt()) for values in (one - other, other))
    if size:
        return apart / size
    return math.inf if apart > torch.finfo(wanted.dtype).eps else 0.0  # a product that is fused may leave its rounding


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> str:
    differing = (found != wanted) & ~(found.isnan() & wanted.isnan())
    at = differing.nonzero()[0].tolist() if bool(differing.any()) else []
    return f"has {found[tuple(at)].item()} at {at}, where the body has {wanted[tuple(at)].item()}" if at else "differs"


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
