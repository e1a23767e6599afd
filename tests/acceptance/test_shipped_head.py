"""The head that comes with the default model: used without being named, worth its rounds, and never seen in outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.cli.main import main
from phonograph.engine.checkpoints import default_model, open_checkpoint, shipped_head
from phonograph.errors import CheckpointError

ASKED = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "A train has 12 cars with 40 seats each, and 3 of 4 seats are taken. How many seats are free?",
    "Write a Python function that reverses a string.",
)
MOST_BYTES = 16_000_000


@pytest.fixture(scope="module", autouse=True)
def model() -> Path:
    try:
        return default_model()
    except CheckpointError as error:
        pytest.skip(str(error))


def said(sampling: SamplingParams, **options: str | int) -> tuple[LLM, list[list[int]]]:
    llm = LLM(device="cpu", options=EngineOptions(max_seqs=4, max_len=512, **options))  # type: ignore[arg-type]
    assert llm.tokenizer is not None
    template = llm.checkpoint.chat_template()
    texts = [template.render([{"role": "user", "content": text}]) for text in ASKED]
    prompts = [llm.tokenizer.encode(text, add_special=False) for text in texts]
    return llm, [list(one.tokens) for one in llm.generate(prompts, sampling)]


def test_it_comes_with_the_model_and_with_a_card(model: Path) -> None:
    head = shipped_head(open_checkpoint(model))
    assert head is not None
    assert "tokens a round" in (head / "README.md").read_text().lower()
    assert sum(path.stat().st_size for path in head.iterdir()) <= MOST_BYTES


def test_outputs_are_the_model_s_own_in_fewer_passes() -> None:
    sampling = SamplingParams(max_tokens=48, temperature=0.0)
    llm, found = said(sampling, speculate="eagle", speculate_depth=4)
    _, wanted = said(sampling)
    assert found == wanted
    assert llm.core.speculation is not None
    assert llm.core.speculation.counts.tokens_per_round > 1.7


def test_drawn_outputs_are_the_model_s_own() -> None:
    sampling = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.1)
    _, found = said(sampling, speculate="eagle")
    _, wanted = said(sampling)
    assert found == wanted


def test_it_is_named_where_one_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--speculate", "auto", "--max-len", "256"]) == 0
    assert "a head comes with this model" in capsys.readouterr().out
