"""Options and flags of speculation: what is taken, what is refused, and by which sentence."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

import random_modules
from phonograph import LLM, CheckpointError, EngineOptions, PlanError, RequestError, SamplingParams
from phonograph.cli.flags import add_engine_flags, arguments_from
from phonograph.devices import EmulatedDevice
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.sizing import plan_for
from phonograph.engine.execution.speculation import choose_drafter
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import MAX_DEPTH, SpeculateName
from phonograph.engine.passes.registry import DECODE, DRAFT, DRAFT_EXTEND, TARGET_VERIFY
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.requests.request import MAX_DRAFTS
from phonograph.graphs.planning.settings import ask
from phonograph.server.openai.requests import CompletionRequest
from server import tiny


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculate": "medusa"}, "speculate is one of off, ngram"),
        ({"speculate_depth": 2}, "nothing is"),
        ({"speculate": "ngram", "speculate_depth": 0}, "speculate_depth must be a whole number"),
        ({"speculate": "ngram", "speculate_depth": 16}, "speculate_depth must be a whole number"),
        ({"speculate": "eagle", "draft": 3}, r"draft is the path of a folder, .* found 3 \(int\)"),
        ({"speculate": "eagle", "draft": b"head"}, "draft is the path of a folder"),
        ({"speculate": "eagle", "draft": ""}, "draft is the path of a folder"),
        ({"shadow_verify": 1.0, "shadow_dir": 3}, "shadow_dir is the path of a folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        EngineOptions(**options)


def test_bounds_are_those_of_the_pages_and_of_http() -> None:
    page = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()
    page = " ".join(page.split())
    assert f"1 to {MAX_DEPTH}, the default is 3" in page
    assert f"(up to {MAX_DRAFTS}) bounds its drafts" in page
    EngineOptions(speculate="ngram", speculate_depth=MAX_DEPTH)
    SamplingParams(speculate=MAX_DRAFTS)
    with pytest.raises(RequestError, match=f"at most {MAX_DRAFTS}"):
        SamplingParams(speculate=MAX_DRAFTS + 1)
    for most, is_taken in ((MAX_DRAFTS, True), (MAX_DRAFTS + 1, False)):
        with nullcontext() if is_taken else pytest.raises(msgspec.ValidationError, match=f"<= {MAX_DRAFTS}"):
            msgspec.convert({"prompt": "x", "speculate": most}, CompletionRequest)


def test_a_path_may_be_a_text() -> None:
    options: dict[str, Any] = {"draft": "heads/one", "shadow_dir": "wrong"}
    found = EngineOptions(speculate="eagle", shadow_verify=1.0, **options)
    assert (found.draft, found.shadow_dir) == (Path("heads/one"), Path("wrong"))
    paths = [one.name for one in fields(EngineOptions) if "Path" in str(one.type)]
    assert paths == list(options), "a test for each"


# -- flags ----------------------------------------------------------------------------------------------------


def arguments_of(*flags: str) -> EngineArguments:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    return arguments_from(parser.parse_args(flags))


def options_of(*flags: str) -> EngineOptions:
    return arguments_of(*flags).options


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ((), ("off", 0, None)),
        (("--speculate", "ngram"), ("ngram", 3, None)),
        (("--speculate", "ngram", "--speculate-depth", "5"), ("ngram", 5, None)),
        (("--speculate", "eagle", "--draft", "head"), ("eagle", 3, Path("head"))),
        (("--speculate", "ngram+eagle"), ("ngram+eagle", 3, None)),
        (("--speculate", "ngram+eagle", "--draft", "head"), ("ngram+eagle", 3, Path("head"))),
        (("--speculative-algorithm", "NGRAM", "--speculative-num-steps", "4"), ("ngram", 4, None)),
        (("--speculative-algorithm", "nextn", "--draft", "modules"), ("mtp", 3, Path("modules"))),
        (("--speculate", "mtp", "--speculative-algorithm", "NEXTN", "--draft", "x"), ("mtp", 3, Path("x"))),
        (("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"), ("ngram", 3, None)),
        (
            ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "head",
             "--speculative-eagle-topk", "1", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"),
            ("eagle", 3, Path("head")),
        ),
    ],
)  # fmt: skip
def test_flags_ask_for_options(flags: tuple[str, ...], wanted: tuple[str, int, Path | None]) -> None:
    found = options_of(*flags)
    assert (found.speculate, found.draft_depth, found.draft) == wanted


def test_help_says_what_an_alias_takes() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    said = parser.format_help()
    assert "--speculative-draft-model-path PATH" in said
    assert "--speculative-num-steps N" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--speculative-algorithm", "MEDUSA"), "--speculative-algorithm MEDUSA is not built in"),
        (("--speculative-algorithm", "NEXTN"), "Give --draft PATH"),
        (("--speculative-eagle-topk", "4"), "--speculative-eagle-topk 4 is not built in"),
        (("--speculative-num-steps", "many"), "is a number of tokens"),
        (("--speculative-num-steps", "16"), "--speculative-num-steps must be .* at most 15, found 16"),
        (("--speculative-num-draft-tokens", "17"), "--speculative-num-draft-tokens must be .* at most 16, found 17"),
        (("--speculative-num-draft-tokens", "1"), "--speculative-num-draft-tokens must be .* 2.*, found 1"),
        (
            ("--speculative-num-steps", "5", "--speculative-num-draft-tokens", "16"),
            r"num-steps says 5, --speculative-num-draft-tokens says 16 \(15 drafted\): these are aliases",
        ),
        (("--speculate", "ngram", "--speculative-algorithm", "EAGLE"), "Keep --speculate alone"),
        (("--speculate", "ngram", "--speculate-depth", "3", "--speculative-num-steps", "4"), "Keep --speculate-depth"),
        (("--speculate", "ngram", "--speculate", "eagle"), "--speculate is given twice, as ngram and as eagle"),
        (("--speculate", "ngram", "--speculate-depth", "3", "--speculate-depth", "5"), "twice, as 3 and as 5"),
        (("--speculative-num-steps", "5", "--speculative-num-steps", "2"), "twice, as 5 and as 2. Keep one"),
        (("--draft", "a", "--draft", "b"), "--draft is given twice"),
        (("--speculate-depth", "3"), "Give --speculate a drafter"),
        (("--draft", "head"), "or neither"),
        (("--speculate", "eagle", "--draft", ""), "--draft is the path of a folder, .* found ''"),
        (("--speculate", "eagle", "--speculative-draft-model-path", ""), "--draft is the path of a folder"),
        (("--shadow-verify", "1", "--shadow-dir", ""), "--shadow-dir is the path of a folder"),
        (
            ("--speculate", "ngram", "--decode-graph-backend", "full"),
            "--decode-graph-backend: this engine has no phase 'decode', since rows decode in rounds",
        ),
        (("--speculate", "ngram", "--graph-backend", '{"decode": "full"}'), "--graph-backend: .* Name target_verify"),
        (("--target-verify-graph-backend", "full"), "since nothing is drafted .* Name decode"),
        (("--graph-backend", '{"draft": "full"}'), "since nothing is drafted .* Name decode"),
        (("--graph-backend", '{"embed": "full"}'), "since embeddings are off. Add `embeddings`"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        options_of(*flags)


DECODING = TARGET_VERIFY.name, DRAFT_EXTEND.name, DRAFT.name


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (("--cuda-graph-max-bs", "2"), "limit", 2),
        (("--cuda-graph-bs", "1", "2"), "buckets", [1, 2]),
        (("--disable-cuda-graph-padding",), "exact", True),
        (("--disable-decode-cuda-graph",), "backend", "disabled"),
        (("--cuda-graph-config", '{"decode": {"max_bs": 2}}'), "limit", 2),
        (("--cuda-graph-config", '{"decode": "disabled"}'), "backend", "disabled"),
    ],
)
def test_names_for_decoding_are_of_all_its_phases(flags: tuple[str, ...], field: str, value: object) -> None:
    """A launch line for SGLang has them beside its drafter; none is dropped, and none is told of in vain."""
    for speculate, phases in ((("--speculate", "ngram"), DECODING), ((), (DECODE.name,))):
        asked = arguments_of(*speculate, *flags).asked
        found = {one.setting: list(one.value) if field == "buckets" else one.value for one in asked.asks}  # type: ignore[call-overload]
        assert found == {f"{phase}.{field}": value for phase in phases}
        plan = plan_for(EmulatedDevice(), asked, arguments_of(*speculate).options, on_cpu_by_default=False)
        assert all(plan[f"{phase}.{field}"].source == "asked" for phase in phases)
        (warning,) = asked.warnings
        if "config" in flags[0]:
            assert ("for decode name target_verify, draft_extend, draft" in warning) == (phases is DECODING)
        else:
            assert all(f"--{phase.replace('_', '-')}-graph-{field}" in warning for phase in phases)


@pytest.mark.parametrize(("setting", "said"), [("decode.backend", "Name target_verify"), ("embed.limit", "Add")])
def test_a_phase_that_is_not_there_is_refused_with_its_reason(setting: str, said: str) -> None:
    asked = [ask(setting, "full", origin="my code")]
    with pytest.raises(PlanError, match=f"my code: this engine has no phase .* {said}"):
        LLM(RandomCheckpoint(SHAPES["tiny"]), options=EngineOptions(speculate="ngram"), asked=asked)


# -- folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", ["eagle", "ngram+eagle", "auto"])
def test_a_model_is_no_head(speculate: SpeculateName, tmp_path: Path) -> None:
    options = EngineOptions(speculate=speculate, draft=tiny.write(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"it is no EAGLE-3 head: .* or use --speculate ngram\."):
        choose_drafter(options, RandomCheckpoint(SHAPES["tiny"]))


def test_modules_are_no_head(tmp_path: Path) -> None:
    options = EngineOptions(speculate="eagle", draft=random_modules.written(tmp_path / "modules"))
    with pytest.raises(CheckpointError, match=r"it is no EAGLE-3 head: .* or use --speculate mtp for its MTP modules"):
        choose_drafter(options, RandomCheckpoint(SHAPES["tiny"]))


def test_modules_that_do_not_fit_in_words(tmp_path: Path) -> None:
    folder = random_modules.written(tmp_path / "modules", hidden_size=32)
    with pytest.raises(CheckpointError) as caught:
        choose_drafter(EngineOptions(speculate="mtp", draft=folder), RandomCheckpoint(SHAPES["tiny"]))
    assert str(caught.value) == (
        f"the MTP modules in {folder} can't draft for this model: its hidden size is 32, and the model's is 64. "
        "Give --draft a folder that was trained for it."
    )
