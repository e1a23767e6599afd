"""The resolver for any request: total, idempotent, ranked, and never without a reason."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import assume, example, given, reject, settings
from hypothesis import strategies as st

from phonograph.errors import PlanError
from phonograph.graphs.planning.flags import add_flags, asked_from, asks_of_json, flag_of
from phonograph.graphs.planning.kinds import BACKENDS, COMPILERS, GRAPHS, GUARDS, Value
from phonograph.graphs.planning.resolve import Plan
from phonograph.graphs.planning.rules import RULES, DeviceFacts
from phonograph.graphs.planning.settings import Ask, Asked, Level, Measured, Source
from plans import KNOWN, PHASES, SETTINGS, resolve

# Few letters make text that is often nearly JSON, nearly a number or nearly a name.
LETTERS = '{}[]",:.0123456789-efulgrahsNIn \n\u00e9\u221e'

unhurried = settings(deadline=None)

backends = st.sampled_from(BACKENDS)
some_backends = st.frozensets(backends)
sizes = st.integers(1, 6)

FIELD_VALUES: dict[str, st.SearchStrategy[Value]] = {
    "graphs": st.sampled_from(GRAPHS),
    "tc_compiler": st.sampled_from(COMPILERS),
    "tc_fallback": st.booleans(),
    "debug": st.booleans(),
    "gc": st.booleans(),
    "guard": st.sampled_from(GUARDS),
    "profile": st.none() | st.sampled_from(["here", "there"]),
    "ignore_rules": st.frozensets(st.sampled_from([r.name for r in RULES if r.ignorable])).map(
        lambda names: tuple(sorted(names))
    ),
    "backend": backends,
    "limit": st.none() | sizes,
    "buckets": st.none() | st.frozensets(sizes, min_size=1).map(lambda found: tuple(sorted(found))),
    "exact": st.booleans(),
    "max_padding_ratio": st.floats(1, 1e300),
    "max_padding_rows": st.integers(0, 2**63 - 1),
    "max_recordings": st.integers(1, 2**63 - 1),
}

facts = st.builds(
    DeviceFacts,
    device=st.sampled_from(["cuda", "emulated"]),
    backends=some_backends,
    built=some_backends,
    compilers=st.frozensets(st.sampled_from(COMPILERS), min_size=1),
    deterministic=st.booleans(),
    untraceable=st.sampled_from(["", "it is a script"]),
)
able = st.just(DeviceFacts("cuda", frozenset(BACKENDS), frozenset(BACKENDS)))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(LETTERS, max_size=5) | backends,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def valid_asks(draw: st.DrawFn, names: Sequence[str] = tuple(SETTINGS)) -> Ask:
    name = draw(st.sampled_from(names))
    level = draw(st.sampled_from(Level))
    value = draw(FIELD_VALUES[SETTINGS[name].field])
    return Ask(name, value, f"--{draw(st.integers(0, 99))}", level)


@st.composite
def any_asks(draw: st.DrawFn) -> Ask:
    """A request that is often wrong: another setting's value, any JSON, a name that is none."""
    name = draw(st.sampled_from(list(SETTINGS)) | st.text(LETTERS, max_size=12))
    value: object = draw(st.one_of(*FIELD_VALUES.values()) | json_values)
    return Ask(name, value, draw(st.text(LETTERS, max_size=5)), draw(st.sampled_from(Level)))


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    name = draw(st.sampled_from([name for name in SETTINGS if name != "ignore_rules"]))
    return Measured(name, draw(FIELD_VALUES[SETTINGS[name].field]), draw(st.text(LETTERS, max_size=8)))


requests = st.lists(valid_asks(), max_size=8)
OFTEN_AT_ODDS = ("graphs", "decode.backend", "decode.limit", "decode.buckets") * 4


def values_of(plan: Plan) -> dict[str, Value]:
    return {name: plan[name].value for name in plan}


def resolved_or_none(asks: list[Ask], true: DeviceFacts, measured: list[Measured]) -> Plan | None:
    """The plan, or None where it is refused; any other exception fails the test."""
    try:
        return resolve(asks, true, measured=measured)
    except PlanError:
        return None


def granted(asks: list[Ask], true: DeviceFacts, measured: list[Measured]) -> Plan:
    """The plan; an example that is refused is left out."""
    try:
        return resolve(asks, true, measured=measured)
    except PlanError:
        reject()


@unhurried
@given(st.lists(valid_asks() | any_asks(), max_size=6), facts, st.lists(measurements(), max_size=4))
def test_resolve_is_total_and_every_value_has_a_reason(
    asks: list[Ask], true: DeviceFacts, measured: list[Measured]
) -> None:
    plan = resolved_or_none(asks, true, measured)
    if plan is not None:
        assert list(plan) == list(SETTINGS)
        assert all(plan[name].reason.strip() for name in plan)
        assert all(plan[name].source in get_args(Source) for name in plan)
        assert plan.explain()


@unhurried
@given(facts, st.lists(measurements(), max_size=3))
def test_without_requests_only_measurements_that_contradict_each_other_are_refused(
    true: DeviceFacts, measured: list[Measured]
) -> None:
    names = [found.setting for found in measured]
    assume(len(set(names)) == len(names))
    assert resolve([], true, measured=measured)


@settings(max_examples=300, deadline=None)
@given(requests, facts, st.lists(measurements(), max_size=4))
def test_asking_for_a_plans_own_values_gives_them_again(
    asks: list[Ask], true: DeviceFacts, measured: list[Measured]
) -> None:
    plan = granted(asks, true, measured)
    own = [Ask(name, value, "the plan") for name, value in values_of(plan).items()]
    again = resolve(own, true)
    assert values_of(again) == values_of(plan)
    assert again.ignored == plan.ignored
    assert {again[name].source for name in again} == {"asked"}


@unhurried
@given(requests, facts, st.lists(measurements(), max_size=4))
def test_the_canonical_json_gives_the_values_again(
    asks: list[Ask], true: DeviceFacts, measured: list[Measured]
) -> None:
    plan = granted(asks, true, measured)
    again = resolve(asks_of_json(plan.to_json(), KNOWN), true)
    assert values_of(again) == values_of(plan)
    assert again.to_json() == plan.to_json()


def winner(asks: list[Ask]) -> Ask:
    return max(asks, key=lambda request: request.level)


@unhurried
@given(st.sampled_from([name for name in SETTINGS if name != "ignore_rules"]), st.data())
def test_the_highest_request_wins_and_the_lower_ones_are_named(name: str, data: st.DataObject) -> None:
    values = FIELD_VALUES[SETTINGS[name].field]
    levels = data.draw(st.permutations(list(Level)))
    asks = [Ask(name, data.draw(values), f"--at-{level.name}", level) for level in levels]
    top = winner(asks)
    # No rules, so only the ranking is at work; any name to ignore is unknown to an empty table.
    plan = resolve(asks, DeviceFacts("x", frozenset(), frozenset()), rules=())
    assert (plan[name].value, plan[name].reason) == (top.value, f"asked by --at-{top.level.name}")
    overridden = [request for request in asks if request.value != top.value]
    assert len(plan.warnings) == len(overridden)
    for request in overridden:
        assert any(request.origin in warning and top.origin in warning for warning in plan.warnings)


@unhurried
@given(st.sampled_from(list(SETTINGS)), st.sampled_from(Level), st.data())
def test_a_tie_is_refused_exactly_when_the_values_differ(name: str, level: Level, data: st.DataObject) -> None:
    one, two = (data.draw(FIELD_VALUES[SETTINGS[name].field]) for _ in range(2))
    asks = [Ask(name, one, "--one", level), Ask(name, two, "--two", level)]
    true = DeviceFacts("cuda", frozenset(BACKENDS), frozenset(BACKENDS))
    if one == two:
        assert resolve(asks, true)[name].value == one
        return
    with pytest.raises(PlanError, match=r"--one.*--two"):
        resolve(asks, true)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(valid_asks(["graphs", "decode.backend", "decode.limit", "decode.buckets", *SETTINGS]), max_size=8), facts
)
def test_a_request_is_changed_only_by_a_more_specific_one_that_a_warning_names(
    asks: list[Ask], true: DeviceFacts
) -> None:
    plan = granted(asks, true, [])
    for name in {request.setting for request in asks}:
        top = winner([request for request in asks if request.setting == name])
        if plan[name].source == "asked":
            assert plan[name].value == top.value
            continue
        said = [warning for warning in plan.warnings if warning.endswith(f"(asked by {top.origin})")]
        above = [request.origin for request in asks if request.level > top.level]
        assert any(f"(asked by {origin}) overrides {name}=" in warning for warning in said for origin in above)


@unhurried
@given(requests, facts)
def test_a_plan_has_no_backend_that_can_not_run(asks: list[Ask], true: DeviceFacts) -> None:
    plan = granted(asks, true, [])
    assert all(true.can(plan.phase(phase).backend) for phase in PHASES)


@unhurried
@given(requests, able)
def test_the_order_of_requests_does_not_change_the_values(asks: list[Ask], true: DeviceFacts) -> None:
    plan, reverse = resolved_or_none(asks, true, []), resolved_or_none(asks[::-1], true, [])
    assert (plan is None) == (reverse is None)
    if plan is not None and reverse is not None:
        assert values_of(plan) == values_of(reverse)


@unhurried
@given(
    json_values | st.dictionaries(st.sampled_from([*PHASES, "graphs", "debug"]), json_values),
    st.text(LETTERS),
)
@example(document="[" * 10_000, text="{")
def test_any_text_on_the_command_line_is_a_plan_or_a_plan_error(document: object, text: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, KNOWN)
    for flag in (
        "--graph-backend",
        "--cuda-graph-mode",
        *(flag_of(s) for s in SETTINGS.values() if s.kind.metavar),
    ):
        for given_text in (json.dumps(document), text, "{" + text):
            try:
                asked = asked_from(parser.parse_args([f"{flag}={given_text}"]), KNOWN)
                plan = resolve(asked, DeviceFacts("cuda", frozenset(BACKENDS), frozenset(BACKENDS)))
            except PlanError:
                continue
            assert isinstance(asked, Asked)
            assert list(plan) == list(SETTINGS)
