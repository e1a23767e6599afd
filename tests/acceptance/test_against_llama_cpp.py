"""The default model in our engine against what llama.cpp computed on it; `bench/llama_reference.py` made the file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from agreement import NEAR_TIE, Reference, largest_difference, same_picks
from engine_logits import sequence_logits

from phonograph import CheckpointError
from phonograph.engine.checkpoints import default_model
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text import Tokenizer

pytestmark = pytest.mark.slow

REFERENCE = Reference.read(Path(__file__).parent.parent / "data" / "llama_cpp_smollm2.json")
TOLERANCE = 1e-3
CLOSE_CALL = 0.5
"""A margin that the rounding of activations does not overcome; it moves a logit by 0.2, as a root mean square."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    options = EngineOptions(max_seqs=len(REFERENCE.answers), max_len=1024, dtype=torch.float32, attention="reference")
    return LLM(device="cpu", options=options)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


@pytest.fixture(scope="module")
def window_logits(llm: LLM) -> list[torch.Tensor]:
    """Ours, of every window of the text: [num_tokens, vocab]."""
    return [sequence_logits(llm, window.ids) for window in REFERENCE.windows]


def test_the_file_is_about_this_model() -> None:
    with default_model().open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == REFERENCE.made["model"]["sha256"]


def test_both_cut_text_into_the_same_tokens(tokenizer: Tokenizer) -> None:
    for answer in REFERENCE.answers:
        assert tokenizer.encode(answer.prompt) == answer.prompt_ids
    text = tokenizer.decode(REFERENCE.text_ids)
    assert hashlib.sha256(text.encode()).hexdigest() == REFERENCE.text_sha256
    assert tokenizer.encode(text) == REFERENCE.text_ids


def test_logits_of_answers_are_near(llm: LLM) -> None:
    for answer in REFERENCE.answers:
        assert largest_difference(sequence_logits(llm, answer.sequence), answer.glimpses) <= TOLERANCE, answer.prompt
    for answer in REFERENCE.answers[:4]:
        ours = sequence_logits(llm, answer.sequence, as_decodes=True)
        assert largest_difference(ours, answer.glimpses) <= TOLERANCE, answer.prompt


def test_greedy_answers_are_identical_wherever_the_margin_allows(llm: LLM) -> None:
    count = len(REFERENCE.answers[0].picks.ids)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    completions = llm.generate([answer.prompt for answer in REFERENCE.answers], params)
    compared = 0
    for answer, done in zip(REFERENCE.answers, completions, strict=True):
        index = answer.first_difference(done.tokens)
        if index is None:
            assert done.text == answer.text
        else:
            assert answer.picks.margins[index] < NEAR_TIE, f"{done.text!r} became another text than {answer.text!r}"
        compared += count if index is None else index
    assert len(REFERENCE.answers) >= 10
    assert count >= 48
    assert compared >= 0.95 * count * len(REFERENCE.answers)


def test_logits_of_a_text_are_near(window_logits: list[torch.Tensor]) -> None:
    for ours, window in zip(window_logits, REFERENCE.windows, strict=True):
        assert largest_difference(ours, window.glimpses) <= TOLERANCE
        sure = torch.tensor(window.f32.margins) > NEAR_TIE
        assert same_picks(ours, window.f32)[sure].all()


def test_the_quantised_file_picks_our_tokens_as_often_as_those_of_its_own_float32(
    window_logits: list[torch.Tensor],
) -> None:
    """There llama.cpp rounds activations to 8 bits, and close calls fall either way: 3 % of the tokens of a text."""
    windows = REFERENCE.windows
    ours = torch.cat([same_picks(logits, w.q4_1) for logits, w in zip(window_logits, windows, strict=True)])
    theirs = torch.cat([torch.tensor(w.f32.ids) == torch.tensor(w.q4_1.ids) for w in windows])
    near_ties = torch.cat([torch.tensor(w.f32.margins) < NEAR_TIE for w in windows])
    margins = torch.cat([torch.tensor(w.q4_1.margins) for w in windows])
    assert len(ours) >= 1000
    assert int(ours.sum()) >= int(theirs.sum()) - int(near_ties.sum())
    assert ours[margins > CLOSE_CALL].all()
