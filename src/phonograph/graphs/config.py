"""The settings of the graph layer, which values each of them takes, and how one is asked for."""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Literal, TypeVar

from phonograph.errors import PlanError

Backend = Literal["full", "breakable", "tc_piecewise", "disabled"]
Graphs = Literal["on", "off", "strict"]
Source = Literal["asked", "default", "rule", "measured"]
Value = bool | int | float | str | tuple[int, ...] | tuple[str, ...] | None

PHASES: tuple[str, ...] = ("decode", "prefill", "target_verify", "draft", "draft_extend", "idle")
BACKENDS: tuple[Backend, ...] = ("full", "breakable", "tc_piecewise", "disabled")
GRAPHS: tuple[Graphs, ...] = ("on", "off", "strict")
SOURCES: tuple[Source, ...] = ("asked", "default", "rule", "measured")

# A size becomes a tensor's extent, and torch holds extents in 64 signed bits.
MAX_SIZE = 2**63 - 1

MAX_SHOWN_CHARS = 80
MAX_SHOWN_PARTS = 8

T = TypeVar("T", bound=str)
T_co = TypeVar("T_co", covariant=True)


class MisfitError(Exception):
    """A value is not of the kind that its setting takes; `Kind.check` turns it into a PlanError."""


def nearest(found: str, valid: Sequence[str]) -> str | None:
    """The valid word that looks most like `found`, or None where none does."""
    # Difflib is quadratic, and no valid word is longer than this.
    close = difflib.get_close_matches(found[:100].lower(), valid, n=1, cutoff=0.4)
    return close[0] if close else None


def unknown(noun: str, found: str, valid: Sequence[str], origin: str) -> PlanError:
    """The error for a word outside a closed set; it offers the nearest valid one."""
    close = nearest(found, valid)
    hint = f"; did you mean '{close}'?" if close else ""
    return PlanError(f"unknown {noun} {_quoted(found)} in {origin}{hint} (valid: {', '.join(valid)})")


def described(found: object) -> str:
    """A value of the wrong kind as an error shows it: never long, and never an error itself."""
    try:
        text = _quoted(found)
    except (ValueError, RecursionError):  # repr refuses huge integers and deep nesting
        return f"a value too large to show ({type(found).__name__})"
    return f"{text} ({type(found).__name__})"


def _quoted(found: object) -> str:
    text = repr(found)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}.."


def shown(value: Value) -> str:
    """A valid value as it can be asked for, but long lists by their ends."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        parts = [str(part) for part in value]
        if len(parts) > MAX_SHOWN_PARTS:
            return f"{','.join(parts[:3])},..,{parts[-1]} ({len(parts)} of them)"
        return ",".join(parts) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_number(text: str) -> object:
    """The number or null that a flag's text spells, by JSON's grammar; other text stays, to be refused."""
    try:
        number: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return number if number is None or type(number) in (int, float) else text


def _read_numbers(text: str) -> object:
    if "," not in text and read_number(text) is None:
        return None
    return tuple(read_number(part) for part in text.split(","))


def _read_text(text: str) -> object:
    return text


def _read_folder(text: str) -> object:
    return None if text == "null" else text


def _one_of(words: tuple[T, ...]) -> Callable[[object], T]:
    def convert(found: object) -> T:
        for word in words:
            if isinstance(found, str) and found == word:
                return word
        raise MisfitError

    return convert


def _size(found: object, least: int = 1) -> int:
    # A bool is an int to isinstance, but nobody means `limit=True`.
    if type(found) is not int or not least <= found <= MAX_SIZE:
        raise MisfitError
    return found


def _rows(found: object) -> int:
    return _size(found, least=0)


def _limit(found: object) -> int | None:
    return None if found is None else _size(found)


def _buckets(found: object) -> tuple[int, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list | tuple) or not found:
        raise MisfitError
    sizes = tuple(_size(size) for size in found)
    if any(below >= above for below, above in itertools.pairwise(sizes)):
        raise MisfitError
    return sizes


def _ratio(found: object) -> float:
    # The bound on integers keeps float() from overflowing; `>=` is false for NaN.
    ratio = float(_size(found)) if type(found) is int else found
    if type(ratio) is not float or not ratio >= 1 or math.isinf(ratio):
        raise MisfitError
    return ratio


def _switch(found: object) -> bool:
    if type(found) is not bool:
        raise MisfitError
    return found


def _folder(found: object) -> str | None:
    if found is not None and not (isinstance(found, str) and found):
        raise MisfitError
    return found


def _names(found: object) -> tuple[str, ...]:
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) and name for name in found):
        raise MisfitError
    return tuple(sorted({str(name) for name in found}))


@dataclass(frozen=True)
class Kind(Generic[T_co]):
    """Which values a setting takes; flags, JSON and Python callers go through the same `check`."""

    expected: str
    convert: Callable[[object], T_co]
    """Gives the typed value or raises MisfitError; a value that it gave it gives again."""
    metavar: str
    """How `--help` shows a value; empty for a switch, which has none."""
    read: Callable[[str], object] = _read_text
    """Reads a flag's text; never fails, because `check` has the better message."""
    noun: str = ""
    words: tuple[str, ...] = ()
    """The closed set that the values come from, where there is one, and what an error calls a member."""

    def check(self, found: object, setting: str, origin: str) -> T_co:
        """The typed value of `setting`, or a PlanError that says where the wrong one comes from."""
        try:
            return self.convert(found)
        except MisfitError:
            pass
        if self.words and isinstance(found, str):
            raise unknown(self.noun, found, self.words, origin)
        raise PlanError(f"reading {setting} from {origin}: expected {self.expected}, found {described(found)}")


BACKEND = Kind("a backend", _one_of(BACKENDS), "|".join(BACKENDS), noun="backend", words=BACKENDS)
GRAPHS_WORD = Kind("on, off or strict", _one_of(GRAPHS), "|".join(GRAPHS), noun="value of graphs", words=GRAPHS)
SWITCH = Kind("true or false", _switch, "")
LIMIT = Kind("a positive 64-bit integer, or null", _limit, "SIZE", read_number)
BUCKETS = Kind("positive 64-bit integers, each above the one before, or null", _buckets, "SIZE,SIZE,..", _read_numbers)
RATIO = Kind("a finite number of at least 1", _ratio, "RATIO", read_number)
ROWS = Kind("a 64-bit integer of at least 0", _rows, "ROWS", read_number)
COUNT = Kind("a positive 64-bit integer", _size, "COUNT", read_number)
NAMES = Kind("a list of rule names", _names, "NAME")
FOLDER = Kind("the name of a folder, or null", _folder, "FOLDER", _read_folder)


@dataclass(frozen=True)
class Setting(Generic[T_co]):
    """One thing that can be configured."""

    name: str
    kind: Kind[T_co]
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
            help="go past the compatibility rule of this name; the plan records it (repeatable)",
        ),
    )  # fmt: skip


def _backend_default(phase: str) -> tuple[Backend, str]:
    if phase == "prefill":
        return "breakable", "attention that depends on the number of requests can run between graphs"
    return "full", "one graph per shape has the least launch cost"


def _phase_settings(phase: str) -> tuple[Setting[Value], ...]:
    backend, because = _backend_default(phase)
    return (
        Setting(
            f"{phase}.backend", BACKEND, backend, because,
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
            f"{phase}.max_padding_ratio", RATIO, 2.0, "a replay of twice the work may still beat eager",
            help=f"run {phase} eagerly when its padded size is above this many times the used one "
            "and max-padding-rows is exceeded as well",
        ),
        Setting(
            f"{phase}.max_padding_rows", ROWS, 256, "a small replay beats eager whatever it pads",
            help=f"run {phase} eagerly when more rows than this are padding "
            "and max-padding-ratio is exceeded as well",
        ),
        Setting(
            f"{phase}.max_recordings", COUNT, 200, "a recording costs megabytes and a share of the start",
            help=f"make no more recordings of {phase} than this, where features multiply them; those of plain batches "
            "are always made",
        ),
    )  # fmt: skip


SETTINGS: Mapping[str, Setting[Value]] = {
    setting.name: setting
    for settings in (_plan_settings(), *(_phase_settings(phase) for phase in PHASES))
    for setting in settings
}
PLAN_FIELDS: tuple[str, ...] = tuple(s.field for s in SETTINGS.values() if s.phase is None)
PHASE_FIELDS: tuple[str, ...] = tuple(s.field for s in SETTINGS.values() if s.phase == PHASES[0])


def setting_named(name: str, origin: str) -> Setting[Value]:
    """The setting of this name, or a PlanError with the nearest one."""
    if name in SETTINGS:
        return SETTINGS[name]
    phase, dot, _ = name.partition(".")
    if not dot:
        raise unknown("setting", name, (*PLAN_FIELDS, *(f"PHASE.{field}" for field in PHASE_FIELDS)), origin)
    if phase not in PHASES:
        raise unknown("phase", phase, PHASES, origin)
    raise unknown("setting", name, [f"{phase}.{field}" for field in PHASE_FIELDS], origin)


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
    """A value that somebody asks for; `origin` is where, in the user's words. `resolve` checks both."""

    setting: str
    value: object
    origin: str
    level: Level = Level.FLAG


def ask(setting: str, value: object, *, origin: str, level: Level = Level.FLAG) -> Ask:
    """A library caller's request: `ask("decode.backend", "full", origin="backend=")`."""
    return Ask(setting, value, origin, level)


@dataclass(frozen=True)
class Asked:
    """Everything that was asked, and what the user should be told about how it was asked."""

    asks: tuple[Ask, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """A value that the engine found out; it stands in for the default and yields to a request."""

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
    """How specific the request is that gave the value; None where nobody asked."""

    def outranks(self, other: Resolved) -> bool:
        """Whether both were asked for, and this one more specifically."""
        return self.level is not None and other.level is not None and self.level > other.level
