"""Training of a head in small: what training computes is what the engine drafts, and it gets better at it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import train_eagle
from eagle_text import Prompt, Text, written
from eagle_training import Batch, Head, Recipe, draft_vocabulary, rounds_of
from train_eagle import Training, batched, computed, epochs, measured

from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES

pytestmark = pytest.mark.slow

CONFIG = SHAPES["tiny"]
NEW_TOKENS = 24
RECIPE = Recipe(depth=3, draft_vocab=200, steps=60, batch_tokens=600, rate=1e-2)
PROMPTS = [tuple(range(start, start + 3 + start % 9)) for start in range(3, 203, 5)]


@dataclass(frozen=True)
class Sharp(RandomCheckpoint):
    """Random weights whose logits differ, so that there is something to foretell."""

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors(device):
            yield name, tensor * 30 if name == "lm_head.weight" else tensor


def llm_of(**changes: Any) -> LLM:
    options = EngineOptions(
        max_seqs=8, max_tokens=128, max_len=64, page_size=8, dtype=torch.float32, prefix_cache=False, **changes
    )
    return LLM(Sharp(CONFIG), device="cpu", options=options)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return written(llm_of(), [Prompt("numbers", prompt) for prompt in PROMPTS], params)


def head_for(llm: LLM, texts: list[Text], recipe: Recipe = RECIPE) -> Head:
    ids = draft_vocabulary([text.tokens[text.first :] for text in texts], CONFIG, recipe.draft_vocab)
    return Head(drafted_for(llm.executor.model), ids, recipe, 64)


def test_a_head_is_trained_and_drafts_in_the_engine_what_it_drafted_in_training(
    texts: list[Text], tmp_path: Path
) -> None:
    llm = llm_of()
    found = computed(drafted_for(llm.executor.model), texts)
    head = head_for(llm, texts)
    head.scale_to(found[0].taps)
    before, first = measured(head, found, (3,))[3]["all"], head.loss(batched(found[:8])).item()
    training = Training(head, tmp_path / "state.pt")
    training.run(found)
    after, last = measured(head, found, (3,))[3]["all"], head.loss(batched(found[:8])).item()
    assert training.step == RECIPE.steps
    assert last < 0.8 * first
    assert after > before + 0.3
    assert head.write(tmp_path / "head") < 16 << 20
    DraftCheckpoint.open(tmp_path / "head", CONFIG)
    engine = llm_of(speculate="eagle", speculate_depth=3, draft=tmp_path / "head")
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    said = engine.generate(PROMPTS, params)
    assert [(*one.prompt, *one.tokens) for one in said] == [text.tokens for text in texts]
    assert engine.core.speculation.counts.tokens_per_round == pytest.approx(after, abs=0.02)


def test_training_goes_on_where_it_was_ended(
    texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same batches, rates and moments: the weights are those of a run that was not ended."""
    llm, recipe = llm_of(), Recipe(depth=2, draft_vocab=100, steps=8, batch_tokens=300)
    found = computed(drafted_for(llm.executor.model), texts)
    whole = Training(head_for(llm, texts, recipe), tmp_path / "whole.pt")
    assert not whole.resume()
    whole.run(found)
    cut = Training(head_for(llm, texts, recipe), tmp_path / "cut.pt")
    loss, calls = cut.head.loss, itertools.count(1)

    def ended(batch: Batch) -> torch.Tensor:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return loss(batch)

    monkeypatch.setattr(cut.head, "loss", ended)
    monkeypatch.setattr(train_eagle, "SAVED_EVERY", 0.0)
    with pytest.raises(KeyboardInterrupt):
        cut.run(found)
    resumed = Training(head_for(llm, texts, recipe), tmp_path / "cut.pt")
    assert resumed.resume()
    assert resumed.step == 4
    resumed.run(found)
    for name, weight in whole.head.weights.items():
        torch.testing.assert_close(resumed.head.weights[name], weight)


def test_shallower_drafts_are_the_beginnings_of_deeper_ones(texts: list[Text]) -> None:
    llm = llm_of()
    found, head = computed(drafted_for(llm.executor.model), texts[:9]), head_for(llm, texts)
    head.scale_to(found[0].taps)
    every = measured(head, found, (1, 2, 3))
    assert list(every) == [1, 2, 3]
    for depth in (1, 2, 3):
        assert measured(head, found, (depth,))[depth] == every[depth]
        rounds, tokens = 0, 0
        for one in found:  # by itself, so that padding can have no part in it
            taken = rounds_of(head.right(batched([one]), depth)[0].tolist(), one.text.first, len(one.tokens))
            rounds, tokens = rounds + taken[0], tokens + taken[1]
        assert every[depth]["all"] == round(tokens / rounds, 3)


def test_batches_go_on_after_those_that_were_taken(texts: list[Text]) -> None:
    found = computed(drafted_for(llm_of().executor.model), texts)
    whole, later = epochs(found, 300, 5), epochs(found, 300, 5, skip=7)
    for _ in range(7):
        next(whole)
    for _ in range(9):
        assert [id(one) for one in next(whole)] == [id(one) for one in next(later)]


def test_the_target_s_states_are_those_of_texts_alone(texts: list[Text]) -> None:
    model = drafted_for(llm_of().executor.model)
    together = computed(model, texts[:5])
    for one, text in zip(together, texts, strict=False):
        [alone] = computed(model, [text])
        torch.testing.assert_close(one.taps, alone.taps)
        assert torch.equal(one.best, alone.best)
        assert one.best[text.first - 1 : -1].tolist() == list(text.tokens[text.first :]), "greedy text"


@pytest.mark.parametrize(
    ("right", "wanted"),
    [
        ([[False, False]] * 9, (5, 5)),
        ([[True, True]] * 9, (2, 5)),
        ([[True, False]] * 9, (3, 5)),
        ([[False, True]] * 9, (5, 5)),
        ([], (0, 0)),
    ],
)
def test_rounds(right: list[list[bool]], wanted: tuple[int, int]) -> None:
    """Of nine tokens three are the prompt, and the first output needs no round."""
    assert rounds_of(right, 3, len(right)) == wanted


def test_the_draft_vocabulary_is_by_frequency() -> None:
    found = draft_vocabulary([[5, 5, 5, 9], [9, 7, 7, 7, 7]], CONFIG, 3)
    assert found.tolist() == [2, 5, 7], "what ends texts is always in it"
