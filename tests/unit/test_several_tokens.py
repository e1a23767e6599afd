"""Rows that get several tokens in a step, or none: on the way to the host, at commit, and as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph import EmulatedDevice
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.passes.readback import Picked, Readback
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import NO_TOKEN, NOT_FINITE, Sampled, ScheduledStep
from phonograph.engine.sampling.sampler import TopLogprobs
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.text import StopStrings, TextReader
from phonograph.errors import PhonographError, PlanError

WIDTH = 4


def limits(**changes: Any) -> Limits:
    usual: dict[str, Any] = {"max_seqs": 2, "max_tokens": 32, "max_len": 64, "page_size": 4, "num_pages": 33}
    return Limits(**{**usual, "reserve_tokens": 0, "max_ahead": 1, "tokens_per_row": WIDTH, **changes})


def decoding(scheduler: Scheduler, num_prompt: int = 5, **params: Any) -> tuple[Sequence, ScheduledStep]:
    """A sequence whose first token is 50, and its first decode, launched."""
    (sequence,) = scheduler.add(Request("a", tuple(range(num_prompt)), SamplingParams(**params)))
    first = scheduler.schedule()
    assert first is not None
    scheduler.commit(first, Sampled([50]))
    step = scheduler.schedule()
    assert step is not None
    return sequence, step


# -- readback -------------------------------------------------------------------------------------------------


def test_a_block_comes_back_as_tokens_and_counts() -> None:
    readback = Readback(EmulatedDevice(), 12, depth=1)
    none = NO_TOKEN
    block = torch.tensor([[1, 2, 3, 4], [none] * 4, [5, none, none, none], [6, NOT_FINITE, none, none]])
    found = readback.start(Picked(block[:3])).wait()
    assert (found.tokens, found.counts, found.logprobs) == ([1, 2, 3, 4, 5], [4, 0, 1], None)
    found = readback.start(Picked(block[1:])).wait()
    assert (found.tokens, found.counts) == ([5, 6, NOT_FINITE], [0, 1, 2])
    plain = readback.start(Picked(block[0])).wait()
    assert (plain.tokens, plain.counts) == ([1, 2, 3, 4], None)


def test_logprobs_follow_their_tokens() -> None:
    readback = Readback(EmulatedDevice(), 4, depth=1)
    block = torch.tensor([[1, NO_TOKEN], [2, 3]])
    own = torch.tensor([0.5, 9.0, 1.5, 2.5])
    top = TopLogprobs(own, torch.arange(4)[:, None].repeat(1, 20), own[:, None].repeat(1, 20))
    found = readback.start(Picked(block, top)).wait()
    assert found.logprobs is not None
    assert [one[0] for one in found.logprobs] == [0.5, 1.5, 2.5]
    assert [one[1][0] for one in found.logprobs] == [0, 2, 3]


# -- commit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(WIDTH + 1))
def test_commit_gives_back_what_was_not_accepted(count: int) -> None:
    scheduler = Scheduler(limits())
    sequence, step = decoding(scheduler, max_tokens=20)
    assert (step.num_tokens, sequence.num_computed, sequence.num_launched_outputs) == (WIDTH, 5 + WIDTH, 1)
    tokens = list(range(60, 60 + count))
    updates = scheduler.commit(step, Sampled(tokens, [count]))
    assert updates == ([(sequence, tuple(tokens), None)] if count else [])
    assert (sequence.num_computed, sequence.num_launched_outputs) == (5 + count, 1 + count)
    assert sequence.outputs == [50, *tokens]


@pytest.mark.parametrize("offset", range(WIDTH))
def test_an_end_cuts_inside_a_row_s_tokens(offset: int) -> None:
    for params, reason in (
        ({"max_tokens": 20, "stop_token_ids": (60 + offset,)}, FinishReason.STOP),
        ({"max_tokens": 2 + offset}, FinishReason.LENGTH),
    ):
        scheduler = Scheduler(limits())
        sequence, step = decoding(scheduler, **params)
        updates = scheduler.commit(step, Sampled([60, 61, 62, 63], [WIDTH]))
        assert updates == [(sequence, tuple(range(60, 61 + offset)), reason)]
        assert scheduler.counts.generated_tokens == 2 + offset
        assert scheduler.is_idle
        scheduler.integrity()


def test_what_comes_before_a_problem_is_told() -> None:
    scheduler = Scheduler(limits())
    sequence, step = decoding(scheduler, max_tokens=20)
    updates = scheduler.commit(step, Sampled([60, NOT_FINITE], [2]))
    assert updates == [(sequence, (60,), None), (sequence, (), FinishReason.ERROR)]
    assert "position 7" in sequence.error


def test_counts_that_can_t_be_are_refused() -> None:
    scheduler = Scheduler(limits())
    _, step = decoding(scheduler, max_tokens=20)
    for tokens, counts in (([1] * 5, [5]), ([], [-1]), ([1], [1, 0]), ([1], [2])):
        with pytest.raises(PhonographError, match="committing step 2: found"):
            scheduler.commit(step, Sampled(tokens, counts))
    with pytest.raises(PlanError, match="4 tokens of every sequence"):
        limits(max_tokens=7)


def test_nobody_is_preempted_for_an_upper_bound() -> None:
    scheduler = Scheduler(limits(num_pages=5, max_ahead=2), prefix_cache=False)
    for name in "ab":
        scheduler.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=12)))
    prompts, decodes = scheduler.schedule(), scheduler.schedule()
    assert prompts is not None
    assert decodes is not None
    assert scheduler.schedule() is None, "with all of their tokens accepted, both need a page that is not there"
    scheduler.commit(prompts, Sampled([50, 50]))
    assert scheduler.schedule() is None
    scheduler.commit(decodes, Sampled([60, 60], [1, 1]))
    again = scheduler.schedule()
    assert again is not None
    assert again.decodes == decodes.decodes, "with one accepted, there is room"
    assert scheduler.counts.preemptions == 0


# -- text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", range(WIDTH))
def test_a_reader_says_how_many_tokens_it_took(offset: int) -> None:
    tokenizer = open_checkpoint(None).tokenizer()
    tokens = [tokenizer.encode(letter, add_special=False)[0] for letter in "wxyz"]
    reader = TextReader(tokenizer, StopStrings(["wxyz"[offset]]))
    assert reader.take(tokens, is_last=True) == ("wxyz"[:offset], [1] * (offset + 1), True)
    plain = TextReader(tokenizer, StopStrings(["?"]))
    assert plain.take(tokens, is_last=False) == ("wxyz", [1] * 4, False)
