"""By hand: graphs as people write them without a library, to show that every bug of the zoo is one.

Static input buffers, one warm-up, one recording per bucket; a call copies its inputs in, pads, replays and slices.
Where the body has breaks, graphs and eager calls take turns: a call gets again what it was passed when captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phonograph import EmulatedDevice, Extent, Slot, Stage
from phonograph.devices.base import Recorder
from phonograph.graphs.phases.context import Current, entering, unbroken
from phonograph.graphs.phases.phase import sample_from
from zoo.animals import Animal, Run, Subject, copied, difference, fresh, play, played_eagerly


class ByHand:
    """The recordings of one animal."""

    def __init__(self, subject: Subject, device: EmulatedDevice) -> None:
        self._subject = subject
        self._recorded: dict[int, tuple[Sequence[Callable[[], None]], dict[str, torch.Tensor], Any]] = {}
        pool = device.new_pool()
        for size in subject.buckets:
            sample = _sample(subject, size)
            buffers = {slot.field: sample[slot.field].clone() for slot in subject.slots if slot.field in sample}
            batch = {**sample, **buffers}
            with entering(Current(batch=batch)):
                self._call(batch)
            with device.recorder(pool) as recorder:
                steps = _Steps(recorder)
                now = Current(stage=Stage.CAPTURING, batch=batch, breaker=steps if self._has_breaks else None)
                with entering(now):
                    outputs = self._call(batch)
                steps.end()
            self._recorded[size] = steps.steps, buffers, outputs

    def __call__(self, batch: dict[str, Any]) -> Any:
        used = next(iter(value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor)))
        size = next((size for size in self._subject.buckets if size >= used), None)
        if size is None:
            return self._call(batch)
        steps, buffers, outputs = self._recorded[size]
        with torch.no_grad():
            for slot in self._subject.slots:
                if slot.field in buffers:
                    _load(buffers[slot.field], batch.get(slot.field), slot)
        with entering(Current(stage=Stage.REPLAYING, batch=batch)):
            for step in steps:
                step()
        return _sliced(outputs, size, used)

    @property
    def _has_breaks(self) -> bool:
        return self._subject.options.get("backend") == "breakable"

    def _call(self, batch: dict[str, Any]) -> Any:
        return self._subject.function(batch) if self._subject.is_phase else self._subject.function(**batch)


class _Steps:
    """Graphs, and the eager calls between them."""

    def __init__(self, recorder: Recorder) -> None:
        self.steps: list[Callable[[], None]] = []
        self._recorder = recorder
        recorder.begin()

    def end(self) -> None:
        self.steps.append(self._recorder.end().replay)

    def gap(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.end()
        self.steps[-1]()
        with unbroken():
            result = function(*args, **kwargs)
        home = result.clone() if isinstance(result, torch.Tensor) else result

        def again() -> None:
            found = function(*args, **kwargs)
            if isinstance(home, torch.Tensor):
                home.copy_(found)

        self.steps.append(again)
        self._recorder.begin()
        return home


def _sample(subject: Subject, size: int) -> dict[str, Any]:
    sample = subject.options.get("sample") or sample_from(subject.slots, torch.device("cpu"))
    found: dict[str, Any] = sample(Extent({"rows": size}, {"rows": size}), 0)
    return found


def _load(buffer: torch.Tensor, value: torch.Tensor | None, slot: Slot) -> None:
    padding = slot.pad.value if slot.pad is not None else None
    if padding is not None:
        buffer.fill_(padding)
    if value is not None:
        buffer[: value.shape[0]].copy_(value)
    elif slot.absent is not None:
        buffer.fill_(slot.absent)


def _sliced(outputs: Any, size: int, used: int) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs[:used] if outputs.dim() and outputs.shape[0] == size else outputs
    if isinstance(outputs, dict):
        return {key: _sliced(value, size, used) for key, value in outputs.items()}
    return outputs


def bites(animal: Animal) -> str:
    """What goes wrong with graphs made by hand; empty where nothing does."""
    device = EmulatedDevice()
    wanted = played_eagerly(animal.make, device)
    subject = fresh(animal.make, device.torch_device)
    try:
        run = Run(ByHand(subject, device))
    except Exception as error:
        return f"capture raised {type(error).__name__}"
    play(subject, run)
    if run.raised is not None:
        return f"call {len(run.results) + 1} raised {type(run.raised).__name__}"
    return difference(run.results, wanted.results) or difference(copied(subject.state()), wanted.state)
