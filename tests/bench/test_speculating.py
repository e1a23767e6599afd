"""The measurement of speculation in small, and acceptance at set rates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_head import write_random_head
from speculating import measure
from speculating_plot import draw
from speculating_setting import TINY
from synthetic_acceptance import AtRate, Never, accepting, expected, rates_of

from phonograph import SamplingParams, open_device
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.layers.rounds import ReferenceRounds
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.ngram import ngram
from speculation import Driver, check, speculating

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(("rate", "depth"), [(0.8, 4), (0.7, 3), (0.5, 2), (0.0, 3), (1.0, 3)])
def test_drafts_are_accepted_at_the_rate(rate: float, depth: int) -> None:
    """Whatever the model picks: over rows and positions, each place has the rate of those that reached it."""
    num_rows, width, rounds = 200, depth + 1, 50
    rows = torch.arange(1, num_rows + 1)
    table, many = torch.zeros((num_rows + 1, 4), dtype=torch.int32), torch.full((num_rows + 1,), 1 << 30)
    counts = []
    for number in range(rounds):
        starts = torch.full_like(rows, 40 + number * width)
        positions = (starts[:, None] + torch.arange(width)).flatten()
        queries = Queries(rows.repeat_interleave(width), positions, table, tokens_per_row=width)
        tokens, picked = torch.randint(0, 256, (num_rows * width,)), torch.randint(0, 256, (num_rows, width))
        state = torch.zeros(num_rows + 1, dtype=torch.int64), torch.zeros(num_rows + 1, dtype=torch.int64)
        taken = AtRate(ReferenceRounds(), rate).accept(queries, tokens, picked, (many, many), *state)
        counts.append(taken.counts)
    found = torch.stack(counts)
    assert found.float().mean().item() == pytest.approx(expected(rate, depth), abs=0.06)
    accepted = [int((found > place + 1).sum()) for place in range(depth)]
    for one, reached in zip(rates_of(accepted, found.numel()), [found.numel(), *accepted], strict=False):
        assert one == pytest.approx(rate, abs=0.03) or not reached


def test_kernels_are_put_back() -> None:
    before = ReferenceKernels.rounds
    with accepting(0.5):
        assert isinstance(ReferenceKernels.rounds, AtRate)
        with accepting(None):
            assert isinstance(ReferenceKernels.rounds, Never)
    assert ReferenceKernels.rounds is before


@pytest.mark.slow
def test_where_no_draft_is_ever_accepted_the_output_is_the_model_s() -> None:
    with accepting(None):
        core = speculating(ngram(3), "disabled")
        check(Driver(core).run([(prompt, GREEDY) for prompt in ((1, 2, 1, 2, 1), (11,) * 9, (5, 9, 200, 3))]))
    assert core.speculation.counts.tokens == core.speculation.counts.rounds > 0


@pytest.mark.slow
def test_the_script_measures_and_draws(tmp_path: Path) -> None:
    setting = replace(TINY, batches=(1, 2), curve=(1, 2), new_tokens=12, long_tokens=12, prompts=3, requests=3)
    path, failed = measure(setting, ["same", "rounds", "costs", "curve", "wrong"], tmp_path, open_device("emulated"))
    found = json.loads(path.read_text())["figures"]
    assert failed == [name for name, part in found.items() if "failed" in part] == []
    assert {way: part["same_answers"] for way, part in found["same"]["ngram"].items()} == {
        "greedy": 1.0, "drawn": 1.0, "penalised": 1.0
    }  # fmt: skip
    assert found["rounds"]["ngram"]["all"]["tokens_a_round"] >= 1.0
    assert found["costs"]["ngram"]["2"]["round_adds_ms"] > 0
    assert found["curve"]["batches"] == [1, 2, 1]
    wrong = found["wrong"]["ngram"]
    assert list(wrong["losses"]) == ["1", "2"]
    assert all(one["least"] <= one["median"] <= one["most"] for one in wrong["rates"].values())
    assert wrong["accepted"] == 0
    draw(path, tmp_path / "plot.svg")
    assert "tokens a round" in (tmp_path / "plot.svg").read_text()


@pytest.mark.slow
def test_with_a_head_rounds_and_rates_have_all_drafters_and_the_curve_those_made_of_no_others(tmp_path: Path) -> None:
    write_random_head(tmp_path / "head", TINY.shape.config, TINY.draft_vocab, TINY.dtype)
    setting = replace(TINY, batches=(1, 2), curve=(1, 2), new_tokens=8, prompts=3, head=tmp_path / "head")
    path, _ = measure(setting, ["rounds", "rates", "curve"], tmp_path, open_device("emulated"))
    found = json.loads(path.read_text())["figures"]
    assert list(found["rounds"]) == ["ngram", "eagle", "ngram+eagle"]
    assert [len(part["all"]["accepted_by_place"]) for part in found["rounds"].values()] == [TINY.depth] * 3
    alone, both = found["rounds"]["ngram"]["all"], found["rounds"]["ngram+eagle"]["all"]
    assert alone["rounds_without_drafts"] > both["rounds_without_drafts"] == 0
    assert both["tokens_a_round_with_or_without_drafts"] == both["tokens_a_round"]
    assert alone["tokens_a_round_with_or_without_drafts"] <= alone["tokens_a_round"]
    assert list(found["rates"]) == ["plain", "ngram always", "eagle always", "ngram+eagle always"]
    assert list(found["curve"]["tokens_per_s"]) == ["plain", "ngram", "eagle"]
    draw(path, tmp_path / "plot.svg")
    assert "ngram+eagle always" in (tmp_path / "plot.svg").read_text()


def test_parts_that_fail_are_told(tmp_path: Path) -> None:
    """Those that need prompts, where the folder for these is empty."""
    setting = replace(TINY, model=None, data=tmp_path, batches=(1,), max_len=64, dtype=torch.float32)
    path, failed = measure(setting, ["rounds"], tmp_path, open_device("cpu"))
    assert failed == ["rounds"]
    assert (
        "expected a *.jsonl file with `test` in its name" in json.loads(path.read_text())["figures"]["rounds"]["failed"]
    )
