"""Properties of speculation: any accept pattern leaves everything as if the tokens had come one by one."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_head import write_random_head

from phonograph import SamplingParams
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.draft_head import DraftHead
from phonograph.engine.ops.layers.rounds import continued
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.passes.ngram_eagle import ngram_eagle
from phonograph.engine.requests.limits import half_width
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.sampling.penalties import count_tokens, with_said
from speculation import MAX_LEN, Driver, Switching, check, oracle, plain, plain_llm, speculating

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3, ignore_eos=True),
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=3),
    SamplingParams(temperature=0.7, seed=8, presence_penalty=1.0, logit_bias={7: 2.0}, logprobs=1, ignore_eos=True),
)
PROMPTS = ((5, 9, 200, 3), (7,), tuple(range(20, 61)), (11,) * 9, tuple(range(20, 37)), (1, 2, 1, 2, 1))

requests = st.tuples(
    st.sampled_from(PROMPTS),
    st.builds(
        lambda params, most, depth: replace(params, max_tokens=most, speculate=depth),
        st.sampled_from(PARAMS),
        st.sampled_from((1, 2, 5, 16, 24)),
        st.sampled_from((None, None, None, False, 1, 2)),
    ),
)


@cache
def random_head() -> DraftHead:
    with tempfile.TemporaryDirectory() as folder:
        write_random_head(Path(folder), SHAPES["tiny"], 100, torch.float32)
        checkpoint = DraftCheckpoint.open(Path(folder), SHAPES["tiny"])
        return checkpoint.load(drafted_for(plain_llm().executor.model), MAX_LEN + 16)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_output_is_that_of_plain_decoding(data: st.DataObject) -> None:
    """In the first turn and in the second; with requests given up in mid-round, scarce pages, and any drafts."""
    depth, spoiled = data.draw(st.integers(1, 7), "depth"), data.draw(st.sampled_from((0, 10, 40, 100)), "spoiled")
    drafter = data.draw(st.sampled_from(("oracle", "ngram", "ngram+eagle")), "drafter")
    made = {"oracle": lambda: oracle(depth, spoiled), "ngram": lambda: ngram(depth)}
    drafting = made.get(drafter, lambda: ngram_eagle(random_head(), depth))()
    page_size = data.draw(st.sampled_from((4, 8)), "page size")
    core = speculating(
        drafting,
        "disabled",
        mixed=data.draw(st.booleans(), "mixed"),
        max_ahead=data.draw(st.integers(0, 3), "ahead"),
        page_size=page_size,
        num_pages=data.draw(st.sampled_from((96 // page_size + 2, 120)), "pages"),
        reserve_tokens=data.draw(st.sampled_from((0, 64)), "reserve"),
        narrows=True,
    )
    if data.draw(st.booleans(), "switches"):
        widths = data.draw(st.lists(st.sampled_from((1, half_width(depth + 1), depth + 1)), min_size=1, max_size=7))
        core.scheduler.width = Switching(widths, every=1)
    many = data.draw(st.lists(requests, min_size=1, max_size=7), "requests")
    gone = data.draw(st.dictionaries(st.integers(1, 40), st.integers(0, 6), max_size=2), "cancelled")

    def act(moment: int, sequences: list[Sequence]) -> None:
        if gone.get(moment, 99) < len(sequences):
            core.cancel(sequences[gone[moment]].request.id)

    driver = Driver(core, every=data.draw(st.integers(1, 4), "every"))
    found = driver.run(many, act)
    for sequence in found:
        if sequence.finish is FinishReason.CANCELLED:
            wanted = plain(sequence.request.prompt, sequence.request.params).tokens
            assert tuple(sequence.outputs) == wanted[: len(sequence.outputs)]
    check([sequence for sequence in found if sequence.finish is not FinishReason.CANCELLED])
    turns = [((*one.request.prompt, *one.outputs), replace(one.request.params, max_tokens=5)) for one in found]
    check(driver.run([turn for turn in turns if len(turn[0]) < 90]))


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4), st.integers(0, 32767))
def test_counts_along_a_path_are_those_of_tokens_one_by_one(said: list[list[int]], before: int) -> None:
    width = max(map(len, said))
    counts = torch.full((len(said) + 1, 6), before, dtype=torch.int16)
    path = torch.full((len(said), width), -3)
    for row, tokens in zip(path, said, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    found = with_said(counts[1:].clone(), path)
    for number, tokens in enumerate(said, 1):
        for token in tokens:
            count_tokens(counts, torch.tensor([number]), torch.tensor([token]))
    assert torch.equal(found, counts[1:])


def by_hand(tokens: list[int], depth: int) -> list[int]:
    """The longest of 3- and 2-token suffixes, its latest place; what follows, round and round."""
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                since = tokens[end:]
                return [since[place % len(since)] for place in range(depth)]
    return [-1] * depth


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=5), st.integers(1, 7))
def test_ngrams_are_those_found_by_hand(many: list[list[int]], depth: int) -> None:
    history: Any = torch.full((len(many), 24), 3)
    for row, tokens in zip(history, many, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    lasts = torch.tensor([len(tokens) - 1 for tokens in many])
    assert continued(history, lasts, depth).tolist() == [by_hand(tokens, depth) for tokens in many]
