"""Setting kinds: the values that a setting takes. Flags, JSON and Python callers go through the same check."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from phonograph.errors import PlanError
from phonograph.numbers import is_finite, is_whole

BackendName = Literal["full", "breakable", "tc_piecewise", "disabled"]
GraphsMode = Literal["on", "off", "strict"]
CompilerName = Literal["eager", "inductor"]
GuardMode = Literal["refuse", "report", "off"]
"""For a shape whose ops depend on the sample: no recording; a recording and a finding; or no check."""
Value = bool | int | float | str | tuple[int, ...] | tuple[str, ...] | None

BACKENDS: tuple[BackendName, ...] = ("full", "breakable", "tc_piecewise", "disabled")
GRAPHS: tuple[GraphsMode, ...] = ("on", "off", "strict")
COMPILERS: tuple[CompilerName, ...] = ("eager", "inductor")
GUARDS: tuple[GuardMode, ...] = ("refuse", "report", "off")

MAX_SHOWN_CHARS = 80
MAX_SHOWN_PARTS = 8

T = TypeVar("T", bound=str)
T_co = TypeVar("T_co", covariant=True)


class MisfitError(Exception):
    """A value is not of the kind that its setting takes; `SettingKind.check` turns it into a PlanError."""


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
    if not is_whole(found, least):
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
    if not is_finite(found) or not found >= 1:
        raise MisfitError
    return float(found)


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
class SettingKind(Generic[T_co]):
    """The values that a setting takes; flags, JSON and Python callers go through the same `check`."""

    expected: str
    convert: Callable[[object], T_co]
    """Returns the typed value or raises MisfitError; idempotent."""
    metavar: str
    """How `--help` shows a value; empty for a switch, which has none."""
    read: Callable[[str], object] = _read_text
    """Reads a flag's text; never fails, because `check` has the better message."""
    noun: str = ""
    words: tuple[str, ...] = ()
    """The valid words, where the set is closed; `noun` is what an error calls one of them."""

    def check(self, found: object, setting: str, origin: str) -> T_co:
        """The typed value of `setting`, or a PlanError that says where the wrong one comes from."""
        try:
            return self.convert(found)
        except MisfitError:
            pass
        if self.words and isinstance(found, str):
            raise unknown(self.noun, found, self.words, origin)
        raise PlanError(f"reading {setting} from {origin}: expected {self.expected}, found {described(found)}")


BACKEND = SettingKind("a backend", _one_of(BACKENDS), "|".join(BACKENDS), noun="backend", words=BACKENDS)
GRAPHS_WORD = SettingKind("on, off or strict", _one_of(GRAPHS), "|".join(GRAPHS), noun="value of graphs", words=GRAPHS)
GUARD_WORD = SettingKind(
    "refuse, report or off", _one_of(GUARDS), "|".join(GUARDS), noun="value of guard", words=GUARDS
)
COMPILER = SettingKind("a compiler", _one_of(COMPILERS), "|".join(COMPILERS), noun="compiler", words=COMPILERS)
SWITCH = SettingKind("true or false", _switch, "")
LIMIT = SettingKind("a positive 64-bit integer, or null", _limit, "SIZE", read_number)
BUCKETS = SettingKind(
    "positive 64-bit integers, each above the one before, or null", _buckets, "SIZE,SIZE,..", _read_numbers
)
RATIO = SettingKind("a finite number of at least 1", _ratio, "RATIO", read_number)
ROWS = SettingKind("a 64-bit integer of at least 0", _rows, "ROWS", read_number)
COUNT = SettingKind("a positive 64-bit integer", _size, "COUNT", read_number)
NAMES = SettingKind("a list of rule names", _names, "NAME")
FOLDER = SettingKind("the name of a folder, or null", _folder, "FOLDER", _read_folder)
