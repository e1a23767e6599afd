"""Shadow: a replay of a real batch, compared bit by bit with the same batch run eagerly on the same padded view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from phonograph.errors import VerifyError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.fields import expose, fetch
from phonograph.graphs.inputs.tree import TreePath
from phonograph.graphs.phases.context import Breaker, Current, Stage, entering, unbroken
from phonograph.graphs.phases.decisions import Replay, ShapeKey
from phonograph.graphs.phases.live_arguments import shown
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.comparison import described, mismatch, same_bits

_NO_ROOM = (torch.OutOfMemoryError, MemoryError)
_Difference = tuple[str, str, bool]
"""Fields of a Mismatch: where, in words, and whether the values are integers."""


@dataclass(frozen=True)
class StatePart:
    """Places of a tensor that a forward pass may write."""

    name: str
    tensor: torch.Tensor
    dim: int
    index: torch.Tensor
    """int64, on the tensor's device, none of them twice."""

    def read(self) -> torch.Tensor:
        """A copy of what is there."""
        return self.tensor.index_select(self.dim, self.index)

    def write(self, values: torch.Tensor) -> None:
        """Put values there."""
        self.tensor.index_copy_(self.dim, self.index, values)


class UncheckedError(VerifyError):
    """There was no memory for a check; what the replay gave is in `result`."""

    def __init__(self, key: ShapeKey, result: Any) -> None:
        self.result = result
        super().__init__(
            f"checking {key}: there is no memory for a second run. Leave more room (--memory, --max-seqs)."
        )


@dataclass(frozen=True)
class Mismatch:
    """A replay that is not what the eager path gives."""

    key: ShapeKey
    where: str
    """The output, or the state after it, that differs first."""
    words: str
    """How it differs, with values."""
    of_integers: bool = False
    """Whether these values are whole numbers."""
    is_repeat: bool = False
    """Whether the replay was of the buffers as they were, so that they may be what is wrong."""

    @property
    def detail(self) -> str:
        return f"{self.where} {self.words}{self.of_repeat}"

    @property
    def of_repeat(self) -> str:
        return " (a repeat: the last batch was not loaded again)" if self.is_repeat else ""

    def __str__(self) -> str:
        return f"{self.key}: {self.detail}"


def shadowed(
    runner: Runner, batch: Any, state: Sequence[StatePart], *, repeats: bool = False
) -> tuple[Any, Mismatch | None]:
    """Serve a batch as `runner.run` does, and once more eagerly from the same state; the replay's results are kept.

    With `repeats` it is served as `runner.repeat` does, from the buffers as they are, and the batch is what they should
    hold. Where the two differ, in an output or in the state afterwards, the state is put back to what it was before. A
    batch that no recording serves is served eagerly, and compared with nothing. Buffers are left as the replay had
    them, so that steps after this one may be repeats as ever.

    An eager run that raises is a difference too: the replay did not. Where there is no memory for the check,
    UncheckedError has the replay's results, and the state is what the replay left.
    """
    decision = runner.decide(batch)
    if repeats and decision != runner.last:
        assert isinstance(runner.last, Replay)
        asked = decision.key if isinstance(decision, Replay) else f"an eager run ({decision.detail})"
        words = f"differs: the step asks for {asked}"
        return None, Mismatch(runner.last.key, "the batch", words, is_repeat=True)
    if not isinstance(decision, Replay):
        return runner.run(batch), None
    served = runner.repeat if repeats else partial(runner.run, batch)
    try:
        before = [part.read() for part in state]
    except _NO_ROOM as error:
        raise UncheckedError(decision.key, served()) from error
    result = served()
    try:
        found, found_state = runner.parts(result), [part.read() for part in state]
    except _NO_ROOM as error:
        raise UncheckedError(decision.key, result) from error
    _write(state, before)
    try:
        difference = _against_eager(runner, decision.key, batch, state, found, found_state)
    except _NO_ROOM as error:
        _write(state, found_state)
        raise UncheckedError(decision.key, result) from error
    if difference is None:
        return result, None
    _write(state, before)
    return None, Mismatch(decision.key, *difference, is_repeat=repeats)


def _write(state: Sequence[StatePart], values: Sequence[torch.Tensor]) -> None:
    for part, one in zip(state, values, strict=True):
        part.write(one)


def _against_eager(
    runner: Runner,
    key: ShapeKey,
    batch: Any,
    state: Sequence[StatePart],
    found: Mapping[TreePath, Any],
    found_state: Sequence[torch.Tensor],
) -> _Difference | None:
    """Run the batch eagerly, and compare: what a replay gave, and what it left."""
    gaps = LiveGaps() if runner.recording(key).has_gaps else None
    try:
        with runner.registry.kept():
            wanted = runner.parts(run_eagerly(runner, key, batch, gaps))
    except _NO_ROOM:
        raise
    except Exception as error:
        what = (str(error).strip().splitlines() or ["no message"])[0]
        return "the eager run", f"raises {type(error).__name__} ({what}), and the replay did not", False
    wanted_state = [part.read() for part in state]
    return _difference(found, wanted) or _state_difference(state, found_state, wanted_state)


def run_eagerly(runner: Runner, key: ShapeKey, batch: Any, breaker: Breaker | None, *, with_tail: bool = True) -> Any:
    """The body on the view that the recording had, then the tail; nothing is counted. The breaker calls the gaps."""
    phase, registry = runner.phase, runner.registry
    with torch.no_grad(), runner.pool.using(f"shadowing {phase.name}"):
        extent = Extent(registry.measure(batch, {}), phase.padded(key.size))
        view = registry.load(batch, extent, without=phase.without, anew=True)
        if phase.host_plan is not None:
            phase.host_plan(view.batch, extent)
        live = registry.live(batch, extent, without=phase.without).batch
        # As in a warm-up: what the host alone knows of a batch is frozen in the recording, and is its sample's.
        sample = phase.sample_for(key, Extent(extent.padded, extent.padded), 0)
        slots = {slot.path: fetch(view.batch, {}, slot.path) for slot in phase.slots if slot.name not in phase.without}
        now = Current(phase.name, runner.plan.backend, Stage.WARMING, live, breaker)
        with entering(now):
            outputs = phase.forward(expose(sample.batch, slots), sample.kwargs)
        outputs = runner.trim(key, outputs, extent.used)
        if phase.tail is None or phase.tail_captured or not with_tail:
            return outputs
        with entering(replace(now, stage=Stage.REPLAYING, breaker=None)):
            return phase.tail(outputs, live)


class LiveGaps:
    """Calls the gaps of a body where they stand, with the live batch, as a replay does."""

    def gap(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = shown((args, kwargs))
        with unbroken():
            return function(*given, **named)


def _difference(found: Mapping[TreePath, Any], wanted: Mapping[TreePath, Any]) -> _Difference | None:
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor) and (words := _other_bits(found.get(path), value)):
            return f"output {path or '(the only one)'}", words, not value.is_floating_point()
    return None


def _state_difference(
    state: Sequence[StatePart], found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> _Difference | None:
    for part, one, other in zip(state, found, wanted, strict=True):
        if words := _other_bits(one, other):
            first = int((~same_bits(one, other)).nonzero()[0, 0])  # of keys and values, the layer
            where = f"{part.name}{f'[{first}]' if part.dim else ''} after it"
            return where, words, not other.is_floating_point()
    return None


def _other_bits(found: Any, wanted: torch.Tensor) -> str:
    """In words, how a replay's result differs from the eager one; empty where all bits are equal."""
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{mismatch(found, wanted)}, eagerly"
    wrong = ~same_bits(found, wanted)
    return f"{described(found, wanted, wrong)}, eagerly" if bool(wrong.any()) else ""
