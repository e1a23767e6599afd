"""Plans of all phases that the field knows, for tests of the resolver and of its flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phonograph.graphs.config import KNOWN_PHASES, Ask, Asked, Measured, Settings
from phonograph.graphs.resolve import Plan
from phonograph.graphs.resolve import resolve as resolve_phases
from phonograph.graphs.rules import RULES, Facts, Rule

KNOWN = tuple(KNOWN_PHASES.values())
PHASES = tuple(KNOWN_PHASES)
SETTINGS = Settings(KNOWN).table


def resolve(
    asked: Asked | Iterable[Ask], facts: Facts, rules: Sequence[Rule] = RULES, *, measured: Iterable[Measured] = ()
) -> Plan:
    """The plan of all phases."""
    return resolve_phases(asked, facts, KNOWN, rules, measured=measured)
