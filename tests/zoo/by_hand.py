"""By hand: graphs as people write them without a library, to show that every bug of the zoo is one.

Static input buffers, one warm-up, one recording per bucket; a call copies its inputs in, pads, replays and slices.
"""

from __future__ import annotations

from typing import Any

import torch

from phonograph import EmulatedDevice, Extent, Slot
from phonograph.devices.base import DeviceGraph
from phonograph.graphs.phases.phase import sample_from
from zoo.animals import Animal, Run, Subject, copied, difference, fresh, play, played_eagerly


class ByHand:
    """The recordings of one animal."""

    def __init__(self, subject: Subject, device: EmulatedDevice) -> None:
        self._subject = subject
        self._recorded: dict[int, tuple[DeviceGraph, dict[str, torch.Tensor], Any]] = {}
        pool = device.new_pool()
        for size in subject.buckets:
            sample = _sample(subject, size)
            buffers = {slot.field: sample[slot.field].clone() for slot in subject.slots if slot.field in sample}
            batch = {**sample, **buffers}
            self._call(batch)
            with device.recorder(pool) as recorder:
                recorder.begin()
                outputs = self._call(batch)
                graph = recorder.end()
            self._recorded[size] = graph, buffers, outputs

    def __call__(self, batch: dict[str, Any]) -> Any:
        used = next(iter(value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor)))
        size = next((size for size in self._subject.buckets if size >= used), None)
        if size is None:
            return self._call(batch)
        graph, buffers, outputs = self._recorded[size]
        with torch.no_grad():
            for slot in self._subject.slots:
                if slot.field in buffers:
                    _load(buffers[slot.field], batch.get(slot.field), slot)
        graph.replay()
        return _sliced(outputs, size, used)

    def _call(self, batch: dict[str, Any]) -> Any:
        return self._subject.function(batch) if self._subject.is_phase else self._subject.function(**batch)


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
