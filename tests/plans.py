"""Plans of all phases that the field knows, for tests of the resolver and of its flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phonograph.graphs.planning.resolve import Plan
from phonograph.graphs.planning.resolve import resolve as resolve_phases
from phonograph.graphs.planning.rules import RULES, DeviceFacts, Rule
from phonograph.graphs.planning.settings import KNOWN_PHASES, Ask, Asked, Measured, Settings

KNOWN = tuple(KNOWN_PHASES.values())
PHASES = tuple(KNOWN_PHASES)
SETTINGS = Settings(KNOWN).table


def resolve(
    asked: Asked | Iterable[Ask],
    facts: DeviceFacts,
    rules: Sequence[Rule] = RULES,
    *,
    measured: Iterable[Measured] = (),
) -> Plan:
    """The plan of all phases."""
    return resolve_phases(asked, facts, KNOWN, rules, measured=measured)
