"""Runner options: choices beyond phase and plan; what a plan asks of buckets and backend, and what it may know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from phonograph.devices import Device
from phonograph.errors import DeclarationError
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.planning.kinds import CompilerName, GuardMode
from phonograph.graphs.planning.resolve import PhasePlan, Plan
from phonograph.graphs.planning.rules import DeviceFacts
from phonograph.graphs.recording.backends import BACKENDS, BackendOptions
from phonograph.graphs.recording.guarding import GuardedSizes, GuardOptions

Outputs = Literal["own", "view"]
FactsOption = Literal["check", "verify", "off"]


@dataclass(frozen=True)
class RunnerOptions:
    """What a runner does beyond its phase and plan."""

    outputs: Outputs = "own"
    """`own`: a call returns objects and tensors of its own; `view`: the graph's, valid until the next call."""
    strict: bool = False
    """A call that no graph can serve is an error."""
    tc_compiler: CompilerName = "eager"
    """What compiles the pieces of `tc_piecewise`. `eager`, which every device takes, is the default of a bare `Runner`;
    `graphed` and the engine have that of the plan: `inductor` where the device records its kernels."""
    tc_fallback: bool = False
    """Whether `tc_piecewise` records shapes that torch.compile can't trace as `breakable` does."""
    debug: bool = False
    """Run everything eagerly through the capture path."""
    collect_garbage: bool = False
    """Let the garbage collector run during capture."""
    eager_copies: bool = False
    """Whether the eager path copies its inputs into buffers that the next call overwrites; without, a body has the
    caller's own device tensors, and what must be made of other values is made anew for each call."""
    barrier: Callable[[], None] | None = None
    """Called after every warm-up and capture where ranks must stay together, also by one that failed."""
    guard: GuardMode = "refuse"
    """For a shape whose ops depend on the sample: no recording, or one and a finding, or no check."""
    guarded: GuardedSizes = "all"
    """Every recording, or the largest and the smallest of each product."""
    profile: str | None = None
    """A folder for traces of warm-ups and captures."""
    facts: FactsOption = "check"
    """When to check what recordings assume: at every call, when `verify` runs (by one shape), or never."""
    ignore: tuple[str, ...] = ()
    """Facts and Python state that don't matter, by dotted name (`cache.hits`)."""

    def __post_init__(self) -> None:
        if self.outputs not in ("own", "view"):
            raise DeclarationError(f"outputs is {self.outputs!r}; expected 'own' or 'view'.")
        if self.facts not in ("check", "verify", "off"):
            raise DeclarationError(f"facts is {self.facts!r}; expected 'check', 'verify' or 'off'.")
        if isinstance(self.ignore, str):
            raise DeclarationError(f"ignore={self.ignore!r} is one name. Write ignore=({self.ignore!r},).")
        GuardOptions(self.guard, self.guarded)


def options_of(plan: Plan) -> RunnerOptions:
    """The options that a plan names."""
    return RunnerOptions(
        tc_compiler=plan.tc_compiler,
        tc_fallback=plan.tc_fallback,
        debug=plan.debug,
        collect_garbage=plan.gc,
        guard=plan.guard,
        profile=plan.profile,
    )


def backend_options(options: RunnerOptions, phase: Phase) -> BackendOptions:
    """What a runner's options and its phase say to the backend."""
    return BackendOptions(options.tc_compiler, options.tc_fallback, phase.break_ops)


def buckets_for(plan: PhasePlan, bucketed: str) -> Buckets | None:
    """The buckets that a plan asks for; generated up to its limit where it names none."""
    if plan.buckets is not None:
        return Buckets(plan.buckets, plan.exact)
    if plan.limit is None:
        return None
    ladder = Buckets.tokens_up_to if bucketed == "tokens" else Buckets.up_to
    return Buckets(ladder(plan.limit).sizes, plan.exact)


def facts_of(device: Device, function: Callable[..., Any] | None = None) -> DeviceFacts:
    """What rules may know about a device and this build, and about the function that is to be recorded."""
    is_script = isinstance(function, torch.jit.ScriptModule | torch.jit.ScriptFunction)
    return DeviceFacts(
        device.name,
        device.capabilities.backends,
        built=frozenset(BACKENDS),
        compilers=device.capabilities.compilers,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        untraceable="it is TorchScript, which torch.compile does not trace" if is_script else "",
    )
