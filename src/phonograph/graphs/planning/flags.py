"""Plan flags: one for each setting, the canonical JSON, and SGLang's names as aliases."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from phonograph.errors import PlanError
from phonograph.graphs.planning.kinds import BACKENDS, NAMES, SWITCH, Value, described, nearest, unknown
from phonograph.graphs.planning.settings import (
    PLAN_FIELDS,
    AbsentPhase,
    Ask,
    Asked,
    Level,
    PhaseDefaults,
    Setting,
    Settings,
    refuse_absent,
)
from phonograph.graphs.planning.sglang_flags import ALIASES, JSON_KEYS, Alias, variable_warning

GRAPH_BACKEND = "--graph-backend"

# Flags not named after their setting: `graphs` and `tc_…` need no prefix, and one `--ignore-rule` gives one name.
_OWN_FLAGS = {
    "graphs": "--graphs",
    "ignore_rules": "--ignore-rule",
    "tc_compiler": "--tc-compiler",
    "tc_fallback": "--tc-fallback",
}


def flag_of(setting: Setting[Value]) -> str:
    """The flag that asks for a setting."""
    field = setting.field.replace("_", "-")
    if setting.phase is None:
        return _OWN_FLAGS.get(setting.name, f"--graph-{field}")
    return f"--{setting.phase.replace('_', '-')}-graph-{field}"


def _by_flag(phases: Iterable[PhaseDefaults]) -> dict[str, Setting[Value]]:
    return {flag_of(setting): setting for setting in Settings(tuple(phases)).table.values()}


def _aliases(by_flag: Mapping[str, Setting[Value]]) -> list[Alias]:
    """Those that stand for a flag that there is, or for none at all."""
    return [alias for alias in ALIASES if not alias.stands_for or alias.stands_for in (GRAPH_BACKEND, *by_flag)]


def add_flags(parser: argparse.ArgumentParser, phases: Iterable[PhaseDefaults]) -> None:
    """Adds every flag of a plan with these phases to a parser; `asked_from` reads what it parsed.

    Make the parser with `allow_abbrev=False`: argparse otherwise takes any unique beginning for the flag, so
    `--decode-graph-max-padding-ra` works until the day another flag begins like it.

    Values stay text and all repeats are kept, so that `resolve` refuses every wrong one with the same error.
    """
    group = parser.add_argument_group("graphs", "How each phase is recorded. Canonical JSON ranks above single flags.")
    group.add_argument(
        GRAPH_BACKEND,
        action="append",
        metavar="BACKEND|JSON",
        help=f"a backend for all phases ({', '.join(BACKENDS)}), or JSON such as "
        '{"decode": "full", "prefill": {"backend": "breakable", "buckets": [256, 512]}}',
    )
    by_flag = _by_flag(phases)
    for flag, setting in by_flag.items():
        if setting.kind is SWITCH:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=setting.help)
        else:
            group.add_argument(flag, action="append", metavar=setting.kind.metavar, help=setting.help)
    old = parser.add_argument_group("deprecated names of graph flags")
    for alias in _aliases(by_flag):
        if alias.value is None:
            metavar = "|".join(alias.words) or "VALUE"
            nargs = "+" if alias.many else None
            old.add_argument(alias.flag, action="append", nargs=nargs, metavar=metavar, help=alias.warning)
        else:
            old.add_argument(alias.flag, action="append_const", const=alias.value, help=alias.warning)


def asked_from(
    namespace: argparse.Namespace,
    phases: Sequence[PhaseDefaults],
    variables: Iterable[str] = (),
    absent: Sequence[AbsentPhase] = (),
) -> Asked:
    """What the command line asks for, and a warning for each deprecated name in it.

    `variables` are the names of the environment's: one that configures SGLang's graphs gets a warning, since here the
    environment configures nothing. Flags of `absent` phases are refused, and SGLang's names for one ask for its
    stand-ins.
    """
    given: Mapping[str, object] = vars(namespace)
    asks: list[Ask] = []
    warnings: list[str] = []
    by_flag = _by_flag([*phases, *(one.defaults for one in absent)])
    by_our_names = [replace(one, stand_ins=()) for one in absent]
    for found in _found(given, GRAPH_BACKEND):
        asks += asks_of_graph_backend(found, phases, absent=by_our_names)
    for flag, setting in by_flag.items():
        asks += _asks_of_flag(flag, setting, _found(given, flag))
    stand_ins = {one.defaults.name: one.stand_ins for one in absent}
    for alias in _aliases(by_flag):
        for found in _found(given, alias.flag):
            if alias.stands_for == GRAPH_BACKEND:
                asks += asks_of_graph_backend(found, phases, alias.flag, JSON_KEYS, absent)
                named = [f"for {name} name {', '.join(those)}" for name, those in stand_ins.items() if those]
                warnings.append("; ".join([alias.warning, *named]))
                continue
            meant = _meant(alias, by_flag, stand_ins)
            asks += [one for each in meant for one in _asks_of_alias(each, found, by_flag)]
            warnings.append(alias.warning_of(", ".join(each.instead for each in meant)))
    refuse_absent(asks, absent)
    warnings += filter(None, map(variable_warning, sorted(variables)))
    return Asked(tuple(asks), tuple(dict.fromkeys(warnings)))


def _meant(alias: Alias, by_flag: Mapping[str, Setting[Value]], stand_ins: Mapping[str, Sequence[str]]) -> list[Alias]:
    """The alias itself, or as it reads for each phase that does the work of the one it names."""
    setting = by_flag.get(alias.stands_for)
    if setting is None or setting.phase is None or not stand_ins.get(setting.phase):
        return [alias]
    names = {one.name: flag for flag, one in by_flag.items()}
    return [replace(alias, stands_for=names[f"{phase}.{setting.field}"]) for phase in stand_ins[setting.phase]]


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


def _asks_of_alias(alias: Alias, found: object, by_flag: Mapping[str, Setting[Value]]) -> Iterable[Ask]:
    if alias.words and found not in alias.words:
        raise unknown("value", str(found), alias.words, alias.flag)
    if not alias.stands_for:
        return []
    setting = by_flag[alias.stands_for]
    if isinstance(found, list):
        found = ",".join(found)
    past = [Ask("ignore_rules", alias.ignores, alias.flag, alias.level)] if alias.ignores else []
    return [Ask(setting.name, _read(setting, found), alias.flag, alias.level), *past]


def asks_of_graph_backend(
    found: object,
    phases: Iterable[PhaseDefaults],
    origin: str = GRAPH_BACKEND,
    aliases: Mapping[str, str] = MappingProxyType({}),
    absent: Sequence[AbsentPhase] = (),
) -> tuple[Ask, ...]:
    """What a text in `--graph-backend`'s form asks for: a backend for all phases, or the canonical JSON.

    `aliases` are further keys of a phase's object, and the settings that they stand for. An `absent` phase may be named
    too: its stand-ins are meant, or where there is none, `refuse_absent` has the sentence.
    """
    if isinstance(found, str) and found.lstrip()[:1] in ("{", "["):
        return asks_of_json(found, phases, origin, aliases, absent)
    return tuple(Ask(f"{phase.name}.backend", found, origin, Level.JSON) for phase in phases)


def asks_of_json(
    text: str,
    phases: Iterable[PhaseDefaults],
    origin: str = GRAPH_BACKEND,
    aliases: Mapping[str, str] = MappingProxyType({}),
    absent: Sequence[AbsentPhase] = (),
) -> tuple[Ask, ...]:
    """What canonical JSON asks for. Keys are plan settings, and phases with a backend or an object each."""
    document = _object(_parsed(text, origin), "an object of phases", origin)
    asks: list[Ask] = []
    meant: dict[str, tuple[str, ...]] = {phase.name: (phase.name,) for phase in phases}
    valid = (*meant, *PLAN_FIELDS)
    meant |= {one.defaults.name: one.stand_ins or (one.defaults.name,) for one in absent}
    for key, value in document.items():
        if key in PLAN_FIELDS:
            asks.append(Ask(key, value, origin, Level.JSON))
        elif key not in meant:
            raise unknown("setting" if nearest(key, valid) in PLAN_FIELDS else "phase", key, valid, origin)
        for phase in meant.get(key, ()):
            asks += _asks_of_phase(phase, value, origin, aliases)
    return tuple(asks)


def _asks_of_phase(phase: str, value: object, origin: str, aliases: Mapping[str, str]) -> Iterator[Ask]:
    """What JSON asks for one phase: a backend, or an object of settings."""
    if isinstance(value, str):
        yield Ask(f"{phase}.backend", value, origin, Level.JSON)
        return
    for name, inner in _object(value, f"a backend or an object for {phase}", origin).items():
        setting = aliases[name].format(phase=phase) if name in aliases else f"{phase}.{name}"
        yield Ask(setting, inner, origin, Level.JSON)


def _object(found: object, expected: str, origin: str) -> dict[str, object]:
    if not isinstance(found, dict):
        raise PlanError(f"reading the JSON of {origin}: expected {expected}, found {described(found)}")
    return found


def _parsed(text: str, origin: str) -> object:
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        # json silently keeps the last of two equal keys.
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
