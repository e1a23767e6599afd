"""Plan: the configuration resolved from requests, measurements and device facts; frozen, every value with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phonograph.errors import PlanError
from phonograph.graphs.planning.kinds import (
    BACKEND,
    BUCKETS,
    COMPILER,
    COUNT,
    FOLDER,
    GRAPHS_WORD,
    GUARD_WORD,
    LIMIT,
    RATIO,
    ROWS,
    SWITCH,
    BackendName,
    CompilerName,
    GraphsMode,
    GuardMode,
    Value,
    shown,
    unknown,
)
from phonograph.graphs.planning.rules import RULES, Change, DeviceFacts, ResolvedValues, Rule, stated
from phonograph.graphs.planning.settings import (
    MAX_PADDING_RATIO,
    MAX_PADDING_ROWS,
    MAX_RECORDINGS,
    PHASE_FIELDS,
    PLAN_FIELDS,
    Ask,
    Asked,
    Measured,
    PhaseDefaults,
    Resolved,
    Settings,
)

__all__ = ["PhasePlan", "Plan", "Resolved", "resolve"]


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The plain values of one phase, for the code that acts on them: `PhasePlan(backend="full", limit=64)`.

    What is not given is what every phase has by default.
    """

    backend: BackendName = "full"
    limit: int | None = None
    buckets: tuple[int, ...] | None = None
    exact: bool = False
    max_padding_ratio: float = MAX_PADDING_RATIO
    max_padding_rows: int = MAX_PADDING_ROWS
    max_recordings: int = MAX_RECORDINGS


@dataclass(frozen=True)
class Plan:
    """The resolved configuration. Nothing writes to it; to have another one, resolve again."""

    settings: Settings
    resolved: tuple[tuple[str, Resolved], ...]
    """Every setting once, in the order of the settings table."""
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """The names of the rules that were skipped."""

    def __getitem__(self, setting: str) -> Resolved:
        wanted = self.settings.named(setting, "the plan").name
        return next(resolved for name, resolved in self.resolved if name == wanted)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.resolved)

    @property
    def graphs(self) -> GraphsMode:
        """`on`, `off`, or `strict`: a shape that has no graph is an error."""
        return GRAPHS_WORD.convert(self["graphs"].value)

    @property
    def guard(self) -> GuardMode:
        """What to do about a shape whose ops depend on the sample."""
        return GUARD_WORD.convert(self["guard"].value)

    @property
    def tc_compiler(self) -> CompilerName:
        """What compiles the pieces of `tc_piecewise`."""
        return COMPILER.convert(self["tc_compiler"].value)

    @property
    def tc_fallback(self) -> bool:
        """Whether shapes that can't be traced are recorded as `breakable` does."""
        return SWITCH.convert(self["tc_fallback"].value)

    @property
    def debug(self) -> bool:
        """Whether everything runs eagerly through the capture path."""
        return SWITCH.convert(self["debug"].value)

    @property
    def gc(self) -> bool:
        """Whether garbage is collected during capture."""
        return SWITCH.convert(self["gc"].value)

    @property
    def profile(self) -> str | None:
        """The folder for traces of warm-ups and captures; None where nothing is profiled."""
        return FOLDER.convert(self["profile"].value)

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of its phases."""
        return self.settings.phase_names

    @property
    def is_recorded(self) -> bool:
        """Whether any of its phases has graphs."""
        return any(self.phase(name).backend != "disabled" for name in self.phases)

    def phase(self, name: str) -> PhasePlan:
        """The values of one phase."""
        if name not in self.phases:
            raise unknown("phase", name, self.phases, "the plan")
        # `convert` is idempotent: here it only adds the type.
        return PhasePlan(
            backend=BACKEND.convert(self[f"{name}.backend"].value),
            limit=LIMIT.convert(self[f"{name}.limit"].value),
            buckets=BUCKETS.convert(self[f"{name}.buckets"].value),
            exact=SWITCH.convert(self[f"{name}.exact"].value),
            max_padding_ratio=RATIO.convert(self[f"{name}.max_padding_ratio"].value),
            max_padding_rows=ROWS.convert(self[f"{name}.max_padding_rows"].value),
            max_recordings=COUNT.convert(self[f"{name}.max_recordings"].value),
        )

    def to_json(self) -> str:
        """The canonical JSON: given to `--graph-backend`, it asks for the values of this plan."""
        document: dict[str, object] = {field: self[field].value for field in PLAN_FIELDS}
        for phase in self.phases:
            document[phase] = {field: self[f"{phase}.{field}"].value for field in PHASE_FIELDS}
        return json.dumps(document)

    def explain(self, *, fold: bool = True) -> str:
        """A table of setting, value, source and reason, then the warnings.

        Folded, a phase shows its backend and what isn't a default, and one line has the defaults of the rest.
        """
        rows = [("setting", "value", "source", "reason")]
        for name, resolved in self.resolved:
            if not fold or self.settings.table[name].field in _ALWAYS_SHOWN or resolved.source != "default":
                rows.append((name, shown(resolved.value), resolved.source, resolved.reason))
        if len(rows) <= len(self.resolved):
            rows.append(("not shown", "", "default", _shared_defaults(self.settings)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join((*map(str.ljust, row, widths), row[3])) for row in rows]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


_ALWAYS_SHOWN = frozenset({*PLAN_FIELDS, "backend"})


def _shared_defaults(settings: Settings) -> str:
    """The defaults that are the same for every phase."""
    fields = {s.field: s.default for s in settings.table.values() if s.field not in _ALWAYS_SHOWN}
    return ", ".join(f"{field}={shown(default)}" for field, default in fields.items())


def resolve(
    asked: Asked | Iterable[Ask],
    facts: DeviceFacts,
    phases: Iterable[PhaseDefaults],
    rules: Sequence[Rule] = RULES,
    *,
    measured: Iterable[Measured] = (),
) -> Plan:
    """Decides every setting of these phases: a request, else a measured value, else the default, subject to the rules.

    Pure: returns a Plan or raises a PlanError. Asking for the plan's own values returns an equal plan.
    """
    given = asked if isinstance(asked, Asked) else Asked(tuple(asked))
    settings = Settings(tuple(phases))
    chosen, overrides = _choose(given.asks, settings)
    defaults = {name: Resolved(s.default, "default", s.because) for name, s in settings.table.items()}
    start = defaults | _taken(measured, settings) | chosen
    ignored = _ignored_rules(start["ignore_rules"], rules)
    rulebook = _Rulebook(rules, ignored, facts, settings)
    values, passed = rulebook.apply(start)
    rulebook.check_settled(values)
    return Plan(settings, tuple(values.items()), (*given.warnings, *overrides, *passed), ignored)


def _choose(asks: Iterable[Ask], settings: Settings) -> tuple[dict[str, Resolved], list[str]]:
    """The highest request for each setting, and a warning for each lower one that it overrides."""
    chosen: dict[str, Resolved] = {}
    warnings: list[str] = []
    # Every request is checked, so that a wrong value can't hide below a right one.
    checked = [(a, settings.named(a.setting, a.origin).kind.check(a.value, a.setting, a.origin)) for a in asks]
    _refuse_ties(checked)
    for request, value in sorted(checked, key=lambda pair: -pair[0].level):
        resolved = Resolved(value, "asked", f"asked by {request.origin}", request.level)
        winner = chosen.setdefault(request.setting, resolved)
        if winner.value != value:
            warnings.append(
                f"{request.setting}={shown(winner.value)} ({winner.reason}) overrides "
                f"{shown(value)} (asked by {request.origin})"
            )
    return chosen, warnings


def _refuse_ties(checked: Iterable[tuple[Ask, Value]]) -> None:
    first: dict[tuple[str, int], tuple[Ask, Value]] = {}
    for request, value in checked:
        other, earlier = first.setdefault((request.setting, request.level), (request, value))
        if earlier != value:
            raise PlanError(
                f"{request.setting} is asked to be both {shown(earlier)} (by {other.origin}) and "
                f"{shown(value)} (by {request.origin}), and neither ranks above the other; keep one"
            )


def _taken(measured: Iterable[Measured], settings: Settings) -> dict[str, Resolved]:
    taken: dict[str, Resolved] = {}
    for found in measured:
        origin = f"a measurement ({found.reason})"
        value = settings.named(found.setting, origin).kind.check(found.value, found.setting, origin)
        resolved = Resolved(value, "measured", found.reason.strip() or "measured")
        earlier = taken.setdefault(found.setting, resolved)
        if earlier.value != value:
            raise PlanError(
                f"{found.setting} is measured to be both {shown(earlier.value)} ({earlier.reason}) and "
                f"{shown(value)} ({resolved.reason}); measure it once"
            )
    return taken


def _ignored_rules(asked: Resolved, rules: Sequence[Rule]) -> tuple[str, ...]:
    by_name = {rule.name: rule for rule in rules}
    can_be = [rule.name for rule in rules if rule.ignorable]
    ignored = asked.value if isinstance(asked.value, tuple) else ()
    for name in map(str, ignored):
        if name not in by_name:
            raise unknown("rule", name, can_be, f"ignore_rules ({asked.reason})")
        if not by_name[name].ignorable:
            raise PlanError(
                f"rule '{name}' can't be ignored ({asked.reason}): {by_name[name].says}, "
                "and skipping it could only fail later; take the name out"
            )
    return tuple(map(str, ignored))


@dataclass(frozen=True)
class _Rulebook:
    """The rules as they hold for one plan."""

    rules: Sequence[Rule]
    ignored: tuple[str, ...]
    facts: DeviceFacts
    settings: Settings

    def _wanted(self, rule: Rule, values: ResolvedValues) -> list[Change]:
        wanted = list(rule.changes(self.facts, values))
        for change in wanted:
            origin = f"rule '{rule.name}'"
            self.settings.named(change.setting, origin).kind.check(change.value, change.setting, origin)
        return [change for change in wanted if values[change.setting].value != change.value]

    def apply(self, start: Mapping[str, Resolved]) -> tuple[dict[str, Resolved], list[str]]:
        """The values after one pass over the rules, and a warning for each rule or request that was overridden."""
        values = dict(start)
        warnings: list[str] = []
        for rule in self.rules:
            wanted = self._wanted(rule, values)
            if rule.name in self.ignored:
                names = ", ".join(change.setting for change in wanted)
                effect = f"it would change {names}" if names else "it would change nothing"
                warnings.append(f"rule '{rule.name}' is ignored ({values['ignore_rules'].reason}); {effect}")
                continue
            before = dict(values)
            for change in wanted:
                if before[change.setting].source == "asked":
                    if not change.cause or not before[change.cause].outranks(before[change.setting]):
                        raise _conflict(rule, change, before)
                    warnings.append(f"{stated(change.cause, before)} overrides {stated(change.setting, before)}")
                values[change.setting] = Resolved(change.value, "rule", f"rule '{rule.name}': {change.because}")
        return values, warnings

    def check_settled(self, values: Mapping[str, Resolved]) -> None:
        """Refuses a rules table in which a later rule brings back what an earlier one forbids.

        This is what makes a plan's own values resolve to themselves.
        """
        for rule in self.rules:
            wanted = self._wanted(rule, values) if rule.name not in self.ignored else []
            if wanted:
                setting, value = wanted[0].setting, wanted[0].value
                raise PlanError(
                    f"the rules table doesn't settle: rule '{rule.name}' still wants {setting}={shown(value)}, "
                    f"but finds {stated(setting, values)}. Put the rule that forbids a value below the one "
                    "that sets it"
                )


def _conflict(rule: Rule, change: Change, values: ResolvedValues) -> PlanError:
    past = f", or skip the rule with --ignore-rule {rule.name}" if rule.ignorable else ""
    return PlanError(
        f"rule '{rule.name}' conflicts with {stated(change.setting, values)}: {change.because}. "
        f"Ask for {change.setting}={shown(change.value)} or leave it to its default{past}"
    )
