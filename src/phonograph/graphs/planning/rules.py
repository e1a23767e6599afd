"""Compatibility rules: a table of values that exclude each other, or that this device can't have, each rule named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from phonograph.graphs.planning.kinds import Value, shown
from phonograph.graphs.planning.settings import Resolved

ResolvedValues = Mapping[str, Resolved]
"""The values as the rules before this one left them, by setting."""


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about the device and this build, which no request changes."""

    device: str
    backends: frozenset[str]
    """The backends that the device supports."""
    built: frozenset[str]
    """The backends that this build has."""

    compilers: frozenset[str] = frozenset({"eager", "inductor"})
    """The compilers of `tc_piecewise` whose code the device can record."""
    deterministic: bool = False
    """Whether torch is asked for deterministic algorithms."""
    untraceable: str = ""
    """Why torch.compile can't trace what is to be recorded; empty where nothing is known."""
    known_failure: str = ""
    """Why models of this architecture are known to fail when they are compiled; empty for all others."""
    packed_weights: str = ""
    """Which kernels multiply weights from packed blocks, as no torch op does; empty where torch ops can."""

    def can(self, backend: str) -> bool:
        """Whether a phase can have this backend here; `disabled` records nothing, so it always can."""
        return backend == "disabled" or backend in (self.backends & self.built)


@dataclass(frozen=True)
class Change:
    """A rule's verdict: this setting must have this value, because of this."""

    setting: str
    value: Value
    because: str
    cause: str = ""
    """The setting that makes the change necessary: asked for more specifically than what it changes, it prevails."""


@dataclass(frozen=True)
class Rule:
    """A named compatibility rule."""

    name: str
    says: str
    """What holds once the rule is applied."""
    changes: Callable[[DeviceFacts, ResolvedValues], Iterable[Change]]
    """Pure; a change to the value that is already there counts as none."""
    ignorable: bool = True
    """False where skipping the rule could only fail later."""


def phases_of(values: ResolvedValues) -> list[str]:
    """The phases of the plan, by name."""
    return [name.removesuffix(".backend") for name in values if name.endswith(".backend")]


def stated(setting: str, values: ResolvedValues) -> str:
    """A value with its reason, for sentences: `graphs=off (asked by --graphs)`."""
    resolved = values[setting]
    return f"{setting}={shown(resolved.value)} ({resolved.reason})"


def _backend_not_built(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    for phase in phases_of(values):
        backend = values[f"{phase}.backend"].value
        if backend != "disabled" and backend not in facts.built:
            fallback = "full" if facts.can("full") else "disabled"
            yield Change(f"{phase}.backend", fallback, f"this build doesn't have {shown(backend)}")


def _device_lacks_backend(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    for phase in phases_of(values):
        backend = values[f"{phase}.backend"].value
        if backend != "disabled" and backend not in facts.backends:
            because = f"the device {facts.device} doesn't support {shown(backend)}"
            yield Change(f"{phase}.backend", "disabled", because)


def _traced_phases(values: ResolvedValues) -> list[str]:
    return [f"{phase}.backend" for phase in phases_of(values) if values[f"{phase}.backend"].value == "tc_piecewise"]


def _as_written(facts: DeviceFacts) -> str:
    """The backend that records a body as it is, with its breaks if it can be."""
    return next((name for name in ("breakable", "full") if facts.can(name)), "disabled")


def _device_lacks_compiler(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    compiler = str(values["tc_compiler"].value)
    if not facts.compilers:
        for name in _traced_phases(values):
            yield Change(name, _as_written(facts), f"the device {facts.device} can't record what any compiler makes")
    elif compiler not in facts.compilers and _traced_phases(values):
        because = f"the device {facts.device} can't record what {compiler} compiles"
        yield Change("tc_compiler", min(facts.compilers), because)


def _untraceable(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    for name in _traced_phases(values) if facts.untraceable else ():
        yield Change(name, _as_written(facts), facts.untraceable)


def _known_to_fail(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    for name in _traced_phases(values) if facts.known_failure else ():
        yield Change(name, _as_written(facts), facts.known_failure)


def _packed_weights(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    for name in _traced_phases(values) if facts.packed_weights else ():
        because = f"{facts.packed_weights} multiply weights from packed blocks, and torch ops can't"
        yield Change(name, _as_written(facts), because)


def _debug_runs_the_body(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    for name in _traced_phases(values) if values["debug"].value else ():
        because = f"{stated('debug', values)} runs the body itself in the place of every replay"
        yield Change(name, _as_written(facts), because, "debug")


def _deterministic(facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    if facts.deterministic and values["tc_compiler"].value == "inductor" and _traced_phases(values):
        because = "torch.use_deterministic_algorithms is on, and inductor's kernels add in an order that it picks"
        yield Change("tc_compiler", "eager", because)


def _graphs_off(_facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    graphs, backends = values["graphs"], [f"{phase}.backend" for phase in phases_of(values)]
    if graphs.value != "off":
        return
    above = [name for name in backends if values[name].value != "disabled" and values[name].outranks(graphs)]
    if above:
        yield Change("graphs", "on", f"{stated(above[0], values)} is asked for more specifically", above[0])
    for name in backends:
        if name not in above:
            yield Change(name, "disabled", f"{stated('graphs', values)} leaves it no graph", "graphs")


def _limit_is_top_bucket(_facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    for phase in phases_of(values):
        limit, buckets = values[f"{phase}.limit"], values[f"{phase}.buckets"]
        if limit.value is None or not isinstance(buckets.value, tuple) or buckets.value[-1] == limit.value:
            continue
        if (limit.source == "asked" and buckets.source != "asked") or limit.outranks(buckets):
            because = f"{stated(f'{phase}.limit', values)} is not their top, so they are generated up to it"
            yield Change(f"{phase}.buckets", None, because, f"{phase}.limit")
        else:
            top = buckets.value[-1]
            because = f"{stated(f'{phase}.buckets', values)} ends at {top}"
            yield Change(f"{phase}.limit", int(top), because, f"{phase}.buckets")


def _strict_needs_graphs(_facts: DeviceFacts, values: ResolvedValues) -> Iterator[Change]:
    backends = [f"{phase}.backend" for phase in phases_of(values)]
    if values["graphs"].value == "strict" and all(values[name].value == "disabled" for name in backends):
        above = all(values[name].outranks(values["graphs"]) for name in backends)
        because = "every phase's backend is disabled, so no batch would have a graph"
        yield Change("graphs", "on", because, backends[0] if above else "")


# Each rule sees what the ones above it changed, and none brings back what one above it forbids.
RULES: tuple[Rule, ...] = (
    Rule(
        "backend-not-built",
        "a phase's backend is one that this build has",
        _backend_not_built,
        ignorable=False,
    ),
    Rule(
        "device-lacks-backend",
        "a phase's backend is one that the device supports",
        _device_lacks_backend,
        ignorable=False,
    ),
    Rule(
        "device-lacks-compiler",
        "the compiler of tc_piecewise is one whose code the device can record; without one nothing is compiled",
        _device_lacks_compiler,
        ignorable=False,
    ),
    Rule("tc-untraceable", "code that torch.compile can't trace is not compiled", _untraceable),
    Rule("tc-architecture", "an architecture that is known to fail when compiled is not compiled", _known_to_fail),
    Rule("tc-packed-weights", "layers that torch ops can't compute are not compiled", _packed_weights),
    Rule("tc-debug", "debug compiles nothing", _debug_runs_the_body),
    Rule("tc-deterministic", "deterministic mode takes the compiler that changes no op", _deterministic),
    Rule("graphs-off", "without graphs every phase's backend is disabled", _graphs_off),
    Rule(
        "limit-is-top-bucket",
        "where a phase has both a limit and buckets, the limit is the largest bucket",
        _limit_is_top_bucket,
        ignorable=False,
    ),
    Rule("strict-needs-graphs", "strict needs a phase whose backend isn't disabled", _strict_needs_graphs),
)
