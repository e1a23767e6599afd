"""StepProfile: a steady step under torch's profiler: launches, copies, kernels, and gaps between steps."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from phonograph.bench.figures import rounded
from phonograph.devices import Device

_LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "hipGraphLaunch", "hipLaunchKernel")
_MAX_KERNELS = 16
_HAIR = 1e-3


@dataclass(frozen=True)
class _Event:
    name: str
    kind: str
    begin: float
    end: float
    launch: int
    """A number that all work of one launch has in common."""


@dataclass(frozen=True)
class StepProfile:
    """What a step does, over the whole steps that were watched; times in microseconds."""

    steps: int
    period_us: float
    """From the first kernel of a step to the first of the next, median."""
    gap_us: float
    """From the end of a step's last kernel to the next step's first one, median."""
    idle_share: float
    """The share of time in which no kernel runs, within steps and between them."""
    kernels: float
    launches: float
    """Graphs and kernels that the host launches."""
    copies_to_device: float
    """Per step; their median, since pages are sent to the device now and then."""
    copies_to_host: float
    top_kernels_us: Mapping[str, float]
    """The kernels that take most of a step."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def profiled(run: Callable[[int], object], num_steps: int, device: Device) -> StepProfile:
    """Watch `run(num_steps)`, which launches that many steps, each with a copy to the host at its end."""
    device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, _activity(device)]) as watched:
        run(num_steps)
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        return step_profile(json.loads(path.read_text())["traceEvents"], num_steps)


def _activity(device: Device) -> ProfilerActivity:
    return ProfilerActivity.XPU if device.torch_device.type == "xpu" else ProfilerActivity.CUDA


def step_profile(trace: Iterable[Mapping[str, Any]], num_launched: int) -> StepProfile:
    """Read a trace in Chrome's format."""
    events = sorted(_events(trace), key=lambda event: event.begin)
    # What was under way when the profiler started is no whole step.
    spans = itertools.pairwise(_boundaries(events))
    steps = [[e for e in events if begin < e.begin <= end] for begin, end in spans]
    steps = [step for step in steps if any(event.kind == "kernel" for event in step)]
    if not steps:
        return StepProfile(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {})
    kernels = [[event for event in step if event.kind == "kernel"] for step in steps]
    firsts = [step[0].begin for step in kernels]
    lasts = [max(event.end for event in step) for step in kernels]
    periods = [after - before for before, after in itertools.pairwise(firsts)]
    gaps = [after - last for last, after in zip(lasts, firsts[1:], strict=False)]
    busy, whole = _covered([e for step in kernels for e in step]), lasts[-1] - firsts[0]
    counts = [Counter(event.kind for event in step) for step in steps]
    return StepProfile(
        steps=len(steps),
        period_us=rounded(statistics.median(periods)) if periods else 0.0,
        gap_us=rounded(statistics.median(gaps)) if gaps else 0.0,
        idle_share=rounded(1 - busy / whole, 3) if whole else 0.0,
        kernels=statistics.median(count["kernel"] for count in counts),
        launches=rounded(sum(event.kind == "launch" for event in events) / num_launched),
        copies_to_device=statistics.median(count["to_device"] for count in counts),
        copies_to_host=statistics.median(count["to_host"] for count in counts),
        top_kernels_us=_top(kernels),
    )


def _boundaries(events: list[_Event]) -> list[float]:
    """Moments between steps: at the copy of their tokens to the host, or where there is none, before each graph."""
    copies = [event.begin for event in events if event.kind == "to_host"]
    if len(copies) > 1:
        return copies
    kernels: dict[int, list[_Event]] = {}
    for event in events:
        if event.kind == "kernel":
            kernels.setdefault(event.launch, []).append(event)
    # All kernels of a graph belong to one launch.
    return [found[0].begin - _HAIR for found in kernels.values() if len(found) > 1]


def _events(trace: Iterable[Mapping[str, Any]]) -> Iterable[_Event]:
    for entry in trace:
        if entry.get("ph") != "X":
            continue
        kind = _kind(str(entry.get("cat", "")), str(entry.get("name", "")))
        if kind:
            begin = float(entry["ts"])
            launch = int(entry.get("args", {}).get("correlation", -1))
            yield _Event(str(entry["name"]), kind, begin, begin + float(entry.get("dur", 0.0)), launch)


def _kind(category: str, name: str) -> str:
    if category == "kernel":
        return "kernel"
    if category == "gpu_memcpy":
        return "to_host" if "DtoH" in name else "to_device" if "HtoD" in name else ""
    if category in ("cuda_runtime", "cuda_driver") and name.startswith(_LAUNCHES):
        return "launch"
    return ""


def _covered(events: list[_Event]) -> float:
    """Time in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.begin):
        total += max(0.0, event.end - max(event.begin, reached))
        reached = max(reached, event.end)
    return total


def _top(steps: list[list[_Event]]) -> dict[str, float]:
    times: Counter[str] = Counter()
    for step in steps:
        for event in step:
            times[event.name[:96]] += event.end - event.begin  # type: ignore[assignment]
    return {name: rounded(total / len(steps)) for name, total in times.most_common(_MAX_KERNELS)}
