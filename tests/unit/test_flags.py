"""The command line: flags from the settings table, canonical JSON, deprecated names."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from phonograph.errors import PlanError
from phonograph.graphs.planning.flags import add_flags, asked_from, asks_of_graph_backend, flag_of
from phonograph.graphs.planning.kinds import BACKENDS, Value
from phonograph.graphs.planning.resolve import Plan
from phonograph.graphs.planning.rules import RULES, DeviceFacts
from phonograph.graphs.planning.settings import KNOWN_PHASES, Ask, Asked, Level
from phonograph.graphs.planning.sglang_flags import ALIASES, PIECEWISE_RULES, Alias
from plans import KNOWN, PHASES, SETTINGS, resolve

ABLE = DeviceFacts("cuda", backends=frozenset(BACKENDS), built=frozenset(BACKENDS))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(made, KNOWN)
    return made


def asked(*line: str) -> Asked:
    return asked_from(parser().parse_args(line), KNOWN)


def plan(*line: str) -> Plan:
    return resolve(asked(*line), ABLE)


def refused(*line: str) -> str:
    with pytest.raises(PlanError) as caught:
        plan(*line)
    return str(caught.value)


# A text for a flag of each field, and the value that it asks for.
EXAMPLES: dict[str, tuple[list[str], Value]] = {
    "graphs": (["strict"], "strict"),
    "guard": (["report"], "report"),
    "tc_compiler": (["eager"], "eager"),
    "tc_fallback": ([], True),
    "debug": ([], True),
    "gc": ([], True),
    "profile": (["traces"], "traces"),
    "ignore_rules": (["graphs-off"], ("graphs-off",)),
    "backend": (["disabled"], "disabled"),
    "limit": (["48"], 48),
    "buckets": (["1,2,48"], (1, 2, 48)),
    "exact": ([], True),
    "max_padding_ratio": (["1.25"], 1.25),
    "max_padding_rows": (["17"], 17),
    "max_recordings": (["90"], 90),
}


class TestFlags:
    def test_flags_and_settings_match_one_to_one(self) -> None:
        options = [option for action in parser()._actions for option in action.option_strings]
        ours = {option for option in options if not option.startswith("--no-")} - {"-h", "--help"}
        ours -= {alias.flag for alias in ALIASES}
        assert ours == {"--graph-backend", *(flag_of(setting) for setting in SETTINGS.values())}
        assert len({flag_of(setting) for setting in SETTINGS.values()}) == len(SETTINGS)

    @pytest.mark.parametrize("name", SETTINGS)
    def test_each_flag_asks_for_its_setting_and_no_other(self, name: str) -> None:
        setting = SETTINGS[name]
        texts, value = EXAMPLES[setting.field]
        asks = asked(flag_of(setting), *texts).asks
        assert [(a.setting, a.origin, a.level) for a in asks] == [(name, flag_of(setting), Level.FLAG)]
        resolved = plan(flag_of(setting), *texts)[name]
        assert (resolved.value, resolved.reason) == (value, f"asked by {flag_of(setting)}")

    @pytest.mark.parametrize(
        ("name", "flag"),
        [
            ("graphs", "--graphs"),
            ("debug", "--graph-debug"),
            ("gc", "--graph-gc"),
            ("ignore_rules", "--ignore-rule"),
            ("decode.backend", "--decode-graph-backend"),
            ("target_verify.limit", "--target-verify-graph-limit"),
            ("draft_extend.max_padding_ratio", "--draft-extend-graph-max-padding-ratio"),
        ],
    )
    def test_names(self, name: str, flag: str) -> None:
        assert flag_of(SETTINGS[name]) == flag

    def test_nothing_given_asks_nothing(self) -> None:
        assert asked() == Asked((), ())
        assert asked_from(argparse.Namespace(unrelated=3), KNOWN) == Asked((), ())

    @pytest.mark.parametrize("name", [n for n, s in SETTINGS.items() if isinstance(s.default, bool)])
    def test_a_switch_has_a_negative_that_is_its_own_origin(self, name: str) -> None:
        negative = flag_of(SETTINGS[name]).replace("--", "--no-", 1)
        assert asked(negative).asks == (Ask(name, False, negative, Level.FLAG),)

    def test_help_has_the_help_of_every_setting(self) -> None:
        text = "".join(parser().format_help().split())
        for setting in SETTINGS.values():
            assert "".join(setting.help.split()) in text

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (
                ("--decode-graph-limit", "many"),
                "reading decode.limit from --decode-graph-limit: expected a positive",
            ),
            (("--decode-graph-limit", "many"), "found 'many' (str)"),
            (("--decode-graph-limit", "8.0"), "found 8.0 (float)"),
            (("--decode-graph-limit", "true"), "found 'true' (str)"),
            (("--decode-graph-limit", "9" * 5000), "expected a positive"),
            (("--decode-graph-limit", ""), "found '' (str)"),
            (("--decode-graph-buckets", "1,,2"), "found (1, '', 2)"),
            (("--decode-graph-buckets", "4,2"), "each above the one before"),
            (("--decode-graph-max-padding-ratio", "NaN"), "a finite number"),
            (("--decode-graph-max-padding-rows=-1",), "at least 0"),
            (("--decode-graph-max-padding-rows", "null"), "found None"),
            (("--prefill-graph-backend", "breakble"), "did you mean 'breakable'?"),
            (("--graphs", "yes"), "unknown value of graphs 'yes' in --graphs"),
            (("--ignore-rule", "graphs-of"), "did you mean 'graphs-off'?"),
            (("--graphs", "off", "--decode-graph-backend", "full"), "--ignore-rule graphs-off"),
        ],
    )
    def test_a_wrong_text_is_a_plan_error(self, line: tuple[str, ...], expected: str) -> None:
        assert expected in refused(*line)

    @pytest.mark.parametrize("flag", ["--decode-graph-limit", "--decode-graph-buckets"])
    def test_null_can_be_asked(self, flag: str) -> None:
        (only,) = asked(flag, "null").asks
        assert only.value is None
        assert plan(flag, "null")[only.setting].source == "asked"

    def test_one_bucket(self) -> None:
        assert plan("--decode-graph-buckets", "8").phase("decode").buckets == (8,)

    def test_a_repeat_with_another_value_is_an_error_and_not_the_last_one(self) -> None:
        line = ("--decode-graph-backend", "full", "--decode-graph-backend", "disabled")
        assert "both full (by --decode-graph-backend) and disabled (by --decode-graph-backend)" in refused(*line)

    def test_rule_names_add_up(self) -> None:
        got = plan("--ignore-rule", "strict-needs-graphs", "--ignore-rule", "graphs-off")
        assert got.ignored == ("graphs-off", "strict-needs-graphs")

    def test_a_parser_without_abbreviations_takes_no_beginnings(self) -> None:
        with pytest.raises(SystemExit):
            parser().parse_args(["--graph-b", "full"])


class TestGraphBackend:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_word_is_for_all_phases(self, backend: str) -> None:
        got = plan("--graph-backend", backend)
        assert {got.phase(phase).backend for phase in PHASES} == {backend}
        assert {a.level for a in asked("--graph-backend", backend).asks} == {Level.JSON}

    def test_json(self) -> None:
        text = '{"decode": "disabled", "prefill": {"backend": "full", "buckets": [8, 16]}, "graphs": "strict"}'
        got = plan("--graph-backend", text)
        assert got.phase("decode").backend == "disabled"
        assert got.phase("prefill").backend == "full"
        assert got.phase("prefill").buckets == (8, 16)
        assert got.graphs == "strict"
        assert got["draft.backend"].source == "default"

    def test_it_ranks_above_a_phase_flag_and_says_so(self) -> None:
        got = plan("--decode-graph-backend", "breakable", "--graph-backend", '{"decode": "full"}')
        assert got.phase("decode").backend == "full"
        assert got.warnings == (
            "decode.backend=full (asked by --graph-backend) overrides breakable (asked by --decode-graph-backend)",
        )

    def test_so_do_its_plan_settings(self) -> None:
        got = plan("--graphs", "off", "--graph-backend", '{"graphs": "strict"}')
        assert got.graphs == "strict"
        assert got.warnings == ("graphs=strict (asked by --graph-backend) overrides off (asked by --graphs)",)

    def test_an_empty_object_asks_nothing(self) -> None:
        assert asked("--graph-backend", "{}").asks == ()

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (
                '{"decod": "full"}',
                "unknown phase 'decod' in --graph-backend; did you mean 'decode'? (valid: decode,",
            ),
            ('{"grafs": "on"}', "unknown setting 'grafs' in --graph-backend; did you mean 'graphs'?"),
            (
                '{"decode": {"limt": 3}}',
                "unknown setting 'decode.limt' in --graph-backend; did you mean 'decode.limit'",
            ),
            ('{"decode": "ful"}', "unknown backend 'ful' in --graph-backend; did you mean 'full'?"),
            (
                '{"decode": {"backend": "ful"}}',
                "unknown backend 'ful' in --graph-backend; did you mean 'full'?",
            ),
            ('{"decode": 3}', "expected a backend or an object for decode, found 3 (int)"),
            ('{"decode": null}', "expected a backend or an object for decode, found None (NoneType)"),
            ('{"decode": {"limit": true}}', "found True (bool)"),
            ('{"decode": {"limit": "8"}}', "found '8' (str)"),
            ('{"decode": {"buckets": 8}}', "found 8 (int)"),
            ('{"decode": {"exact": "on"}}', "expected true or false, found 'on' (str)"),
            ('{"decode": {"max_padding_ratio": Infinity}}', "a finite number"),
            ('{"debug": "true"}', "reading debug from --graph-backend: expected true or false"),
            ('{"decode": "full", "decode": "disabled"}', "the key 'decode' is there twice"),
            ('{"decode": {"limit": 1, "limit": 2}}', "the key 'limit' is there twice"),
            ('["full"]', "expected an object of phases, found ['full'] (list)"),
            ('{"decode": full}', "reading the JSON of --graph-backend: Expecting value"),
            ("{", "reading the JSON of --graph-backend"),
            ("[" * 100_000, "reading the JSON of --graph-backend"),
            ("ful", "unknown backend 'ful' in --graph-backend; did you mean 'full'?"),
            ("", "unknown backend '' in --graph-backend (valid:"),
        ],
    )
    def test_what_it_refuses(self, text: str, expected: str) -> None:
        assert expected in refused("--graph-backend", text)

    def test_a_plans_json_gives_the_plan_again(self) -> None:
        line = ("--graphs", "off", "--decode-graph-buckets", "1,3", "--draft-graph-max-padding-ratio", "1.1")
        first = plan(*line, "--ignore-rule", "strict-needs-graphs")
        again = plan("--graph-backend", first.to_json())
        assert {name: again[name].value for name in again} == {name: first[name].value for name in first}
        assert json.loads(again.to_json()) == json.loads(first.to_json())

    @pytest.mark.parametrize("found", [3, None, {"decode": "full"}])
    def test_something_other_than_text_is_refused(self, found: object) -> None:
        with pytest.raises(PlanError, match="expected a backend, found"):
            resolve(asks_of_graph_backend(found, KNOWN), ABLE)


# Each of SGLang's names: what follows it, the setting and value that it asks for, and what to write instead.
AS_JSON = "--graph-backend VALUE (for max_bs write limit, for bs buckets, and tc_compiler beside the phases)"
OLD_NAMES: list[tuple[list[str], str, Value, str]] = [
    (["--cuda-graph-config", '{"decode": {"backend": "full", "max_bs": 16}}'], "decode.limit", 16, AS_JSON),
    (["--cuda-graph-config", '{"prefill": {"bs": [64, 128]}}'], "prefill.buckets", (64, 128), AS_JSON),
    (["--cuda-graph-config", '{"prefill": {"tc_compiler": "eager"}}'], "tc_compiler", "eager", AS_JSON),
    (["--cuda-graph-backend-decode", "breakable"], "decode.backend", "breakable", "--decode-graph-backend VALUE"),
    (["--cuda-graph-backend-prefill", "full"], "prefill.backend", "full", "--prefill-graph-backend VALUE"),
    (["--cuda-graph-max-bs-decode", "16"], "decode.limit", 16, "--decode-graph-limit VALUE"),
    (["--cuda-graph-max-bs-prefill", "512"], "prefill.limit", 512, "--prefill-graph-limit VALUE"),
    (["--cuda-graph-bs-decode", "1", "16"], "decode.buckets", (1, 16), "--decode-graph-buckets VALUE"),
    (["--cuda-graph-bs-prefill", "64", "128"], "prefill.buckets", (64, 128), "--prefill-graph-buckets VALUE"),
    (["--cuda-graph-tc-compiler", "eager"], "tc_compiler", "eager", "--tc-compiler VALUE"),
    (["--disable-decode-cuda-graph"], "decode.backend", "disabled", "--decode-graph-backend disabled"),
    (["--disable-prefill-cuda-graph"], "prefill.backend", "disabled", "--prefill-graph-backend disabled"),
    (["--piecewise-cuda-graph-max-tokens", "512"], "prefill.limit", 512, "--prefill-graph-limit VALUE"),
    (["--piecewise-cuda-graph-tokens", "64", "128"], "prefill.buckets", (64, 128), "--prefill-graph-buckets VALUE"),
    (["--cuda-graph-mode", "disabled"], "idle.backend", "disabled", AS_JSON),
    (["--cuda-graph-mode", '{"decode": "breakable"}'], "decode.backend", "breakable", AS_JSON),
    (["--prefill-cuda-graph-backend", "full"], "prefill.backend", "full", "--prefill-graph-backend VALUE"),
    (
        ["--decode-cuda-graph-backend", "breakable"],
        "decode.backend",
        "breakable",
        "--decode-graph-backend VALUE",
    ),
    (["--prefill-disable-cuda-graph"], "prefill.backend", "disabled", "--prefill-graph-backend disabled"),
    (["--decode-disable-cuda-graph"], "decode.backend", "disabled", "--decode-graph-backend disabled"),
    (["--disable-cuda-graph"], "graphs", "off", "--graphs off"),
    (["--disable-piecewise-cuda-graph"], "prefill.backend", "disabled", "--prefill-graph-backend disabled"),
    (["--enable-breakable-cuda-graph"], "prefill.backend", "breakable", "--prefill-graph-backend breakable"),
    (["--piecewise-cuda-graph-compiler", "eager"], "tc_compiler", "eager", "--tc-compiler VALUE"),
    (["--enable-cudagraph-gc"], "gc", True, "--graph-gc"),
    (["--debug-cuda-graph"], "debug", True, "--graph-debug"),
    (["--enable-profile-cuda-graph"], "profile", "phonograph-profile", "--graph-profile phonograph-profile"),
    (["--cuda-graph-max-bs", "16"], "decode.limit", 16, "--decode-graph-limit VALUE"),
    (["--cuda-graph-bs", "1", "2", "16"], "decode.buckets", (1, 2, 16), "--decode-graph-buckets VALUE"),
    (["--disable-cuda-graph-padding"], "decode.exact", True, "--decode-graph-exact"),
]


class TestAliases:
    @pytest.mark.parametrize(("line", "name", "value", "instead"), OLD_NAMES)
    def test_each_asks_and_warns_with_the_new_name(
        self, line: list[str], name: str, value: Value, instead: str
    ) -> None:
        got = plan(*line)
        assert (got[name].value, got[name].source) == (value, "asked")
        assert got[name].reason == f"asked by {line[0]}"
        assert got.warnings == (f"{line[0]} is deprecated; use {instead}",)

    @pytest.mark.parametrize("alias", [a for a in ALIASES if a.stands_for], ids=lambda alias: alias.flag)
    def test_what_it_says_to_write_asks_for_the_same(self, alias: Alias) -> None:
        value = {"backend": "full", "compiler": "eager"}.get(alias.stands_for.rpartition("-")[2], "8")
        texts = [value] if alias.value is None else []
        instead = alias.instead.replace("VALUE", value).split()
        old, new = plan(alias.flag, *texts), plan(*instead)
        assert [old[name].value for name in old] == [new[name].value for name in new]
        assert asked(*instead).warnings == ()

    def test_the_list_is_complete(self) -> None:
        tested = {line[0] for line, *_ in OLD_NAMES} | {"--enforce-piecewise-cuda-graph"}
        assert tested == {alias.flag for alias in ALIASES}

    def test_enforced_pieces_go_past_the_rules_that_keep_a_phase_from_them(self) -> None:
        got = plan("--enforce-piecewise-cuda-graph", "--graph-debug")
        assert (got["prefill.backend"].value, got["prefill.backend"].source) == ("tc_piecewise", "asked")
        assert got.ignored == PIECEWISE_RULES
        assert got.warnings[0] == (
            "--enforce-piecewise-cuda-graph is deprecated; use --prefill-graph-backend tc_piecewise --ignore-rule "
            "tc-architecture --ignore-rule tc-debug --ignore-rule tc-deterministic --ignore-rule tc-packed-weights "
            "--ignore-rule tc-untraceable"
        )
        assert any("rule 'tc-debug' is ignored" in text and "prefill.backend" in text for text in got.warnings)
        assert set(PIECEWISE_RULES) <= {rule.name for rule in RULES if rule.ignorable}

    def test_keys_of_its_json_are_refused_elsewhere_and_others_of_its_own_too(self) -> None:
        assert "max_bs" in refused("--graph-backend", '{"decode": {"max_bs": 16}}')
        assert "full_prefill_max_req" in refused("--cuda-graph-config", '{"prefill": {"full_prefill_max_req": 4}}')
        assert "{phase}" in refused("--cuda-graph-config", '{"prefill": {"{phase}": 4}}')
        both = '{"decode": {"tc_compiler": "eager"}, "prefill": {"tc_compiler": "inductor"}}'
        assert "asked to be both" in refused("--cuda-graph-config", both)

    def test_another_compiler_is_refused(self) -> None:
        assert "did you mean 'inductor'?" in refused("--piecewise-cuda-graph-compiler", "inducto")

    @pytest.mark.parametrize("more", [["--cuda-graph-mode", '{"decode": "full"}'], ["--decode-graph-backend", "full"]])
    def test_the_switch_for_no_graphs_yields_to_a_named_backend_with_a_warning(self, more: list[str]) -> None:
        got = plan("--disable-cuda-graph", *more)
        assert got.phase("decode").backend == "full"
        assert got.phase("prefill").backend == "disabled"
        assert (
            f"decode.backend=full (asked by {more[0]}) overrides graphs=off (asked by --disable-cuda-graph)"
            in got.warnings
        )
        assert plan("--graph-backend", got.to_json()).phase("decode").backend == "full"

    def test_a_folder_may_be_null(self) -> None:
        assert plan("--graph-profile", "null").profile is None
        assert "the name of a folder" in refused("--graph-profile", "")

    def test_a_variable_of_the_environment_is_warned_about_with_the_flag_to_use(self) -> None:
        names = ["PATH", "SGLANG_USE_BREAKABLE_CUDA_GRAPH", "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "SGLANG_PORT"]
        found = asked_from(parser().parse_args([]), KNOWN, variables=names)
        assert found.asks == ()
        assert found.warnings == (
            "the environment variable SGLANG_MEMORY_SAVER_CUDA_GRAPH is not read, and changes nothing; use "
            "--graph-backend or another flag of its group, if one does what it did",
            "the environment variable SGLANG_USE_BREAKABLE_CUDA_GRAPH is not read, and changes nothing; use "
            "--graph-backend breakable",
        )

    def test_a_switch_yields_to_a_flag_with_a_warning(self) -> None:
        got = plan("--decode-disable-cuda-graph", "--decode-graph-backend", "full")
        assert got.phase("decode").backend == "full"
        assert "--decode-graph-backend" in got.warnings[1]
        assert "--decode-disable-cuda-graph" in got.warnings[1]

    def test_two_switches_that_differ_are_an_error_naming_both(self) -> None:
        message = refused("--enable-breakable-cuda-graph", "--disable-piecewise-cuda-graph")
        assert "--enable-breakable-cuda-graph" in message
        assert "--disable-piecewise-cuda-graph" in message

    def test_an_alias_of_a_flag_ties_with_the_flag(self) -> None:
        message = refused("--decode-cuda-graph-backend", "full", "--decode-graph-backend", "disabled")
        assert "--decode-cuda-graph-backend" in message
        assert "--decode-graph-backend" in message

    def test_a_wrong_value_names_the_flag_that_was_written(self) -> None:
        assert "unknown backend 'ful' in --cuda-graph-mode" in refused("--cuda-graph-mode", "ful")

    def test_a_repeat_warns_once(self) -> None:
        assert len(asked("--disable-cuda-graph", "--disable-cuda-graph").warnings) == 1

    def test_an_alias_is_frozen_data(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            ALIASES[0].flag = "--other"  # type: ignore[misc]


class TestPhasesThatExist:
    def test_a_phase_that_a_plan_does_not_have_has_no_flag_and_no_alias(self) -> None:
        made = argparse.ArgumentParser(allow_abbrev=False)
        add_flags(made, [KNOWN_PHASES["decode"]])
        options = {option for action in made._actions for option in action.option_strings}
        assert "--decode-graph-backend" in options
        assert "--cuda-graph-max-bs" in options
        assert "--disable-cuda-graph" in options
        assert not {option for option in options if "prefill" in option or "piecewise-cuda-graph" in option} - {
            "--piecewise-cuda-graph-compiler"
        }

    def test_json_of_another_phase_is_refused_with_those_that_there_are(self) -> None:
        with pytest.raises(PlanError, match=r"unknown \w+ 'draft' in --graph-backend.*valid: decode, graphs"):
            asks_of_graph_backend('{"draft": "full"}', [KNOWN_PHASES["decode"]])

    def test_a_word_asks_for_all_phases_that_there_are(self) -> None:
        asks = asks_of_graph_backend("full", [KNOWN_PHASES["idle"], KNOWN_PHASES["draft"]])
        assert [ask.setting for ask in asks] == ["idle.backend", "draft.backend"]
