"""Speculation flags: the drafter, how many tokens, and SGLang's aliases."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from phonograph.errors import PlanError
from phonograph.graphs.planning.sglang_flags import Alias
from phonograph.numbers import expect_whole

if TYPE_CHECKING:
    from pathlib import Path

    from phonograph.engine.options import SpeculateName, SpeculateWhen

log = logging.getLogger("phonograph")

T = TypeVar("T")
SPECULATE, DEPTH, WHEN, DRAFT = "--speculate", "--speculate-depth", "--speculate-when", "--draft"
_ALGORITHMS = {"NGRAM": "ngram", "EAGLE": "eagle", "EAGLE3": "eagle", "NEXTN": "mtp"}
"""SGLang's names of drafters, and ours."""
ALIASES = (
    Alias(
        "--speculative-algorithm",
        SPECULATE,
        words=tuple(_ALGORITHMS),
        note="EAGLE3 is eagle, NEXTN is mtp with --draft",
    ),
    Alias("--speculative-draft-model-path", DRAFT),
    Alias("--speculative-num-steps", DEPTH),
    Alias("--speculative-num-draft-tokens", DEPTH, note="one less: SGLang counts the row's last token too"),
    Alias("--speculative-eagle-topk", words=("1",), note="drafts are a chain, not a tree"),
)
"""Of SGLang's."""
_DEPTHS = {"--speculative-num-steps": 0, "--speculative-num-draft-tokens": 1}
"""SGLang's flags for how many tokens are drafted, and how many more each counts."""
_METAVARS = {DRAFT: "PATH", DEPTH: "N"}


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """Ours, then SGLang's."""
    group = parser.add_argument_group(
        "speculation", "Speculative decoding: tokens are drafted, and several are verified in one pass."
    )
    group.add_argument(
        SPECULATE,
        action=_Once,
        choices=("off", "ngram", "eagle", "ngram+eagle", "mtp", "auto"),
        help="the drafter: ngram looks up what followed the same tokens earlier in the sequence, eagle runs a head "
        "trained for the model (--draft), ngram+eagle looks up where that finds something and runs the head elsewhere, "
        "mtp runs modules that predict further tokens (--draft), auto takes a head or modules where there are some, "
        "else ngram; default: off",
    )
    group.add_argument(
        DRAFT,
        action=_Once,
        metavar=_METAVARS[DRAFT],
        help="the folder of an EAGLE-3 head, as SpecForge writes it, or of MTP modules",
    )
    group.add_argument(
        DEPTH,
        action=_Once,
        type=int,
        metavar=_METAVARS[DEPTH],
        help="tokens drafted for a sequence in each round, at most 15; default: 3",
    )
    group.add_argument(
        WHEN,
        action=_Once,
        choices=("always", "pays"),
        help="always: wherever a request allows it; pays: only while recent rounds gain more in tokens than they cost "
        "in time; default: pays, and always on a CPU, emulated or not",
    )
    for alias in ALIASES:
        metavar = "|".join(alias.words) or _METAVARS[alias.stands_for]
        group.add_argument(alias.flag, action=_Once, metavar=metavar, help=alias.warning)


class _Once(argparse.Action):
    """A flag whose second value would push the first aside: only the same may be given again."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before not in (None, values):
            raise PlanError(f"{option_string} is given twice, as {before} and as {values}. Keep one.")
        setattr(namespace, self.dest, values)


@dataclass(frozen=True)
class Speculation:
    """The speculation options from the flags."""

    speculate: SpeculateName = "off"
    depth: int | None = None
    draft: Path | None = None
    when: SpeculateWhen | None = None


def speculation_from(args: argparse.Namespace) -> Speculation:
    """The drafter, and how many tokens; a flag of SGLang's that contradicts one of ours is refused."""
    from phonograph.engine.options import path_from

    given = {alias.flag: value for alias in ALIASES if (value := _value(args, alias.flag)) is not None}
    for alias in ALIASES:
        if alias.flag not in given:
            continue
        value = given[alias.flag]
        if alias.words and value.upper() not in alias.words:
            raise PlanError(f"{alias.flag} {value} is not built in. Use {' or '.join(alias.words)}, or leave it out.")
        log.warning("%s", alias.warning)
    algorithm = _ALGORITHMS.get(given.get("--speculative-algorithm", "").upper())
    speculate = _one(SPECULATE, {SPECULATE: args.speculate, "--speculative-algorithm": algorithm})
    named = {flag: _number(given, flag, more) for flag, more in _DEPTHS.items()}
    typed = {flag: f"{given[flag]} ({named[flag]} drafted)" for flag, more in _DEPTHS.items() if more and flag in given}
    depth = _one(DEPTH, {DEPTH: args.speculate_depth, **named}, typed)
    path = "--speculative-draft-model-path"
    draft = _one(DRAFT, {DRAFT: args.draft, path: given.get(path)})
    where = None if draft is None else path_from(DRAFT, draft)
    return Speculation(cast("SpeculateName", speculate or "off"), depth, where, args.speculate_when)


def _one(flag: str, said: Mapping[str, T | None], typed: Mapping[str, str] = {}) -> T | None:
    """The value of these aliases of one setting; several must agree. `typed` has those that were given in another
    form."""
    found = {name: value for name, value in said.items() if value is not None}
    if len({*found.values()}) > 1:
        told = ", ".join(f"{name} says {typed.get(name, value)}" for name, value in found.items())
        raise PlanError(f"{told}: these are aliases. Keep {flag} alone.")
    return next(iter(found.values()), None)


def _value(args: argparse.Namespace, flag: str) -> str | None:
    found: str | None = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return found


def _number(given: dict[str, str], flag: str, more: int) -> int | None:
    """The number of drafts, of which the flag counts so many more."""
    from phonograph.engine.options import MAX_DEPTH

    if flag not in given:
        return None
    try:
        found = int(given[flag])
    except ValueError:
        raise PlanError(f"{flag} is a number of tokens; found {given[flag]!r}.") from None
    expect_whole(flag, found, PlanError, least=1 + more, most=MAX_DEPTH + more)
    return found - more
