"""Animals: what the zoo keeps, and how it plays one eagerly and through graphs.

An animal is made anew for every run, from the same seeds: one is called as it is, its twin through the graph layer, by
the same script of calls and of changes between them.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from phonograph import (
    CaptureReport,
    Device,
    Phase,
    PhasePlan,
    PhonographError,
    Reason,
    Runner,
    Slot,
    VerifyReport,
    graphed,
    verify,
)
from phonograph.graphs.phases.context import Current, entering
from phonograph.graphs.phases.phase import sample_from
from phonograph.graphs.progress import silent

WIDTH = 4
X = Slot("x", ("rows", WIDTH), torch.float32)


class Mechanism(Enum):
    """What would catch a bug."""

    VALUES = "facts about Python values read"
    ADDRESSES = "addresses of parameters, buffers and other tensors"
    MODES = "global modes"
    STATE = "Python state that trial runs move"
    OUTPUTS = "verify of outputs"
    WRITES = "verify of state"
    GUARD = "guard of two traces"
    OPS = "ops that no graph can hold"
    GAPS = "gaps"
    OTHER = "other"


class _CallRefusedError(Exception):
    """A call was refused: what comes after it is not played."""


@dataclass
class Run:
    """Calls one twin, and keeps what each call gave."""

    call: Callable[[dict[str, Any]], Any]
    results: list[Any] = field(default_factory=list)
    raised: Exception | None = None

    def __call__(self, **batch: Any) -> Any:
        found = self.unjudged(**batch)
        self.results.append(copied(found))
        return found

    def unjudged(self, **batch: Any) -> Any:
        """A call inside of a documented window, after which a change is seen."""
        try:
            return self.call(batch)
        except Exception as error:
            self.raised = error
            raise _CallRefusedError from error


def stateless() -> None:
    """Of an animal whose calls leave nothing behind."""


@dataclass(frozen=True)
class Subject:
    """An animal that is ready to be played."""

    function: Callable[..., Any]
    """Takes its slots by name; with `is_phase`, the batch."""
    calls: Callable[[Run], None]
    """The script: calls, and what is changed between them."""
    slots: Sequence[Slot] = (X,)
    buckets: tuple[int, ...] = (4, 8)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `graphed`, or of the phase."""
    is_phase: bool = False
    """Whether it is served by a runner over a phase, whose batches may have fields that are no slots."""
    state: Callable[[], Any] = stateless
    """What must be the same after the script, besides what calls return."""
    eager: Callable[[dict[str, Any]], Any] | None = None
    """The same calls without graphs, where they are more than the function: a plan, a tail."""


Make = Callable[[torch.device], Subject]


@dataclass(frozen=True)
class Animal:
    """A model with one bug, or with none."""

    name: str
    says: str
    """What the bug is, or what is unusual."""
    make: Make
    mechanism: Mechanism = Mechanism.OTHER
    names: str = ""
    """A pattern of what must be told where the bug is refused or found stale: the op, or the value."""
    has_line: bool = True
    """Whether one line is at fault, which must be named."""
    harmless: str = ""
    """Why there is nothing to tell: how the product serves it right, where graphs made by hand do not."""
    harmless_on_gpu: str = ""
    """The same, where only a GPU has nothing to tell."""
    differs_by_itself: bool = False
    """Whether two eager runs differ, so that only a refusal of all recordings counts."""
    open: str = ""
    """What the product does not do yet, beginning with SILENT, CRASHED, UNNAMED or FALSE ALARM; empty where it does."""
    needs_gpu: bool = False
    kills_gpu: bool = False
    """Whether it ends the device's context, and all tests after it."""
    open_on_gpu: str | None = None
    """As `open`, where it is another on a GPU."""

    def harmless_on(self, device: str) -> str:
        return self.harmless or (self.harmless_on_gpu if device == "cuda" else "")

    def open_on(self, device: str) -> str:
        return self.open_on_gpu if device == "cuda" and self.open_on_gpu is not None else self.open


@dataclass(frozen=True)
class Served:
    """What came of an animal that was captured and played through graphs."""

    report: CaptureReport | None
    results: list[Any]
    state: Any
    replays: int
    eager: Mapping[Reason, str]
    """By reason of eager calls, the latest detail."""
    raised: Exception | None = None
    phase: str = ""
    logged: Sequence[str] = ()
    """What calls have logged."""


def sampled(on: torch.device, *slots: Slot, **more: Callable[[int], Any]) -> Callable[[Any, int], dict[str, Any]]:
    """A sampler for the slots, and fields that are none: functions of the seed."""
    draw = sample_from(slots or (X,), on)
    return lambda extent, seed: {**draw(extent, seed), **{name: make(seed) for name, make in more.items()}}


def rows(on: torch.device, count: int, seed: int = 1, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(on)


def ints(on: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=on)


def calling(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `x` that calls a model, which names its argument otherwise."""

    def step(x: torch.Tensor) -> Any:
        return model(x)

    return step


def fresh(make: Make, on: torch.device) -> Subject:
    """The same animal every time."""
    _seed(0)
    return make(on)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def play(subject: Subject, run: Run) -> None:
    _seed(1)
    with suppress(_CallRefusedError):
        subject.calls(run)


def played_eagerly(make: Make, device: Device) -> Served:
    subject = fresh(make, device.torch_device)

    def call(batch: dict[str, Any]) -> Any:
        with torch.no_grad(), entering(Current(batch=batch)):
            if subject.eager is not None:
                return subject.eager(batch)
            return subject.function(batch) if subject.is_phase else subject.function(**batch)

    run = Run(call)
    play(subject, run)
    return Served(None, run.results, copied(subject.state()), 0, {}, run.raised)


@dataclass(frozen=True)
class Captured:
    """An animal with its recordings."""

    runner: Runner
    call: Callable[[dict[str, Any]], Any]
    report: CaptureReport


def captured(subject: Subject, device: Device) -> Captured:
    """Wrapped and captured as its users would; raises what the product raises."""
    call: Callable[[dict[str, Any]], Any]
    if subject.is_phase:
        runner = _phase_runner(subject, device)
        call = runner.run
    else:
        made = graphed(
            subject.function,
            slots=subject.slots,
            bucketed="rows",
            buckets=subject.buckets,
            device=device,
            **subject.options,
        )
        runner = made.runner
        call = lambda batch: made(**batch)  # noqa: E731
    return Captured(runner, call, runner.capture(silent))


def _phase_runner(subject: Subject, device: Device) -> Runner:
    options = dict(subject.options)
    plan = PhasePlan(backend=options.pop("backend", "full"), buckets=subject.buckets)
    sample = options.pop("sample", None) or sample_from(subject.slots, device.torch_device)
    phase = Phase("decode", subject.slots, "rows", subject.function, sample, **options)
    return Runner(phase, device, plan)


def played_through_graphs(make: Make, device: Device, *, verified: bool = False) -> tuple[Served, VerifyReport | None]:
    """Captured, verified if asked for, and played."""
    subject = fresh(make, device.torch_device)
    try:
        made = captured(subject, device)
    except PhonographError as error:
        return Served(None, [], None, 0, {}, error), None
    runner, report = made.runner, made.report
    checked = verify(runner) if verified else None
    before = runner.stats.replays.total(), set(runner.stats.details)
    run = Run(made.call)
    with logged() as lines:
        play(subject, run)
    details = {reason: detail for reason, detail in runner.stats.details.items() if reason not in before[1]}
    replays = runner.stats.replays.total() - before[0]
    state, name = copied(subject.state()), runner.phase.name
    return Served(report, run.results, state, replays, details, run.raised, name, lines), checked


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that are logged inside."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("phonograph")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def verified(make: Make, device: Device) -> VerifyReport | None:
    """What `verify` says right after capture; None where nothing was captured."""
    try:
        runner = captured(fresh(make, device.torch_device), device).runner
    except PhonographError:
        return None
    return verify(runner) if runner.captured else None


def moved_by_capture(make: Make, device: Device) -> str:
    """What capture and verify change of an animal's state, which is the caller's; empty where they leave it alone."""
    subject = fresh(make, device.torch_device)
    if subject.state is stateless:
        return ""
    before = copied(subject.state())
    runner = captured(subject, device).runner
    with suppress(Exception):  # what verify raises is judged elsewhere
        verify(runner)
    return difference(copied(subject.state()), before, "state")


# -- what calls return ----------------------------------------------------------------------------------------


def copied(value: Any) -> Any:
    """The same values in tensors of their own; objects become dicts of what they hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {one.name: copied(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if hasattr(value, "__dict__") and not callable(value):
        return {key: copied(item) for key, item in vars(value).items()}
    return value


def difference(found: Any, wanted: Any, where: str = "") -> str:
    """Where two results differ by more than rounding, element by element; empty where they don't."""
    if isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{where}: {found!r} is no tensor"
        try:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            return f"{where}: {' '.join(str(error).split())[:160]}"
        return ""
    if isinstance(wanted, dict | list):
        if type(found) is not type(wanted) or len(found) != len(wanted):
            return f"{where}: {found!r} has other parts than {wanted!r}"
        keys = wanted if isinstance(wanted, dict) else range(len(wanted))
        if isinstance(wanted, dict) and set(found) != set(wanted):
            return f"{where}: has {sorted(map(str, found))}, expected {sorted(map(str, wanted))}"
        return next((told for key in keys if (told := difference(found[key], wanted[key], f"{where}[{key}]"))), "")
    return "" if found == wanted else f"{where}: {found!r}, not {wanted!r}"
