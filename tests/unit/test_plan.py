"""The plan: what is asked, measured and true, resolved with reasons."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator

import pytest

from phonograph.errors import DeclarationError, PhonographError, PlanError
from phonograph.graphs.planning.kinds import BACKENDS, Value, shown
from phonograph.graphs.planning.resolve import PhasePlan, Plan
from phonograph.graphs.planning.resolve import resolve as resolve_phases
from phonograph.graphs.planning.rules import RULES, Change, DeviceFacts, ResolvedValues, Rule
from phonograph.graphs.planning.settings import (
    PHASE_FIELDS,
    PLAN_FIELDS,
    Ask,
    Asked,
    Level,
    Measured,
    PhaseDefaults,
    ask,
)
from phonograph.numbers import MAX_WHOLE
from plans import PHASES, SETTINGS, resolve

EVERY = frozenset(BACKENDS)
ABLE = DeviceFacts("cuda", backends=EVERY, built=EVERY)
FULL_ONLY = DeviceFacts("emulated", backends=frozenset({"full"}), built=frozenset({"full"}))


def refused(*asks: Ask, facts: DeviceFacts = ABLE, rules: tuple[Rule, ...] = RULES) -> str:
    with pytest.raises(PlanError) as caught:
        resolve(asks, facts, rules)
    return str(caught.value)


class TestSettings:
    def test_the_table_is_the_closed_set_of_phases_and_fields(self) -> None:
        assert tuple(SETTINGS) == (
            *("graphs", "guard", "tc_compiler", "tc_fallback", "debug", "gc", "profile", "ignore_rules"),
            *(f"{phase}.{field}" for phase in PHASES for field in PHASE_FIELDS),
        )
        assert PHASES == ("decode", "prefill", "embed", "target_verify", "draft", "draft_extend", "idle")

    @pytest.mark.parametrize("name", SETTINGS)
    def test_each_has_help_a_reason_and_a_default_of_its_kind(self, name: str) -> None:
        setting = SETTINGS[name]
        assert setting.help
        assert setting.because
        assert setting.kind.convert(setting.default) == setting.default

    def test_a_plan_error_is_a_value_error_of_ours(self) -> None:
        assert issubclass(PlanError, ValueError)
        assert issubclass(PlanError, PhonographError)


class TestPhases:
    """A plan has the phases that its owner names, and no others."""

    def test_any_name_is_a_phase_with_the_same_settings(self) -> None:
        plan = resolve_phases(
            [ask("round.limit", 8, origin="x=")], ABLE, [PhaseDefaults("round", "breakable", "it has gaps")]
        )
        assert plan.phases == ("round",)
        assert plan["round.backend"].reason == "it has gaps"
        assert plan.phase("round") == PhasePlan(backend="breakable", limit=8)
        assert {name for name in plan if "." in name} == {f"round.{field}" for field in PHASE_FIELDS}

    def test_rules_hold_for_them(self) -> None:
        plan = resolve_phases([ask("graphs", "off", origin="x=")], ABLE, [PhaseDefaults("round")])
        assert not plan.is_recorded
        assert plan.phase("round").backend == "disabled"

    def test_others_are_refused_with_the_nearest(self) -> None:
        with pytest.raises(PlanError, match="unknown phase 'rounds' in x=; did you mean 'round'"):
            resolve_phases([ask("rounds.limit", 8, origin="x=")], ABLE, [PhaseDefaults("round")])

    def test_a_name_stands_once(self) -> None:
        with pytest.raises(DeclarationError, match="two have the same name"):
            resolve_phases([], ABLE, [PhaseDefaults("round"), PhaseDefaults("round")])

    def test_a_plan_without_phases_records_nothing(self) -> None:
        assert not resolve_phases([], ABLE, []).is_recorded


class TestDefaults:
    def test_plan(self) -> None:
        plan = resolve([], ABLE)
        assert (plan.graphs, plan.debug, plan.gc, plan.profile) == ("on", False, False, None)
        assert plan["ignore_rules"].value == ()
        assert plan.warnings == ()
        assert plan.ignored == ()

    @pytest.mark.parametrize("phase", PHASES)
    def test_phase(self, phase: str) -> None:
        assert resolve([], ABLE).phase(phase) == PhasePlan(
            backend="breakable" if phase in ("prefill", "embed") else "full",
            limit=None,
            buckets=None,
            exact=False,
            max_padding_ratio=2.0,
            max_padding_rows=256,
            max_recordings=200,
        )

    def test_every_default_says_why(self) -> None:
        plan = resolve([], ABLE)
        assert {plan[name].source for name in plan} == {"default"}
        assert all(plan[name].reason == SETTINGS[name].because for name in plan)

    def test_phase_plan_has_the_fields_of_the_table(self) -> None:
        assert tuple(field.name for field in dataclasses.fields(PhasePlan)) == PHASE_FIELDS

    def test_a_phase_plan_of_ones_own_names_its_values_and_has_the_tables_defaults(self) -> None:
        assert PhasePlan(backend="full") == resolve([], ABLE).phase("decode")
        with pytest.raises(TypeError, match="positional"):
            PhasePlan("full", 100)  # type: ignore[call-arg]


class TestAsked:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("backend", "breakable"),
            ("limit", 64),
            ("buckets", (1, 2, 64)),
            ("exact", True),
            ("max_padding_ratio", 1.5),
            ("max_padding_rows", 0),
            ("max_recordings", 1),
        ],
    )
    @pytest.mark.parametrize("phase", PHASES)
    def test_a_value_lands_in_its_phase_alone(self, phase: str, field: str, value: Value) -> None:
        plan = resolve([ask(f"{phase}.{field}", value, origin="here=")], ABLE)
        assert plan[f"{phase}.{field}"].value == value
        assert plan[f"{phase}.{field}"].source == "asked"
        assert plan[f"{phase}.{field}"].reason == "asked by here="
        assert [name for name in plan if plan[name].source == "asked"] == [f"{phase}.{field}"]
        assert getattr(plan.phase(phase), field) == value

    @pytest.mark.parametrize(("name", "value"), [("graphs", "strict"), ("debug", True), ("gc", True)])
    def test_plan_settings(self, name: str, value: Value) -> None:
        plan = resolve([ask(name, value, origin="here=")], ABLE)
        assert getattr(plan, name) == value
        assert plan[name].source == "asked"

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("decode.limit", 0, "a positive 64-bit integer, or null"),
            ("decode.limit", -1, "a positive 64-bit integer, or null"),
            ("decode.limit", True, "a positive 64-bit integer, or null"),
            ("decode.limit", 8.0, "a positive 64-bit integer, or null"),
            ("decode.limit", "8", "a positive 64-bit integer, or null"),
            ("decode.limit", MAX_WHOLE + 1, "a positive 64-bit integer, or null"),
            ("decode.buckets", (), "each above the one before"),
            ("decode.buckets", (1, 1), "each above the one before"),
            ("decode.buckets", (2, 1), "each above the one before"),
            ("decode.buckets", (0, 1), "each above the one before"),
            ("decode.buckets", (True, 2), "each above the one before"),
            ("decode.buckets", 8, "each above the one before"),
            ("decode.buckets", "1,2", "each above the one before"),
            ("decode.exact", 1, "true or false"),
            ("decode.exact", "true", "true or false"),
            ("decode.exact", None, "true or false"),
            ("decode.max_padding_ratio", 0.99, "a finite number of at least 1"),
            ("decode.max_padding_ratio", float("nan"), "a finite number of at least 1"),
            ("decode.max_padding_ratio", float("inf"), "a finite number of at least 1"),
            ("decode.max_padding_ratio", True, "a finite number of at least 1"),
            ("decode.max_padding_ratio", 10**400, "a finite number of at least 1"),
            ("decode.max_padding_rows", -1, "a 64-bit integer of at least 0"),
            ("decode.max_padding_rows", False, "a 64-bit integer of at least 0"),
            ("decode.max_padding_rows", None, "a 64-bit integer of at least 0"),
            ("decode.max_recordings", 0, "a positive 64-bit integer"),
            ("decode.max_recordings", None, "a positive 64-bit integer"),
            ("decode.backend", None, "a backend"),
            ("graphs", True, "on, off or strict"),
            ("debug", "on", "true or false"),
            ("gc", 0, "true or false"),
            ("ignore_rules", "graphs-off", "a list of rule names"),
            ("ignore_rules", [1], "a list of rule names"),
            ("ignore_rules", [""], "a list of rule names"),
        ],
    )
    def test_a_wrong_value_says_where_expected_and_found(self, name: str, value: object, expected: str) -> None:
        message = refused(ask(name, value, origin="here="))
        assert message.startswith(f"reading {name} from here=: expected ")
        assert expected in message
        assert f"({type(value).__name__})" in message

    def test_a_value_too_large_to_print_is_refused_all_the_same(self) -> None:
        assert "found a value too large to show (int)" in refused(ask("decode.limit", 10**5000, origin="here="))

    def test_a_long_value_is_cut(self) -> None:
        assert len(refused(ask("decode.exact", "x" * 10_000, origin="here="))) < 250

    def test_an_integer_ratio_becomes_a_float(self) -> None:
        ratio = resolve([ask("decode.max_padding_ratio", 3, origin="here=")], ABLE).phase("decode").max_padding_ratio
        assert type(ratio) is float
        assert ratio == 3.0

    def test_a_list_of_buckets_becomes_a_tuple(self) -> None:
        assert resolve([ask("decode.buckets", [1, 4], origin="x=")], ABLE).phase("decode").buckets == (1, 4)


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("decod.limit", 1, "unknown phase 'decod' in here=; did you mean 'decode'?"),
            ("decode.limt", 1, "unknown setting 'decode.limt' in here=; did you mean 'decode.limit'?"),
            ("grphs", "on", "unknown setting 'grphs' in here=; did you mean 'graphs'?"),
            ("decode", "full", "unknown setting 'decode' in here="),
            ("decode.backend", "ful", "unknown backend 'ful' in here=; did you mean 'full'?"),
            ("decode.backend", "FULL", "unknown backend 'FULL' in here=; did you mean 'full'?"),
            ("decode.backend", "piecewise", "did you mean 'tc_piecewise'?"),
            ("graphs", "of", "unknown value of graphs 'of' in here=; did you mean 'off'?"),
            ("ignore_rules", ["graph-off"], "unknown rule 'graph-off'"),
            ("ignore_rules", ["graph-off"], "did you mean 'graphs-off'?"),
        ],
    )
    def test_the_nearest_valid_one_is_offered(self, name: str, value: object, expected: str) -> None:
        message = refused(ask(name, value, origin="here="))
        assert expected in message
        assert "(valid: " in message

    def test_a_word_like_no_other_gets_the_list_and_no_guess(self) -> None:
        message = refused(ask("decode.backend", "qqq", origin="here="))
        assert message == f"unknown backend 'qqq' in here= (valid: {', '.join(BACKENDS)})"

    @pytest.mark.parametrize("wrong", ["decod.limit", "nothing", "decode.limt"])
    def test_a_plan_refuses_them_too(self, wrong: str) -> None:
        with pytest.raises(PlanError, match="unknown"):
            resolve([], ABLE)[wrong]

    def test_a_plan_has_no_other_phase(self) -> None:
        with pytest.raises(PlanError, match=r"unknown phase 'verify' in the plan.*did you mean 'target_verify'"):
            resolve([], ABLE).phase("verify")


class TestPrecedence:
    LEVELS = (Level.JSON, Level.FLAG, Level.SWITCH)

    @pytest.mark.parametrize(
        ("high", "low"), [(Level.JSON, Level.FLAG), (Level.JSON, Level.SWITCH), (Level.FLAG, Level.SWITCH)]
    )
    @pytest.mark.parametrize("swapped", [False, True])
    def test_the_higher_level_wins_whatever_the_order_and_says_so(self, high: Level, low: Level, swapped: bool) -> None:
        asks = [Ask("decode.limit", 8, "--high", high), Ask("decode.limit", 4, "--low", low)]
        plan = resolve(asks[::-1] if swapped else asks, ABLE)
        assert plan.phase("decode").limit == 8
        assert plan["decode.limit"].reason == "asked by --high"
        assert plan.warnings == ("decode.limit=8 (asked by --high) overrides 4 (asked by --low)",)

    def test_three_levels_give_two_warnings(self) -> None:
        asks = [Ask("decode.limit", 1 + level, f"--{level.name}", level) for level in self.LEVELS]
        warnings = resolve(asks, ABLE).warnings
        assert len(warnings) == 2
        assert "--FLAG" in warnings[0]
        assert "--SWITCH" in warnings[1]

    def test_the_same_value_below_is_no_override(self) -> None:
        asks = [Ask("decode.limit", 8, "--a", Level.JSON), Ask("decode.limit", 8, "--b", Level.FLAG)]
        assert resolve(asks, ABLE).warnings == ()

    @pytest.mark.parametrize("level", Level)
    def test_a_tie_names_both(self, level: Level) -> None:
        message = refused(Ask("gc", True, "--one", level), Ask("gc", False, "--two", level))
        assert "gc is asked to be both true (by --one) and false (by --two)" in message

    def test_a_tie_below_a_winner_is_still_an_error(self) -> None:
        message = refused(
            Ask("gc", True, "--top", Level.JSON),
            Ask("gc", True, "--one", Level.FLAG),
            Ask("gc", False, "--two", Level.FLAG),
        )
        assert "--one" in message
        assert "--two" in message

    def test_a_wrong_value_below_a_winner_is_still_an_error(self) -> None:
        assert "--low" in refused(Ask("gc", True, "--top", Level.JSON), Ask("gc", 3, "--low", Level.SWITCH))

    def test_the_same_value_twice_at_one_level_is_fine(self) -> None:
        plan = resolve([ask("gc", True, origin="--one"), ask("gc", True, origin="--two")], ABLE)
        assert plan["gc"].reason == "asked by --one"

    def test_warnings_that_come_with_the_asks_are_in_the_plan(self) -> None:
        assert resolve(Asked((), ("--old is deprecated",)), ABLE).warnings == ("--old is deprecated",)


class TestMeasured:
    FOUND = Measured("decode.limit", 160, "160 sequences fit the memory")

    def test_it_ranks_above_the_default(self) -> None:
        resolved = resolve([], ABLE, measured=[self.FOUND])["decode.limit"]
        assert (resolved.value, resolved.source, resolved.reason) == (160, "measured", self.FOUND.reason)

    @pytest.mark.parametrize("level", Level)
    def test_it_yields_to_any_request_without_a_warning(self, level: Level) -> None:
        plan = resolve([Ask("decode.limit", 8, "--x", level)], ABLE, measured=[self.FOUND])
        assert plan["decode.limit"].value == 8
        assert plan.warnings == ()

    def test_an_explicit_null_is_a_request(self) -> None:
        plan = resolve([ask("decode.limit", None, origin="--x")], ABLE, measured=[self.FOUND])
        assert plan["decode.limit"].value is None

    def test_two_that_differ_are_an_error(self) -> None:
        other = Measured("decode.limit", 4, "so says another")
        with pytest.raises(PlanError, match=r"both 160 \(160 sequences fit the memory\) and 4 \(so says"):
            resolve([], ABLE, measured=[self.FOUND, other])

    def test_it_is_checked_like_a_request(self) -> None:
        with pytest.raises(PlanError, match=r"reading decode\.limit from a measurement \(guess\): expected a pos"):
            resolve([], ABLE, measured=[Measured("decode.limit", 0, "guess")])

    def test_a_rule_may_change_it(self) -> None:
        plan = resolve([], FULL_ONLY, measured=[Measured("decode.backend", "breakable", "it was faster")])
        assert (plan["decode.backend"].value, plan["decode.backend"].source) == ("full", "rule")

    @pytest.mark.parametrize("reason", ["", " "])
    def test_one_without_a_reason_still_has_one(self, reason: str) -> None:
        assert resolve([], ABLE, measured=[Measured("gc", True, reason)])["gc"].reason == "measured"


class TestBackendRules:
    def test_a_default_that_is_not_built_falls_back_to_full(self) -> None:
        resolved = resolve([], DeviceFacts("cuda", EVERY, built=frozenset({"full"})))["prefill.backend"]
        assert (resolved.value, resolved.source) == ("full", "rule")
        assert resolved.reason == "rule 'backend-not-built': this build doesn't have breakable"

    @pytest.mark.parametrize(
        "facts", [DeviceFacts("x", frozenset(), frozenset({"full"})), DeviceFacts("x", EVERY, frozenset())]
    )
    def test_without_full_it_falls_back_to_disabled(self, facts: DeviceFacts) -> None:
        plan = resolve([], facts)
        assert {plan.phase(phase).backend for phase in PHASES} == {"disabled"}

    def test_a_default_that_the_device_lacks_is_disabled(self) -> None:
        resolved = resolve([], DeviceFacts("npu", frozenset({"full"}), EVERY))["prefill.backend"]
        assert (resolved.value, resolved.source) == ("disabled", "rule")
        assert "device-lacks-backend" in resolved.reason
        assert "npu" in resolved.reason

    @pytest.mark.parametrize(
        ("facts", "rule"),
        [
            (DeviceFacts("cuda", EVERY, frozenset({"full"})), "backend-not-built"),
            (DeviceFacts("cuda", frozenset({"full"}), EVERY), "device-lacks-backend"),
        ],
    )
    def test_a_request_for_it_is_an_error_that_offers_no_way_past(self, facts: DeviceFacts, rule: str) -> None:
        message = refused(ask("decode.backend", "breakable", origin="--decode-graph-backend"), facts=facts)
        assert f"rule '{rule}'" in message
        assert "--decode-graph-backend" in message
        assert "--ignore-rule" not in message

    def test_the_error_advises_nothing_that_the_device_lacks(self) -> None:
        facts = DeviceFacts("x", frozenset({"breakable"}), frozenset({"full"}))
        message = refused(ask("decode.backend", "breakable", origin="x="), facts=facts)
        assert "Ask for decode.backend=disabled" in message

    @pytest.mark.parametrize("facts", [ABLE, FULL_ONLY, DeviceFacts("x", frozenset(), frozenset())])
    def test_disabled_can_always_be_asked(self, facts: DeviceFacts) -> None:
        asks = [ask(f"{phase}.backend", "disabled", origin="x=") for phase in PHASES]
        assert resolve(asks, facts)["decode.backend"].source == "asked"

    @pytest.mark.parametrize("rule", [rule.name for rule in RULES if not rule.ignorable])
    def test_a_rule_that_can_not_be_ignored_says_so(self, rule: str) -> None:
        message = refused(ask("ignore_rules", [rule], origin="--ignore-rule"))
        assert message.startswith(f"rule '{rule}' can't be ignored (asked by --ignore-rule)")


class TestGraphsOff:
    OFF = ask("graphs", "off", origin="--graphs")
    FULL = ask("decode.backend", "full", origin="--decode-graph-backend")

    def test_every_phase_is_disabled_and_says_why(self) -> None:
        plan = resolve([self.OFF], ABLE)
        for phase in PHASES:
            assert plan.phase(phase).backend == "disabled"
            assert plan[f"{phase}.backend"].source == "rule"
            assert "graphs-off" in plan[f"{phase}.backend"].reason

    def test_with_an_explicit_backend_it_is_an_error_naming_both_and_the_way_past(self) -> None:
        message = refused(self.OFF, self.FULL)
        assert "rule 'graphs-off'" in message
        assert "decode.backend=full (asked by --decode-graph-backend)" in message
        assert "graphs=off (asked by --graphs)" in message
        assert message.endswith("--ignore-rule graphs-off")

    def test_a_more_specific_backend_overrides_it_for_its_phase_alone(self) -> None:
        plan = resolve([self.OFF, dataclasses.replace(self.FULL, origin="--json", level=Level.JSON)], ABLE)
        assert (plan.graphs, plan.phase("decode").backend) == ("on", "full")
        assert {plan.phase(phase).backend for phase in PHASES if phase != "decode"} == {"disabled"}
        assert "graphs=off (asked by --graphs)" in plan["prefill.backend"].reason
        assert plan.warnings == ("decode.backend=full (asked by --json) overrides graphs=off (asked by --graphs)",)

    def test_it_overrides_a_less_specific_backend(self) -> None:
        switch = dataclasses.replace(self.FULL, origin="--switch", level=Level.SWITCH)
        plan = resolve([self.OFF, switch], ABLE)
        assert (plan.graphs, plan.phase("decode").backend) == ("off", "disabled")
        assert plan.warnings == ("graphs=off (asked by --graphs) overrides decode.backend=full (asked by --switch)",)

    def test_an_equal_request_beside_a_more_specific_one_is_still_an_error(self) -> None:
        prefill = ask("prefill.backend", "full", origin="--prefill")
        message = refused(self.OFF, prefill, dataclasses.replace(self.FULL, origin="--json", level=Level.JSON))
        assert "rule 'graphs-off' conflicts with prefill.backend=full (asked by --prefill)" in message

    def test_with_an_explicit_disabled_it_agrees(self) -> None:
        plan = resolve([self.OFF, ask("decode.backend", "disabled", origin="x=")], ABLE)
        assert plan["decode.backend"].source == "asked"

    def test_ignored_it_is_recorded_and_warned_about(self) -> None:
        plan = resolve([self.OFF, self.FULL, ask("ignore_rules", ["graphs-off"], origin="--ignore-rule")], ABLE)
        assert plan.phase("decode").backend == "full"
        assert plan.ignored == ("graphs-off",)
        assert len(plan.warnings) == 1
        assert (
            "rule 'graphs-off' is ignored (asked by --ignore-rule); it would change decode.backend" in plan.warnings[0]
        )

    def test_ignored_without_need_it_is_recorded_too(self) -> None:
        plan = resolve([ask("ignore_rules", ["graphs-off"], origin="--ignore-rule")], ABLE)
        assert plan.ignored == ("graphs-off",)
        assert plan.warnings == ("rule 'graphs-off' is ignored (asked by --ignore-rule); it would change nothing",)


class TestStrict:
    STRICT = ask("graphs", "strict", origin="--graphs")
    DISABLED = tuple(ask(f"{phase}.backend", "disabled", origin="--graph-backend") for phase in PHASES)

    def test_one_phase_with_graphs_is_enough(self) -> None:
        assert resolve([self.STRICT, *self.DISABLED[1:]], ABLE).graphs == "strict"

    @pytest.mark.parametrize(
        ("asks", "facts"), [((STRICT, *DISABLED), ABLE), ((STRICT,), DeviceFacts("x", frozenset(), frozenset()))]
    )
    def test_with_every_phase_disabled_it_is_an_error(self, asks: tuple[Ask, ...], facts: DeviceFacts) -> None:
        message = refused(*asks, facts=facts)
        assert "rule 'strict-needs-graphs' conflicts with graphs=strict (asked by --graphs)" in message
        assert "--ignore-rule strict-needs-graphs" in message

    def test_more_specific_backends_override_it(self) -> None:
        plan = resolve([self.STRICT, *(dataclasses.replace(one, level=Level.JSON) for one in self.DISABLED)], ABLE)
        assert plan.graphs == "on"
        assert plan.warnings == (
            "decode.backend=disabled (asked by --graph-backend) overrides graphs=strict (asked by --graphs)",
        )

    def test_measured_it_yields(self) -> None:
        plan = resolve(self.DISABLED, ABLE, measured=[Measured("graphs", "strict", "the engine wants it")])
        assert (plan.graphs, plan["graphs"].source) == ("on", "rule")

    def test_ignored(self) -> None:
        past = ask("ignore_rules", ["strict-needs-graphs"], origin="--ignore-rule")
        assert resolve([self.STRICT, *self.DISABLED, past], ABLE).graphs == "strict"


class TestLimitAndBuckets:
    LIMIT = ask("decode.limit", 8, origin="--limit")
    BUCKETS = ask("decode.buckets", (1, 2, 4), origin="--buckets")

    def test_a_contradiction_names_both(self) -> None:
        message = refused(self.LIMIT, self.BUCKETS)
        assert "decode.limit=8 (asked by --limit)" in message
        assert "decode.buckets=1,2,4 (asked by --buckets)" in message
        assert "Ask for decode.limit=4" in message
        assert "--ignore-rule" not in message

    @pytest.mark.parametrize(("raised", "wanted"), [("decode.limit", (8, None)), ("decode.buckets", (4, (1, 2, 4)))])
    def test_the_more_specific_one_prevails(self, raised: str, wanted: tuple[int, object]) -> None:
        asks = [
            dataclasses.replace(one, level=Level.JSON if one.setting == raised else Level.FLAG)
            for one in (self.LIMIT, self.BUCKETS)
        ]
        plan = resolve(asks, ABLE)
        assert (plan.phase("decode").limit, plan.phase("decode").buckets) == wanted
        (warning,) = plan.warnings
        assert warning.startswith(f"{raised}=")
        assert "--limit" in warning
        assert "--buckets" in warning

    def test_they_may_agree(self) -> None:
        phase = resolve([self.BUCKETS, ask("decode.limit", 4, origin="x=")], ABLE).phase("decode")
        assert (phase.limit, phase.buckets) == (4, (1, 2, 4))

    def test_phases_do_not_mix(self) -> None:
        assert resolve([self.BUCKETS, ask("prefill.limit", 8, origin="x=")], ABLE).phase("prefill").limit == 8

    def test_a_measured_limit_follows_the_buckets_asked(self) -> None:
        plan = resolve([self.BUCKETS], ABLE, measured=[Measured("decode.limit", 64, "memory")])
        assert (plan["decode.limit"].value, plan["decode.limit"].source) == (4, "rule")
        assert "--buckets" in plan["decode.limit"].reason

    def test_measured_buckets_give_way_to_the_limit_asked(self) -> None:
        plan = resolve([self.LIMIT], ABLE, measured=[Measured("decode.buckets", (1, 64), "traffic")])
        assert (plan["decode.buckets"].value, plan["decode.buckets"].source) == (None, "rule")
        assert plan.phase("decode").limit == 8


def forbid_gc(_facts: DeviceFacts, view: ResolvedValues) -> Iterator[Change]:
    if view["gc"].value:
        yield Change("gc", False, "collections hurt")


def want_gc(_facts: DeviceFacts, view: ResolvedValues) -> Iterator[Change]:
    if not view["gc"].value:
        yield Change("gc", True, "collections help")


def mark(facts: DeviceFacts, _view: ResolvedValues) -> Iterator[Change]:
    if facts.device == "cpu":
        yield Change("debug", True, "the cpu has no graphs")


class TestRuleTables:
    def test_names_are_unique_and_each_rule_says_what_it_is_about(self) -> None:
        assert len({rule.name for rule in RULES}) == len(RULES)
        assert all(rule.says for rule in RULES)

    def test_a_rule_sees_the_facts(self) -> None:
        rules = (Rule("cpu", "no graphs on a cpu", mark),)
        facts = dataclasses.replace(ABLE, device="cpu")
        assert resolve([], facts, rules)["debug"].reason == "rule 'cpu': the cpu has no graphs"
        assert resolve([], ABLE, rules)["debug"].source == "default"

    def test_a_rule_sees_what_the_rules_above_it_did(self) -> None:
        rules = (Rule("more", "collect", want_gc), Rule("less", "don't", forbid_gc))
        with pytest.raises(PlanError, match="rules table doesn't settle: rule 'more' still wants gc=true"):
            resolve([], ABLE, rules)
        plan = resolve([ask("ignore_rules", ["less"], origin="x=")], ABLE, rules)
        assert plan.gc is True

    def test_ignoring_knows_the_names_of_the_table_given(self) -> None:
        assert "valid: less" in refused(
            ask("ignore_rules", ["graphs-off"], origin="x="), rules=(Rule("less", "don't", forbid_gc),)
        )

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (Change("gcc", True, "x"), "unknown setting 'gcc' in rule 'odd'"),
            (Change("gc", 3, "x"), "rule 'odd'"),
        ],
    )
    def test_a_rule_that_makes_no_sense_is_a_plan_error(self, change: Change, expected: str) -> None:
        assert expected in refused(rules=(Rule("odd", "odd", lambda _facts, _view: [change]),))


class TestPlan:
    BUSY = (
        ask("decode.buckets", (1, 2, 4), origin="--decode-graph-buckets"),
        ask("prefill.backend", "disabled", origin="--prefill-graph-backend"),
        ask("ignore_rules", ["graphs-off"], origin="--ignore-rule"),
    )

    def test_it_is_frozen_hashable_and_picklable(self) -> None:
        plan = resolve(self.BUSY, ABLE)
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.warnings = ()  # type: ignore[misc]
        assert hash(plan) == hash(resolve(self.BUSY, ABLE))
        assert pickle.loads(pickle.dumps(plan)) == plan

    def test_its_settings_are_those_of_the_table(self) -> None:
        assert list(resolve([], ABLE)) == list(SETTINGS)

    def test_json_has_every_setting(self) -> None:
        document = json.loads(resolve(self.BUSY, ABLE).to_json())
        assert set(document) == {*PLAN_FIELDS, *PHASES}
        assert all(tuple(document[phase]) == PHASE_FIELDS for phase in PHASES)
        assert document["decode"]["buckets"] == [1, 2, 4]
        assert document["ignore_rules"] == ["graphs-off"]

    def test_explain_is_an_aligned_table_with_warnings_last(self) -> None:
        plan = resolve(self.BUSY, ABLE)
        lines = plan.explain().splitlines()
        table = [line for line in lines if not line.startswith("warning: ")]
        assert lines == [*table, *(f"warning: {warning}" for warning in plan.warnings)]
        assert plan.warnings
        header = table[0]
        for line in table[1:-1]:
            name = line.split()[0]
            assert line[: header.index("value")].strip() == name
            assert line[header.index("value") : header.index("source")].strip() == shown(plan[name].value)
            assert line[header.index("source") : header.index("reason")].strip() == plan[name].source
            assert line[header.index("reason") :] == plan[name].reason

    def test_explain_shows_backends_and_what_is_not_default_and_fits_a_screen(self) -> None:
        plan = resolve(self.BUSY, ABLE)
        names = {line.split()[0] for line in plan.explain().splitlines()[1:]} - {"warning:", "not"}
        assert names == {*PLAN_FIELDS, *(f"{phase}.backend" for phase in PHASES), "decode.buckets"}
        assert "max_padding_rows=256" in plan.explain()
        assert len(resolve([ask("graphs", "off", origin="x=")], ABLE).explain().splitlines()) <= 24

    def test_unfolded_it_shows_every_setting(self) -> None:
        lines = resolve([], ABLE).explain(fold=False).splitlines()
        assert [line.split()[0] for line in lines[1:]] == list(SETTINGS)

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "null"),
            (True, "true"),
            ((), "none"),
            ((1, 2), "1,2"),
            (tuple(range(1, 41)), "1,2,3,..,40 (40 of them)"),
            (2.0, "2.0"),
            ("full", "full"),
        ],
    )
    def test_values_are_shown_as_they_are_asked(self, value: Value, text: str) -> None:
        assert shown(value) == text

    def test_a_plan_of_the_default_rules(self) -> None:
        plan: Plan = resolve([], FULL_ONLY)
        assert plan.phase("prefill").backend == "full"
