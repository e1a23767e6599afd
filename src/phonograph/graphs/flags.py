"""The command line of the settings: one flag for each, the canonical JSON, and SGLang's names as aliases."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phonograph.errors import PlanError
from phonograph.graphs.config import (
    BACKENDS,
    NAMES,
    PHASES,
    PLAN_FIELDS,
    SETTINGS,
    SWITCH,
    Ask,
    Asked,
    Level,
    Setting,
    Value,
    described,
    nearest,
    unknown,
)

GRAPH_BACKEND = "--graph-backend"

# The names that don't follow from the setting's: `graphs` says what it is about by itself, and one use of
# `--ignore-rule` gives one name.
_OWN_FLAGS = {"graphs": "--graphs", "ignore_rules": "--ignore-rule"}


def flag_of(setting: Setting[Value]) -> str:
    """The flag that asks for a setting."""
    field = setting.field.replace("_", "-")
    if setting.phase is None:
        return _OWN_FLAGS.get(setting.name, f"--graph-{field}")
    return f"--{setting.phase.replace('_', '-')}-graph-{field}"


_BY_FLAG: Mapping[str, Setting[Value]] = {flag_of(setting): setting for setting in SETTINGS.values()}


@dataclass(frozen=True)
class Alias:
    """A flag of SGLang's that is accepted, and says what to write in its place."""

    flag: str
    stands_for: str = ""
    """The flag to write in its place; empty where nothing takes it."""
    level: Level = Level.SWITCH
    value: str | bool | None = None
    """What a switch asks for; None where the alias takes its value from the command line."""
    words: tuple[str, ...] = ()
    """The values that it accepts, where no setting checks them."""
    many: bool = False
    """Whether it takes several values in a row, which our flag takes with commas."""
    note: str = ""

    @property
    def instead(self) -> str:
        """What to write in its place, value included."""
        if self.value is True:
            return self.stands_for
        return f"{self.stands_for} {self.value or 'VALUE'}"

    @property
    def warning(self) -> str:
        """What the user is told."""
        if self.stands_for:
            return f"{self.flag} is deprecated; use {self.instead}"
        return f"{self.flag} is accepted and changes nothing: {self.note}"


ALIASES: tuple[Alias, ...] = (
    Alias("--cuda-graph-mode", GRAPH_BACKEND, Level.JSON),
    Alias("--decode-cuda-graph-backend", "--decode-graph-backend", Level.FLAG),
    Alias("--prefill-cuda-graph-backend", "--prefill-graph-backend", Level.FLAG),
    Alias("--decode-disable-cuda-graph", "--decode-graph-backend", value="disabled"),
    Alias("--prefill-disable-cuda-graph", "--prefill-graph-backend", value="disabled"),
    Alias("--disable-cuda-graph", "--graphs", value="off"),
    Alias("--disable-piecewise-cuda-graph", "--prefill-graph-backend", value="disabled"),
    Alias("--enable-breakable-cuda-graph", "--prefill-graph-backend", value="breakable"),
    Alias("--enforce-piecewise-cuda-graph", "--prefill-graph-backend", value="tc_piecewise"),
    Alias(
        "--piecewise-cuda-graph-compiler",
        words=("eager", "inductor"),
        note="it takes effect only with tc_piecewise, which this build doesn't have",
    ),
    Alias("--enable-cudagraph-gc", "--graph-gc", value=True),
    Alias("--debug-cuda-graph", "--graph-debug", value=True),
    Alias("--enable-profile-cuda-graph", "--graph-profile", value="phonograph-profile"),
    Alias("--cuda-graph-max-bs", "--decode-graph-limit", Level.FLAG),
    Alias("--cuda-graph-bs", "--decode-graph-buckets", Level.FLAG, many=True),
    Alias("--disable-cuda-graph-padding", "--decode-graph-exact", value=True),
)

_FOREIGN_VARIABLE = re.compile("SGLANG_.*GRAPH")
_INSTEAD_OF_VARIABLES = {"SGLANG_USE_BREAKABLE_CUDA_GRAPH": f"{GRAPH_BACKEND} breakable"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag to a parser; `asked_from` reads what it parsed.

    Make the parser with `allow_abbrev=False`: argparse otherwise takes any unique beginning for the flag, so
    `--decode-graph-max-padding-ra` works until the day another flag begins like it.

    Values are kept as text and repeats are kept all, so that `resolve` gives every wrong one the same error.
    """
    group = parser.add_argument_group("graphs", "How each phase is recorded. Canonical JSON ranks above single flags.")
    group.add_argument(
        GRAPH_BACKEND,
        action="append",
        metavar="BACKEND|JSON",
        help=f"a backend for all phases ({', '.join(BACKENDS)}), or JSON such as "
        '{"decode": "full", "prefill": {"backend": "breakable", "buckets": [256, 512]}}',
    )
    for flag, setting in _BY_FLAG.items():
        if setting.kind is SWITCH:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=setting.help)
        else:
            group.add_argument(flag, action="append", metavar=setting.kind.metavar, help=setting.help)
    old = parser.add_argument_group("deprecated names of graph flags")
    for alias in ALIASES:
        if alias.value is None:
            metavar = "|".join(alias.words) or "VALUE"
            nargs = "+" if alias.many else None
            old.add_argument(alias.flag, action="append", nargs=nargs, metavar=metavar, help=alias.warning)
        else:
            old.add_argument(alias.flag, action="append_const", const=alias.value, help=alias.warning)


def asked_from(namespace: argparse.Namespace, variables: Iterable[str] = ()) -> Asked:
    """What the command line asks for, and a warning for each deprecated name in it.

    `variables` are the names of the environment's: one that configures SGLang's graphs gets a warning, since here the
    environment configures nothing.
    """
    given: Mapping[str, object] = vars(namespace)
    asks: list[Ask] = []
    warnings: list[str] = []
    for found in _found(given, GRAPH_BACKEND):
        asks += asks_of_graph_backend(found, GRAPH_BACKEND)
    for flag, setting in _BY_FLAG.items():
        asks += _asks_of_flag(flag, setting, _found(given, flag))
    for alias in ALIASES:
        for found in _found(given, alias.flag):
            asks += _asks_of_alias(alias, found)
            warnings.append(alias.warning)
    warnings += [_variable_warning(name) for name in sorted(variables) if _FOREIGN_VARIABLE.match(name)]
    return Asked(tuple(asks), tuple(dict.fromkeys(warnings)))


def _variable_warning(name: str) -> str:
    instead = _INSTEAD_OF_VARIABLES.get(name, f"{GRAPH_BACKEND} or another flag of its group, if one does what it did")
    return f"the environment variable {name} is not read, and changes nothing; use {instead}"


def _found(given: Mapping[str, object], flag: str) -> list[object]:
    """The values of a flag in the order given; none where it isn't used."""
    found = given.get(flag.removeprefix("--").replace("-", "_"))
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]


def _read(setting: Setting[Value], found: object) -> object:
    return setting.kind.read(found) if isinstance(found, str) else found


def _asks_of_flag(flag: str, setting: Setting[Value], found: list[object]) -> Iterable[Ask]:
    if setting.kind is NAMES:  # each use adds a name to one list
        return [Ask(setting.name, tuple(found), flag)] if found else []
    # A switch that is off was written in its negative form.
    return [
        Ask(setting.name, _read(setting, value), flag if value is not False else f"--no-{flag[2:]}") for value in found
    ]


def _asks_of_alias(alias: Alias, found: object) -> Iterable[Ask]:
    if alias.words and found not in alias.words:
        raise unknown("value", str(found), alias.words, alias.flag)
    if alias.stands_for == GRAPH_BACKEND:
        return asks_of_graph_backend(found, alias.flag)
    if not alias.stands_for:
        return []
    setting = _BY_FLAG[alias.stands_for]
    if isinstance(found, list):
        found = ",".join(found)
    return [Ask(setting.name, _read(setting, found), alias.flag, alias.level)]


def asks_of_graph_backend(found: object, origin: str = GRAPH_BACKEND) -> tuple[Ask, ...]:
    """What a text in `--graph-backend`'s form asks for: a backend for all phases, or the canonical JSON."""
    if isinstance(found, str) and found.lstrip()[:1] in ("{", "["):
        return asks_of_json(found, origin)
    return tuple(Ask(f"{phase}.backend", found, origin, Level.JSON) for phase in PHASES)


def asks_of_json(text: str, origin: str = GRAPH_BACKEND) -> tuple[Ask, ...]:
    """What canonical JSON asks for. Keys are plan settings, and phases with a backend or an object each."""
    document = _object(_parsed(text, origin), "an object of phases", origin)
    asks: list[Ask] = []
    for key, value in document.items():
        if key in PLAN_FIELDS:
            asks.append(Ask(key, value, origin, Level.JSON))
        elif key not in PHASES:
            valid = (*PHASES, *PLAN_FIELDS)
            raise unknown("setting" if nearest(key, valid) in PLAN_FIELDS else "phase", key, valid, origin)
        elif isinstance(value, str):
            asks.append(Ask(f"{key}.backend", value, origin, Level.JSON))
        else:
            fields = _object(value, f"a backend or an object for {key}", origin)
            asks += [Ask(f"{key}.{name}", inner, origin, Level.JSON) for name, inner in fields.items()]
    return tuple(asks)


def _object(found: object, expected: str, origin: str) -> dict[str, object]:
    if not isinstance(found, dict):
        raise PlanError(f"reading the JSON of {origin}: expected {expected}, found {described(found)}")
    return found


def _parsed(text: str, origin: str) -> object:
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        # json alone keeps the last of two equal keys and says nothing.
        twice = {key for key, _ in items if [k for k, _ in items].count(key) > 1}
        if twice:
            raise PlanError(f"reading the JSON of {origin}: the key {min(twice)!r} is there twice; keep one")
        return dict(items)

    try:
        parsed: object = json.loads(text, object_pairs_hook=pairs)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"reading the JSON of {origin}: {error}, in {described(text)}. "
            f"Expected a backend ({', '.join(BACKENDS)}) or an object of phases"
        ) from error
    return parsed
