"""Adaptive width: rounds where they pay, plain steps where they don't, and little lost in finding out."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.step_width import WhereDrafted, WherePaid

LIMITS = Limits(max_seqs=64, max_tokens=512, max_len=4096, page_size=16, num_pages=999, tokens_per_row=4)
SIZES = (1, 4, 16, 64)


def rows(count: int, speculate: bool | None = None) -> tuple[Sequence, ...]:
    request = Request("a", (1,), SamplingParams(max_tokens=9, speculate=speculate))
    return tuple(Sequence(request, index, 9, frozenset(), rank=(1, 0, 0.0, index)) for index in range(count))


def simulated(policy: WherePaid, ratio: float, num_rows: int, steps: int, brings: Callable[[int], int]) -> float:
    """Plain tokens in the time that it took, over the tokens that came: 1 is as fast as plain decoding."""
    decodes, seconds, tokens, since_plain = rows(num_rows), 0.0, 0, 0
    for number in range(steps):
        width = policy.of(decodes)
        # After a plain step, the drafts are old ones.
        since_plain = 0 if width == 1 else since_plain + 1
        count = 1 if since_plain <= 1 else brings(number)
        seconds += 1.0 if width == 1 else ratio
        tokens += count
        step = ScheduledStep(number, decodes, (), (), width, pass_name="x")
        policy.took(step, [(sequence, (5,) * count, None) for sequence in decodes])
    return seconds / tokens


@settings(deadline=None, max_examples=40)
@given(st.floats(1.0, 3.5), st.sampled_from(SIZES))
def test_a_drafter_that_is_always_wrong_costs_two_percent_at_most(ratio: float, num_rows: int) -> None:
    policy = WherePaid(LIMITS, StepCosts(SIZES, (ratio,) * 4))
    assert simulated(policy, ratio, num_rows, 512, lambda number: 1) <= 1.02
    assert simulated(policy, ratio, num_rows, 2000, lambda number: 1) <= 1.01, "later sequences know it already"


@settings(deadline=None, max_examples=40)
@given(st.floats(1.05, 2.4), st.integers(0, 99))
def test_a_good_drafter_is_used(ratio: float, seed: int) -> None:
    numbers = random.Random(seed)
    policy = WherePaid(LIMITS, StepCosts(SIZES, (ratio,) * 4))
    found = simulated(policy, ratio, 4, 3000, lambda number: numbers.choice((2, 3, 4)))
    assert found <= ratio / 3 * 1.1


def test_it_comes_back_when_drafts_are_good_again() -> None:
    policy = WherePaid(LIMITS, StepCosts(SIZES, (1.5,) * 4))
    assert simulated(policy, 1.5, 4, 1000, lambda number: 1) < 1.02
    assert simulated(policy, 1.5, 4, 3000, lambda number: 3) < 0.6


def test_the_batch_decides() -> None:
    """Rounds pay for few rows and not for many; there and back."""
    policy = WherePaid(LIMITS, StepCosts(SIZES, (1.1, 1.3, 2.0, 3.5)))
    few, many = rows(2), rows(60)
    for _ in range(3):
        assert simulated(policy, 1.3, 2, 300, lambda number: 2) < 0.8
        assert simulated(policy, 3.5, 60, 3000, lambda number: 2) < 1.03
    assert policy.of(few) == 4
    assert policy.of(many) == 1


def test_costs_are_those_of_the_next_size() -> None:
    costs = StepCosts(SIZES, (1.1, 1.3, 2.0, 3.5))
    assert [costs.ratio(count) for count in (1, 2, 4, 5, 16, 17, 64, 99)] == [1.1, 1.3, 1.3, 2.0, 2.0, 3.5, 3.5, 3.5]


def test_of_many_costs_some_are_told() -> None:
    sizes = (1, 2, 4, 8, 12, 16, 24, 32, 40)
    told = "1.00× at 1, 1.00× at 2, 1.00× at 4, 1.00× at 8, 1.00× at 16, 1.00× at 32, 1.00× at 40"
    assert str(StepCosts(sizes, (1.0,) * len(sizes))) == told


def test_rows_that_take_no_drafts() -> None:
    for policy in (WhereDrafted(LIMITS), WherePaid(LIMITS, StepCosts(SIZES, (1.0,) * 4))):
        assert policy.of(rows(3, speculate=False)) == 1
        assert policy.of((*rows(3, speculate=False), *rows(1))) == 4
        assert policy.of(()) == 4


def ended(policy: WherePaid, right: Callable[[int], int], max_outputs: int, answers: int) -> int:
    """How many of the steps of answers of so many tokens were rounds; `right` drafts of each are right."""
    decodes, number, rounds = rows(1), 0, 0
    for _ in range(answers):
        left = max_outputs - 1
        while left:
            number, width = number + 1, policy.of(decodes)
            rounds += width > 1
            count = min(left, 1 + right(number) if width > 1 else 1)
            left -= count
            step = ScheduledStep(number, decodes, (), (), width, pass_name="x")
            finish = None if left else FinishReason.LENGTH
            policy.took(step, [(sequence, (5,) * count, finish) for sequence in decodes])
    return rounds


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 20), st.integers(0, 99))
def test_short_answers_don_t_make_drafts_look_bad(max_outputs: int, seed: int) -> None:
    """Nine in ten rounds have all drafts right: a round that is cut off counts, or only the others would."""
    numbers = random.Random(seed)
    policy = WherePaid(LIMITS, StepCosts(SIZES, (1.4,) * 4))
    ended(policy, lambda number: 3 if numbers.random() < 0.9 else 0, max_outputs, 300)
    assert policy.of(rows(1)) == 4


@settings(deadline=None, max_examples=20)
@given(st.integers(3, 20))
def test_short_answers_don_t_hide_bad_drafts(max_outputs: int) -> None:
    policy = WherePaid(LIMITS, StepCosts(SIZES, (1.4,) * 4))
    ended(policy, lambda number: 0, max_outputs, 100)
    assert ended(policy, lambda number: 0, max_outputs, 100) <= 0.03 * 100 * (max_outputs - 1)
