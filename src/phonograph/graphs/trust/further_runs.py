"""Further runs of a trial: two batches in a row, an input that is None, and the line that writes a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from phonograph.devices.trace import user_frame, watching_ops, written_tensors
from phonograph.errors import Frame
from phonograph.graphs.inputs.fields import expose
from phonograph.graphs.inputs.registry import LoadMode
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.inputs.tree import TreePath
from phonograph.graphs.phases.context import Current, Stage, current, entering, unbroken
from phonograph.graphs.recording.backends.base import ReplayStep
from phonograph.graphs.trust.bisection import Noted, returned
from phonograph.graphs.trust.trial import Trial, Way

_AROUND = Way(padded=False)
_NOTHING: AbstractContextManager[object] = nullcontext()


def in_a_row(
    trial: Trial, way: Way, watching: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Mapping[TreePath, Any]:
    """What a run gives after one on another batch. Tensors are put back in between: what Python keeps shows."""
    first = trial.runner.phase.sample_for(trial.served, trial.unpadded, trial.seed + 1)
    trial.reach(first)
    with trial.started(trial.sample, None, noisy=False):
        held = [tensor.clone() for tensor in trial.memory]
        for sample in (first, trial.sample):
            for tensor, before in zip(trial.memory, held, strict=True):
                tensor.copy_(before)
            run = trial.run(way, sample, trial.extent, watching())
    return {path: part.clone() if isinstance(part, torch.Tensor) else part for path, part in run.items()}


def gaps_in_a_row(trial: Trial, way: Way) -> list[Noted]:
    """What the gaps of such a run give, in order."""
    noted: list[Noted] = []
    recording = trial.runner.recording(trial.key)

    def replay(steps: Sequence[ReplayStep]) -> None:
        noted.clear()
        for number, step in enumerate(steps):
            step()
            if number % 2:
                noted.append(returned(recording.gaps[number // 2].outputs))

    if way.replay:
        with recording.replaying(replay):
            in_a_row(trial, way)
    else:
        in_a_row(trial, way, lambda: _noting_gaps(noted))
    return noted


@contextmanager
def _noting_gaps(noted: list[Noted]) -> Iterator[None]:
    """Inside an eager run, gaps are called as they are, and what they give is noted."""
    noted.clear()

    class Noting:
        def gap(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with unbroken():
                result = function(*args, **kwargs)
            noted.append(returned(result))
            return result

    with entering(replace(current(), breaker=Noting())):
        yield


def with_none(
    trial: Trial, slot: Slot, watching: AbstractContextManager[object] = _NOTHING
) -> Mapping[TreePath, Any] | None:
    """What the body gives without padding where a slot is truly None; None where it can't do without."""
    runner, phase, sample = trial.runner, trial.runner.phase, trial.sample
    with trial.started(sample, None, noisy=False):
        view = runner.registry.load(
            sample.batch, trial.unpadded, mode=LoadMode.EAGER, kwargs=sample.kwargs, without=phase.eager_without
        )
        is_aside = slot.path[0] in view.kwargs
        kwargs = expose(dict(view.kwargs), {slot.path: None}) if is_aside else view.kwargs
        batch = view.batch if is_aside else expose(view.batch, {slot.path: None})
        with entering(Current(phase.name, runner.plan.backend, Stage.EAGER, batch)):
            try:
                with watching:
                    outputs = phase.forward(batch, kwargs)
                return runner.parts(outputs)
            except Exception:  # the body relies on the value that stands for None
                return None


def line_of_write(trial: Trial, name: str) -> Frame | None:
    """The line that writes a state, of the body without padding."""
    lines: list[Frame | None] = []
    memory = trial.elements.get(name)
    storage = memory.untyped_storage()._cdata if memory is not None else None

    def before(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        written = written_tensors(func, args, kwargs) if not lines else ()
        if any(tensor.untyped_storage()._cdata == storage for tensor in written):
            lines.append(user_frame())

    with suppress(Exception):  # the checks have told what it raises
        trial.watched(_AROUND, watching_ops(before, lambda *_: None))
    return lines[0] if lines else None
