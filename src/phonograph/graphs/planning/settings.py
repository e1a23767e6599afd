"""Plan settings: one table for the plan itself and for each of its phases, and how a value is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Generic, Literal, TypeVar

from phonograph.errors import DeclarationError, PlanError
from phonograph.graphs.planning.kinds import (
    BACKEND,
    BACKENDS,
    BUCKETS,
    COMPILER,
    COUNT,
    FOLDER,
    GRAPHS_WORD,
    GUARD_WORD,
    LIMIT,
    NAMES,
    RATIO,
    ROWS,
    SWITCH,
    BackendName,
    SettingKind,
    Value,
    unknown,
)

Source = Literal["asked", "default", "rule", "measured"]
MAX_PADDING_RATIO = 2.0
MAX_PADDING_ROWS = 256
MAX_RECORDINGS = 200

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class PhaseDefaults:
    """A phase as a plan knows it: its name, and the backend that it has unless another is asked for or measured."""

    name: str
    backend: BackendName = "full"
    because: str = "one graph per shape has the least launch cost"


@dataclass(frozen=True)
class AbsentPhase:
    """A phase that others of its kind have and this plan doesn't: it has flags, and requests name it."""

    defaults: PhaseDefaults
    because: str
    """Why it is not there, and what to ask for instead."""
    stand_ins: tuple[str, ...] = ()
    """The phases that do its work: names of SGLang's for it are names for these."""


_BETWEEN = "attention that depends on the number of requests can run between graphs"
KNOWN_PHASES: Mapping[str, PhaseDefaults] = {
    "decode": PhaseDefaults("decode"),
    "prefill": PhaseDefaults("prefill", "breakable", _BETWEEN),
    "embed": PhaseDefaults("embed", "breakable", _BETWEEN),
    "target_verify": PhaseDefaults("target_verify"),
    "draft": PhaseDefaults("draft"),
    "draft_extend": PhaseDefaults("draft_extend"),
    "idle": PhaseDefaults("idle"),
}
"""The usual names of an engine's forward passes. A plan has those that its caller names."""


@dataclass(frozen=True)
class Setting(Generic[T_co]):
    """One thing that can be configured."""

    name: str
    kind: SettingKind[T_co]
    default: T_co
    because: str
    """Why the default is what it is."""
    help: str
    """What the setting does; `--help` prints it."""

    @property
    def phase(self) -> str | None:
        """The phase it belongs to, or None for a setting of the whole plan."""
        phase, dot, _ = self.name.partition(".")
        return phase if dot else None

    @property
    def field(self) -> str:
        """The name without the phase."""
        return self.name.rpartition(".")[2]


def _plan_settings() -> tuple[Setting[Value], ...]:
    return (
        Setting(
            "graphs", GRAPHS_WORD, "on", "a shape without a graph runs eagerly, with a counted reason",
            help="on: a batch without a graph runs eagerly; off: no phase has graphs; "
            "strict: a shape that has no graph is an error",
        ),
        Setting(
            "guard", GUARD_WORD, "refuse", "a recording would freeze a value that changes from batch to batch",
            help="a shape whose ops depend on the sample: refuse gives it no recording, report only says so, "
            "off does not look",
        ),
        Setting(
            "tc_compiler", COMPILER, "inductor", "it fuses the ops between two breaks",
            help="what compiles the pieces of tc_piecewise: eager runs the traced ops as they are",
        ),
        Setting(
            "tc_fallback", SWITCH, False, "a phase that was to be compiled is not quietly served by another backend",
            help="record shapes that torch.compile can't trace as breakable does, and say why",
        ),
        Setting(
            "debug", SWITCH, False, "graphs are replayed, not imitated",
            help="run everything eagerly through the capture path, to tell a wrong model from a wrong graph",
        ),
        Setting(
            "gc", SWITCH, False, "a collection may free device memory in the middle of a graph",
            help="collect garbage during capture instead of freezing the collector",
        ),
        Setting(
            "profile", FOLDER, None, "a profiler makes warm-ups and captures slower",
            help="profile the warm-ups and captures of every phase, and write the traces into this folder",
        ),
        Setting(
            "ignore_rules", NAMES, (), "every compatibility rule applies",
            help="skip the compatibility rule of this name; the plan records it (repeatable)",
        ),
    )  # fmt: skip


def _phase_settings(defaults: PhaseDefaults) -> tuple[Setting[Value], ...]:
    phase = defaults.name
    return (
        Setting(
            f"{phase}.backend", BACKEND, defaults.backend, defaults.because,
            help=f"how {phase} is recorded: {', '.join(BACKENDS)}",
        ),
        Setting(
            f"{phase}.limit", LIMIT, None, "the buckets, or the device and the engine, decide",
            help=f"the largest size of {phase} that gets a graph",
        ),
        Setting(
            f"{phase}.buckets", BUCKETS, None, "buckets are generated up to the limit",
            help=f"the padded sizes of {phase} that get a graph, increasing, separated by commas",
        ),
        Setting(
            f"{phase}.exact", SWITCH, False, "a size between two buckets is padded up to the next",
            help=f"serve {phase} by graph only when its size is exactly a bucket, without padding",
        ),
        Setting(
            f"{phase}.max_padding_ratio", RATIO, MAX_PADDING_RATIO,
            "chosen, not measured: a replay saves launches, and may pad for that",
            help=f"run {phase} eagerly when the bucket has more than this many times the used rows, and more rows of "
            "padding than max-padding-rows",
        ),
        Setting(
            f"{phase}.max_padding_rows", ROWS, MAX_PADDING_ROWS,
            "chosen, not measured: below this, launches are taken to cost more",
            help=f"run {phase} eagerly when more rows than this are padding, and the bucket has more than "
            "max-padding-ratio times the used rows",
        ),
        Setting(
            f"{phase}.max_recordings", COUNT, MAX_RECORDINGS, "a recording costs megabytes and a share of the start",
            help=f"make no more recordings of {phase} than this, where features multiply them; those of plain batches "
            "are always made",
        ),
    )  # fmt: skip


PLAN_FIELDS: tuple[str, ...] = tuple(setting.field for setting in _plan_settings())
PHASE_FIELDS: tuple[str, ...] = tuple(setting.field for setting in _phase_settings(PhaseDefaults("any")))


@dataclass(frozen=True)
class Settings:
    """All settings of a plan with these phases."""

    phases: tuple[PhaseDefaults, ...]

    def __post_init__(self) -> None:
        if len(set(self.phase_names)) < len(self.phases):
            raise DeclarationError(
                f"a plan of the phases {', '.join(self.phase_names)}: two have the same name. Rename one."
            )

    @property
    def phase_names(self) -> tuple[str, ...]:
        return tuple(phase.name for phase in self.phases)

    @property
    def table(self) -> Mapping[str, Setting[Value]]:
        """Every setting by name, those of the plan first."""
        return _table(self.phases)

    def named(self, name: str, origin: str) -> Setting[Value]:
        """The setting of this name, or a PlanError with the nearest one."""
        if name in self.table:
            return self.table[name]
        phase, dot, _ = name.partition(".")
        if not dot:
            raise unknown("setting", name, (*PLAN_FIELDS, *(f"PHASE.{field}" for field in PHASE_FIELDS)), origin)
        if phase not in self.phase_names:
            raise unknown("phase", phase, self.phase_names, origin)
        raise unknown("setting", name, [f"{phase}.{field}" for field in PHASE_FIELDS], origin)


@cache
def _table(phases: tuple[PhaseDefaults, ...]) -> Mapping[str, Setting[Value]]:
    parts = (_plan_settings(), *map(_phase_settings, phases))
    return {setting.name: setting for part in parts for setting in part}


class Level(IntEnum):
    """How specific a request is; the higher level wins."""

    SWITCH = 1
    """A convenience switch."""
    FLAG = 2
    """A flag, or a library argument, for one setting."""
    JSON = 3
    """The canonical JSON, or the word for all phases in its place."""


@dataclass(frozen=True)
class Ask:
    """A request for a value; `origin` says where it was made, in the user's words. `resolve` checks both."""

    setting: str
    value: object
    origin: str
    level: Level = Level.FLAG


def ask(setting: str, value: object, *, origin: str = "ask()", level: Level = Level.FLAG) -> Ask:
    """A library caller's request for a setting of the plan: `LLM(asked=[ask("decode.backend", "full")])`.

    `origin` is what the plan and errors call the place where it was made.
    """
    return Ask(setting, value, origin, level)


@dataclass(frozen=True)
class Asked:
    """All requests, and the warnings about how they were made."""

    asks: tuple[Ask, ...] = ()
    warnings: tuple[str, ...] = ()


def refuse_absent(asks: Iterable[Ask], absent: Iterable[AbsentPhase]) -> None:
    """Refuse what is asked for phases that this plan doesn't have, and say why it doesn't."""
    why = {one.defaults.name: one.because for one in absent}
    for request in asks:
        if because := why.get(request.setting.partition(".")[0]):
            raise PlanError(f"{request.origin}: {because}")


@dataclass(frozen=True)
class Measured:
    """A value that the engine measured; it replaces the default and yields to a request."""

    setting: str
    value: object
    reason: str


@dataclass(frozen=True)
class Resolved:
    """A setting's value, where it comes from, and why, in one sentence."""

    value: Value
    source: Source
    reason: str
    level: Level | None = field(default=None, compare=False)
    """How specific the request is that gave the value; None where there was no request."""

    def outranks(self, other: Resolved) -> bool:
        """Whether both were asked for, and this one more specifically."""
        return self.level is not None and other.level is not None and self.level > other.level
