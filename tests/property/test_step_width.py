"""Adaptive width: rounds as wide as they pay, plain steps where they don't, and little lost in finding out."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.engine.requests.limits import Limits, half_width
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Chunk, Sampled, ScheduledStep, Update
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.acceptance import Acceptance
from phonograph.engine.scheduling.probes import Probes
from phonograph.engine.scheduling.step_width import Planned, StepWidth, WhereDrafted, WherePaid

SIZES = (1, 4, 16, 64)
MANY = 10**6
"""Outputs that a sequence may have, where its end does not matter."""
Accepts = Callable[[int], int]
"""How many drafts of a row in a step of this number would be accepted, were there any number of them."""


def limits(width: int = 4) -> Limits:
    return Limits(max_seqs=64, max_tokens=64 * width, max_len=4096, page_size=16, num_pages=999, tokens_per_row=width)


def rows(count: int, speculate: bool | int | None = None, most: int = MANY) -> tuple[Sequence, ...]:
    request = Request("a", (1,), SamplingParams(max_tokens=9, speculate=speculate))
    return tuple(Sequence(request, index, most, frozenset(), rank=(1, 0, 0.0, index)) for index in range(count))


def linear(ratio: float, width: int = 4, *, halves: bool = True) -> StepCosts:
    """A round of all drafts costs so much, each of them the same."""
    half, ratios = half_width(width), {width: (ratio,) * 4}
    if halves and half > 1:
        ratios[half] = (1 + (ratio - 1) * (half - 1) / (width - 1),) * 4
    return StepCosts(SIZES, ratios, (CATCHING_UP * (ratio - 1),) * 4)


CATCHING_UP = 0.5
"""What the drafter does before the first round after plain steps, of what a round costs more."""


_A_PROMPT = (Chunk(rows(1)[0], 0, (1,), samples=True, enters=True),)


class Simulation:
    """An engine whose commits lag its launches by so many steps."""

    def __init__(self, policy: StepWidth, costs: StepCosts, lag: int = 1, num_rows: int = 4) -> None:
        self.policy, self.costs, self.lag, self.decodes = policy, costs, lag, rows(num_rows)
        self.widths: Counter[int] = Counter()
        """Of steps without prompts."""
        self.among: Counter[int] = Counter()
        """Of those with some."""
        self.probes = self.width = 0
        """How many there were; the width of the step that is launched."""
        self._depth = max(costs.widths) - 1
        self._probes = Probes(self._depth)
        self._in_flight: deque[tuple[ScheduledStep, list[int], Sampled]] = deque()
        self._drafted, self._last = 99, 99

    def run(
        self,
        steps: int,
        accepts: Accepts,
        has_prompts: Callable[[int], bool] = lambda number: False,
        decodes: Callable[[int], tuple[Sequence, ...]] | None = None,
    ) -> float:
        """The time of plain decoding in which as many tokens come, over which the time that it took: 1 is as fast. What
        prompts take themselves is left out. Every step counts alike, however many rows it has."""
        seconds = tokens = 0.0
        for number in range(steps):
            self.decodes = self.decodes if decodes is None else decodes(number)
            among = has_prompts(number)
            width, probes = self.policy.of(self.decodes, _A_PROMPT * among)
            self.width = width
            assert not (probes and width > 1)
            (self.among if among else self.widths)[width] += 1
            self.probes += probes
            # Drafts are made by the step before, for as many places as that one has; after a plain one, all anew.
            catches_up = self._last == 1 and (width > 1 or probes)
            drafted = 99 if catches_up else self._drafted
            right = [accepts(number) for _ in self.decodes]
            most = [one.draft_depth(self._depth) for one in self.decodes]
            counts = [1 + min(width - 1, drafted, *one) for one in zip(right, most, strict=True)]
            self._drafted, self._last = width - 1, width
            ratio = self.costs.ratio_among_prompts if among else self.costs.ratio
            seconds += ratio(len(self.decodes), width)
            seconds += self.costs.to_catch_up(len(self.decodes)) if catches_up else 0.0
            seconds += LAUNCHED if probes else 0.0
            tokens += sum(counts) / len(counts)
            prefills = (CHUNK,) if among else ()
            step = ScheduledStep(
                number, self.decodes, prefills, (), width, pass_name="x", catches_up=catches_up, probes=probes
            )
            self._in_flight.append((step, counts, self._sampled(step, right)))
            while len(self._in_flight) > self.lag:
                self._commit(*self._in_flight.popleft())
        return seconds / tokens

    def _sampled(self, step: ScheduledStep, right: list[int]) -> Sampled:
        """All tokens are alike; those of a step are taken from its counts, so only its drafts are told."""
        if not step.probes:
            return Sampled([])
        places = np.arange(self._depth)[None]
        return Sampled([], probed=np.where(places < np.array(right)[:, None], TOKEN, TOKEN + 1))

    def _commit(self, step: ScheduledStep, counts: list[int], sampled: Sampled) -> None:
        updates: list[Update] = []
        for sequence, count in zip(step.decodes, counts, strict=True):
            sequence.outputs.extend((TOKEN,) * count)
            updates.append((sequence, (TOKEN,) * count, None))
        self.policy.took(step, updates, list(self._probes.took(step, updates, sampled)))


CHUNK = Chunk.of(rows(1)[0], 0, 1, samples=True, enters=True)
"""Of a prompt that is nobody's here."""
TOKEN = 5
LAUNCHED = 0.1
"""What a probe takes, in plain steps, besides what the drafter does."""


def simulated(costs: StepCosts, lag: int = 1, num_rows: int = 4) -> Simulation:
    return Simulation(WherePaid(limits(max(costs.widths)), costs), costs, lag, num_rows)


def never(number: int) -> int:
    return 0


def always(number: int) -> int:
    return 99


PROBED = {1: 1.007, 4: 1.0065, 16: 1.006, 64: 1.006}
"""What probes may cost of 512 steps, by rows: the rest of two percent is for what plain steps leave to the drafter."""


@settings(deadline=None, max_examples=150)
@given(
    st.floats(1.0, 8.0), st.sampled_from((2, 3, 4, 6, 9, 16)), st.integers(0, 3), st.sampled_from(SIZES), st.booleans()
)
def test_a_drafter_that_is_always_wrong_costs_little(
    ratio: float, width: int, lag: int, num_rows: int, halves: bool
) -> None:
    """Drafts are compared with what comes, so that no round is run for them."""
    found = simulated(linear(ratio, width, halves=halves), lag, num_rows)
    most = PROBED[num_rows] if found.costs.to_catch_up(num_rows) <= 1.4 else PROBED[1]
    assert found.run(512, never) <= most
    assert found.run(512, never) <= most, "probes of any later sequence"
    assert found.run(2000, never) <= 1.005, "later sequences know it already"
    assert set(found.widths) == {1}


def test_a_width_that_can_never_pay_is_not_tried() -> None:
    found = simulated(linear(4.5, 4, halves=False))
    assert found.run(600, always) == 1.0
    assert set(found.widths) == {1}
    assert not found.probes


@settings(deadline=None, max_examples=40)
@given(st.floats(1.05, 2.4), st.integers(0, 99), st.integers(0, 3))
def test_a_good_drafter_is_used(ratio: float, seed: int, lag: int) -> None:
    numbers = random.Random(seed)
    found = simulated(linear(ratio), lag).run(3000, lambda number: numbers.choice((1, 2, 3)))
    assert found <= ratio / 3 * 1.1


def chance(share: float, seed: int = 0) -> Accepts:
    """Each draft is right with this probability."""
    numbers = random.Random(seed)

    def accepts(number: int) -> int:
        count = 0
        while count < 20 and numbers.random() < share:
            count += 1
        return count

    return accepts


@pytest.mark.parametrize(
    ("share", "ratio", "width"), [(0.9, 1.6, 4), (0.4, 1.6, 2), (0.1, 1.6, 1), (0.6, 2.2, 2), (0.2, 2.2, 1)]
)
def test_rounds_are_as_wide_as_they_pay(share: float, ratio: float, width: int) -> None:
    """Where deep places are seldom right, rounds of half as many drafts gain more than wide ones."""
    found = simulated(linear(ratio), num_rows=16)
    slowness = found.run(2000, chance(share))
    assert found.widths.most_common(1)[0][0] == width
    assert found.widths[width] > 0.9 * 2000
    brought = {one: sum(share**place for place in range(one)) for one in (1, 2, 4)}
    best = min(found.costs.ratio(16, one) / brought[one] for one in brought)
    assert slowness <= best * 1.03


def test_narrow_rounds_gain_what_wide_ones_or_none_would_lose() -> None:
    wide, both = simulated(linear(2.0, halves=False), num_rows=16), simulated(linear(2.0), num_rows=16)
    assert wide.run(2000, chance(0.45)) > 1.0
    assert both.run(2000, chance(0.45)) < 0.95


def test_it_widens_when_deep_places_are_right_again() -> None:
    found = simulated(linear(1.6), num_rows=16)
    found.run(1000, chance(0.4))
    found.widths.clear()
    found.run(2000, chance(0.9, 1))
    assert found.widths[4] > 1500


@settings(deadline=None, max_examples=30)
@given(st.sampled_from((0.05, 0.1, 0.2, 0.3, 0.5, 0.7)), st.floats(1.1, 3.9), st.integers(0, 3), st.integers(1, 8))
def test_no_acceptance_makes_it_slower_than_plain_steps(share: float, ratio: float, lag: int, num_rows: int) -> None:
    assert simulated(linear(ratio), lag, num_rows).run(3000, chance(share)) <= 1.02


def test_it_comes_back_when_drafts_are_good_again() -> None:
    found = simulated(linear(1.5))
    assert found.run(1000, never) < 1.006
    assert found.run(3000, lambda number: 2) < 0.6


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0, 3.0])
def test_drafts_that_turn_bad_are_given_up_soon(ratio: float) -> None:
    found = simulated(linear(ratio))
    found.run(500, always)
    assert found.run(512, never) <= 1.03


def test_the_batch_decides() -> None:
    """Rounds pay for few rows and not for many; there and back."""
    costs = StepCosts(SIZES, {4: (1.1, 1.3, 2.0, 3.5)})
    policy = WherePaid(limits(), costs)
    for _ in range(3):
        assert Simulation(policy, costs, 0, 2).run(300, lambda number: 1) < 0.8
        assert Simulation(policy, costs, 0, 60).run(3000, lambda number: 1) < 1.03
    assert policy.of(rows(2)).width == 4
    assert policy.of(rows(60)).width == 1


def test_costs_are_those_of_the_next_size() -> None:
    costs = StepCosts(SIZES, {4: (1.1, 1.3, 2.0, 3.5), 2: (1.0, 1.1, 1.2, 1.3)})
    counts = (1, 2, 4, 5, 16, 17, 64, 99)
    assert [costs.ratio(count, 4) for count in counts] == [1.1, 1.3, 1.3, 2.0, 2.0, 3.5, 3.5, 3.5]
    assert [costs.ratio(count, 2) for count in counts[-2:]] == [1.3, 1.3]
    assert costs.ratio(3, 1) == 1.0
    assert costs.widths == [4, 2]
    assert str(costs).startswith("4 tokens 1.10× at 1, 1.30× at 4")


def whole(*counts: int) -> Counter[tuple[int, bool]]:
    """Rounds that nothing cut off."""
    return Counter((count, False) for count in counts)


def test_places_that_a_round_could_not_reach_count_as_the_mean() -> None:
    found = Acceptance(3)
    found.note(4, whole(4, 1))
    found.note(4, {(2, True): 1})
    assert found.tokens(4) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 3), "four rows so far, one of them in doubt"


def test_acceptance_of_a_place_is_that_of_fresh_drafts() -> None:
    found = Acceptance(3)
    found.note(4, whole(*[3, 3, 1, 1] * 100))
    assert [round(found.tokens(width), 1) for width in (1, 2, 3, 4)] == [1, 1.5, 2, 2]
    before = found.tokens(4)
    found.note(1, {})
    found.note(4, whole(1, 1))
    assert found.tokens(4) == before, "after a plain step drafts are old"
    found.note(2, whole(2, 2))
    one, two = found.tokens(2), found.tokens(3)
    assert 1.5 < one < 1.6
    found.note(4, whole(2, 2))
    assert found.tokens(2) > one, "after a narrow one there is something in its places"
    assert found.tokens(3) - found.tokens(2) == pytest.approx(two - one), "and nothing in deeper ones"
    found.give_up()
    assert found.tokens(4) == 1
    found.note(1, {})
    found.note(4, whole(*[3, 3, 1, 1] * 100), catches_up=True)
    assert found.tokens(4) == pytest.approx(2, abs=0.02), "after a plain step, where the drafter has caught up"


def test_what_many_rows_show_outweighs_what_one_did() -> None:
    """The first sequence was alone, and nothing was drafted right; with more of them drafts are good."""
    found = Acceptance(3)
    for _ in range(20):
        found.note(4, whole(1))
    assert found.tokens(4) == 1
    found.note_probe(whole(*[4] * 16))
    assert found.tokens(4) > 3.5
    costs = StepCosts(SIZES, {4: (1.8,) * 4}, (0.3,) * 4)
    policy = WherePaid(limits(), costs)
    assert Simulation(policy, costs, 1, 1).run(512, never) < PROBED[1]
    assert Simulation(policy, costs, 1, 16).run(1000, chance(0.8)) < 0.75


def test_few_probes_find_a_good_drafter() -> None:
    """At one row, by its luck; with many rows, by two."""
    used = [simulated(linear(2.2, 5), 1, 1) for _ in range(50)]
    for seed, one in enumerate(used):
        one.run(60, chance(0.8, seed))
    assert sum(one.widths[1] < 30 for one in used) > 40
    crowd = simulated(linear(2.2, 5), 1, 16)
    crowd.run(60, chance(0.8))
    assert crowd.probes <= 2
    assert crowd.widths[1] < 15


def test_a_probe_is_not_of_drafts_that_a_narrower_round_made() -> None:
    """After a round its own drafts are at hand, which may be of fewer places."""
    policy, decodes = WherePaid(limits(), linear(1.5)), rows(16)
    assert policy.of(decodes) == Planned(1, probes=True)
    policy._credit = 0.0
    assert not any(policy.of(decodes).probes for _ in range(9)), "now one is due, and can't be paid for"
    policy._acceptance.note_probe(whole(*[4] * 16))
    assert policy.of(decodes).width == 4
    policy._acceptance.give_up()
    policy._credit = 1.0
    assert [policy.of(decodes) for _ in range(3)] == [Planned(1), Planned(1, probes=True), Planned(1)]


def test_probes_lie_so_far_apart_that_the_last_one_is_known() -> None:
    policy = WherePaid(limits(), StepCosts(SIZES, {4: (1.5,) * 4}))
    assert [policy.of(rows(1)).probes for _ in range(13)] == [True, *[False] * 3] * 3 + [True]


def looking(policy: WherePaid) -> Planned:
    """The first round of a look at wide ones."""
    return next(planned for _ in range(5000) if (planned := policy.of(rows(16))).width == 4)


def test_what_is_left_of_a_look_at_wide_rounds_is_not_launched_after_a_break() -> None:
    policy = WherePaid(limits(), linear(1.6))
    found = Simulation(policy, linear(1.6), 0, 16)
    found.run(300, chance(0.4))
    looking(policy)
    assert policy.of(rows(16, speculate=False)).width == 1
    assert policy.of(rows(16)).width == 2
    looking(policy)
    policy._acceptance.give_up()
    assert policy.of(rows(16)).width == 1
    policy._acceptance.note_probe(whole(*[2] * 16))
    assert [policy.of(rows(16)).width for _ in range(3)] == [2] * 3


def test_of_many_costs_some_are_told() -> None:
    sizes = (1, 2, 4, 8, 12, 16, 24, 32, 40)
    told = "1.00× at 1, 1.00× at 2, 1.00× at 4, 1.00× at 8, 1.00× at 16, 1.00× at 32, 1.00× at 40"
    assert str(StepCosts(sizes, {4: (1.0,) * len(sizes)})) == f"4 tokens {told}; not timed among prompts"


def test_rows_that_take_no_drafts() -> None:
    for policy in (WhereDrafted(limits()), WherePaid(limits(), linear(1.0))):
        assert policy.of(rows(3, speculate=False)) == Planned(1)
        mixed = policy.of((*rows(3, speculate=False), *rows(1)))
        assert mixed == (Planned(4) if isinstance(policy, WhereDrafted) else Planned(1, probes=True))


def test_prompts_alone_are_drafted_for_where_rounds_run() -> None:
    """Not where steps are plain anyway, nor for requests that take no drafts."""
    barred = (Chunk(rows(1, speculate=False)[0], 0, (1,), samples=True, enters=True),)
    always = WhereDrafted(limits())
    assert [always.of((), chunks) for chunks in (_A_PROMPT, barred, _A_PROMPT)] == [Planned(4), Planned(1), Planned(4)]
    paid = WherePaid(limits(), linear(1.5))
    assert paid.of((), _A_PROMPT) == Planned(1)
    Simulation(paid, linear(1.5), 0, 16).run(100, chance(0.9))
    assert [paid.of((), chunks) for chunks in (_A_PROMPT, barred)] == [Planned(4), Planned(1)]


def ended(policy: WherePaid, right: Callable[[int], int], max_outputs: int, answers: int) -> int:
    """How many of the steps of answers of so many tokens were rounds; `right` drafts of each are right."""
    number, rounds, probes_made = 0, 0, Probes(3)
    for _ in range(answers):
        decodes, left = rows(1), max_outputs - 1
        while left:
            number, (width, probes) = number + 1, policy.of(decodes)
            rounds += width > 1
            count = min(left, 1 + min(right(number), width - 1))
            left -= count
            step = ScheduledStep(number, decodes, (), (), width, pass_name="x", catches_up=probes, probes=probes)
            found = [TOKEN if place < right(number) else TOKEN + 1 for place in range(3)]
            decodes[0].outputs.extend((TOKEN,) * count)
            decodes[0].finish = finish = None if left else FinishReason.LENGTH
            sampled = Sampled([], probed=np.array([found])) if probes else Sampled([])
            updates: list[Update] = [(decodes[0], (TOKEN,) * count, finish)]
            policy.took(step, updates, list(probes_made.took(step, updates, sampled)))
    return rounds


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 20), st.integers(0, 99))
def test_short_answers_don_t_make_drafts_look_bad(max_outputs: int, seed: int) -> None:
    """Nine in ten rounds have all drafts right: a round that is cut off counts, or only the others would."""
    numbers = random.Random(seed)
    policy = WherePaid(limits(), linear(1.4))
    ended(policy, lambda number: 3 if numbers.random() < 0.9 else 0, max_outputs, 300)
    assert policy.of(rows(1)).width > 1


@settings(deadline=None, max_examples=20)
@given(st.integers(3, 20))
def test_short_answers_don_t_hide_bad_drafts(max_outputs: int) -> None:
    policy = WherePaid(limits(), linear(1.4))
    ended(policy, lambda number: 0, max_outputs, 100)
    assert ended(policy, lambda number: 0, max_outputs, 100) <= 0.03 * 100 * (max_outputs - 1)


def test_a_look_at_wide_rounds_ends_where_rows_come_for_which_they_are_dear() -> None:
    costs = StepCosts(SIZES, {4: (1.2, 1.6, 1.6, 3.5), 2: (1.1, 1.2, 1.2, 1.2)}, (0.3,) * 4)
    policy = WherePaid(limits(), costs)
    Simulation(policy, costs, 0, 16).run(300, chance(0.4))
    looking(policy)
    assert [policy.of(rows(64)).width for _ in range(5)] == [2] * 5


def test_a_dear_drafter_that_is_right_is_used() -> None:
    """One row, one probe: it is made at once, and enough."""
    for catching_up in (0.4, 1.0, 1.5, 3.0):
        costs = StepCosts(SIZES, {5: (2.3,) * 4}, (catching_up,) * 4)
        found = simulated(costs, 2, 1)
        found.run(100, always)
        assert found.widths[5] > 80, catching_up


# -- rows that differ, and that change --------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("num_plain", [12, 15])
def test_rows_that_take_no_drafts_don_t_make_drafts_look_bad(every: int, num_plain: int) -> None:
    """Rounds of the others go on at once when these have left."""
    costs = StepCosts(SIZES, {5: (1.8,) * 4, 3: (1.5,) * 4}, (0.05,) * 4)
    some = (*rows(16 - num_plain), *rows(num_plain, speculate=False))
    found = simulated(costs, 1, 16)
    all_rows = found.decodes
    found.run(3000, chance(0.8), decodes=lambda number: some if number // every % 2 else all_rows)
    assert found.widths[5] > 0.45 * 3000, "while all take drafts"
    assert found.widths[1] > 0.45 * 3000, "while few do"


def test_rows_that_take_few_drafts_tell_of_no_deeper_ones() -> None:
    costs = StepCosts(SIZES, {5: (1.8,) * 4, 3: (1.5,) * 4}, (0.05,) * 4)
    found = simulated(costs, 1, 16)
    all_rows, bounded = found.decodes, rows(16, speculate=2)
    found.run(300, always)
    found.run(300, always, decodes=lambda number: bounded)
    found.widths.clear()
    found.run(300, always, decodes=lambda number: all_rows)
    assert found.widths[5] > 290
    found.widths.clear()
    found.run(300, always, decodes=lambda number: bounded)
    assert found.widths[3] > 250, "as wide as what they take"


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("catching_up", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("ratio", [1.2, 2.0])
def test_rounds_that_end_with_every_change_of_the_batch_pay_for_catching_up(
    every: int, catching_up: float, ratio: float
) -> None:
    """With 16 rows they pay, and with 17 they don't."""
    costs = StepCosts(SIZES, {5: (ratio, ratio, ratio, 4.9)}, (catching_up,) * 4)
    few, many = rows(16), rows(17)
    found = simulated(costs, 1, 16)
    taken = found.run(3000, chance(0.7), decodes=lambda number: many if number // every % 2 else few)
    assert taken <= 1.025
    if every == 10 and catching_up == 0.4:
        assert taken < 0.99, "where they pay all the same, they run"


def test_a_drafter_that_is_right_in_probes_alone_gets_few() -> None:
    """What its rounds lose, and did not win before, is taken from what probes may cost."""
    for num_rows in SIZES:
        found = simulated(linear(1.5, 5), 1, num_rows)
        assert found.run(512, lambda number: 99 * (found.width == 1)) <= 1.03  # noqa: B023
        assert found.run(2000, lambda number: 99 * (found.width == 1)) <= 1.02  # noqa: B023
        assert found.run(2000, never) <= 1.005


@pytest.mark.parametrize(("most", "is_round"), [(2, False), (4, False), (6, False), (60, True)])
def test_rows_near_their_end_have_no_rounds(most: int, is_round: bool) -> None:
    """The last round ends somewhere within it, while the number of plain steps is known."""
    policy = WherePaid(limits(), linear(1.4))
    Simulation(policy, linear(1.4), 0, 16).run(200, chance(0.9))
    assert (policy.of(rows(16, most=most)).width > 1) == is_round
    ending = (Chunk(rows(1, most=most)[0], 0, (1,), samples=True, enters=True),)
    assert (policy.of((), ending).width > 1) == is_round, "nor is anything drafted after their prompts"
    mixed = (*rows(8, most=2), *rows(8, most=60))
    assert policy.of(mixed).width > 1, "where half of them have room, rounds pay"


# -- among prompts ----------------------------------------------------------------------------------------------


def among(ratio: float, longer: float, catching_up: float = 0.05) -> StepCosts:
    """Rounds of four and of two tokens; a step with prompts takes so many plain steps longer for wide ones, and half as
    many for narrow ones."""
    ratios = {4: (ratio,) * 4, 2: (1 + (ratio - 1) / 3,) * 4}
    longer_by_width = {4: (longer,) * 4, 2: (longer / 2,) * 4}
    return StepCosts(SIZES, ratios, (catching_up,) * 4, (1e-3,) * 4, longer_by_width)


def arrivals(share: float, seed: int = 7) -> Callable[[int], bool]:
    """So many of the steps have prompts, by chance."""
    numbers = random.Random(seed)
    return lambda number: numbers.random() < share


def test_costs_among_prompts_are_those_of_the_next_size() -> None:
    costs = StepCosts((1, 4), {4: (1.5, 1.7), 2: (1.2, 1.3)}, among_prompts={4: (0.25, 2.0)}, among_rows=(1, 3))
    assert [costs.ratio_among_prompts(count, 4) for count in (1, 2, 4, 9)] == [1.25, 3.0, 3.0, 3.0]
    assert costs.ratio_among_prompts(4, 2) == 1.3, "as without prompts, where nothing was measured"
    assert costs.ratio_among_prompts(4, 1) == 1.0
    told = "4 tokens 1.50× at 1, 1.70× at 4; 2 tokens 1.20× at 1, 1.30× at 4; among prompts, in plain steps: "
    assert str(costs) == told + "4 tokens +0.25 at 1, +2.00 at 4"
    assert str(replace(costs, among_rows=(1,))) == told + "4 tokens +0.25 at 1", "what was timed, and no more"


@pytest.mark.parametrize(("longer", "is_round"), [(0.1, True), (0.6, True), (1.5, False), (4.0, False)])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5])
def test_among_prompts_rounds_run_where_they_pay_there(longer: float, is_round: bool, share: float) -> None:
    """A round without prompts brings 2.4 tokens for 1.5 plain steps, so each of them is worth 0.6."""
    found = simulated(among(1.5, longer), num_rows=16)
    found.run(2000, chance(0.66), arrivals(share))
    assert found.widths[4] > 0.95 * found.widths.total()
    assert (found.among[1] < 0.1 * found.among.total()) == is_round
    assert (found.among[1] > 0.9 * found.among.total()) != is_round


def test_rounds_tell_what_probes_would() -> None:
    """Plain steps among prompts are no probes where the others are rounds."""
    found = simulated(among(1.5, 2.0), num_rows=16)
    found.run(200, chance(0.7))
    before = found.probes
    found.run(2000, chance(0.7), arrivals(0.5))
    assert found.among[1] > 900
    assert found.widths[4] > 900
    assert found.probes - before <= 2


def test_what_rounds_among_prompts_lose_is_noticed() -> None:
    """By what they cost there: twice as much as their tokens bring, where those without prompts gain."""
    costs = among(1.2, 0.3)
    found = simulated(costs, 0, 16)
    found.run(400, chance(0.9), arrivals(1.0))
    assert found.among[4] > 350
    policy, longer = found.policy, among(1.2, 3.0)
    assert isinstance(policy, WherePaid)
    policy._costs = longer  # as chosen by other figures
    step = ScheduledStep(9999, found.decodes, (CHUNK,), (), 4, pass_name="x")
    for _ in range(2):
        policy.took(step, [(one, (TOKEN,) * 2, None) for one in found.decodes], [])
    assert policy._lost == pytest.approx(2 * (4.0 - 2))


def test_where_it_was_not_measured_steps_with_prompts_go_by_the_others() -> None:
    found = simulated(linear(1.5), num_rows=16)
    found.run(1000, chance(0.7), arrivals(0.4))
    assert found.among[4] > 0.95 * found.among.total()


def test_what_steps_with_prompts_would_lose_holds_rounds_back() -> None:
    """One round in ten steps gains less than the drafter takes to catch up before it."""
    found = simulated(among(1.9, 5.0, catching_up=0.9), num_rows=16)
    assert found.run(3000, chance(0.6), arrivals(0.9)) <= 1.006
    assert found.widths[1] > 0.9 * found.widths.total()
    assert found.run(2000, chance(0.6)) < 0.95, "without prompts they run again"


@settings(deadline=None, max_examples=60)
@given(
    st.floats(1.05, 3.9), st.floats(0.0, 5.0), st.floats(0.0, 1.0), st.sampled_from((0.0, 0.1, 0.3, 0.5, 0.7, 0.9)),
    st.sampled_from((0.05, 0.3, 0.5, 0.8, 1.0)), st.integers(0, 3), st.sampled_from((1, 16)),
)  # fmt: skip
def test_prompts_make_it_no_slower_than_plain_steps(
    ratio: float, longer: float, catching_up: float, right: float, share: float, lag: int, num_rows: int
) -> None:
    found = simulated(among(ratio, longer, catching_up), lag, num_rows)
    assert found.run(3000, chance(right), arrivals(share)) <= 1.02


class Fixed:
    """The protocol `StepWidth`: a width for steps without prompts, and one for those with some."""

    def __init__(self, alone: int, among_prompts: int) -> None:
        self._planned = Planned(alone), Planned(among_prompts)

    def of(self, decodes: object, prompts: Collection[object] = ()) -> Planned:
        return self._planned[bool(prompts)]

    def took(self, *args: object) -> None:
        """Stateless: nothing to record."""


@pytest.mark.parametrize("longer", [0.1, 0.7, 1.5, 3.0])
@pytest.mark.parametrize("right", [0.5, 0.75])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_it_does_about_as_well_as_the_best_two_widths(longer: float, right: float, share: float) -> None:
    costs = among(1.5, longer)
    best = min(
        Simulation(Fixed(*widths), costs, num_rows=16).run(1500, chance(right), arrivals(share))
        for widths in itertools.product((1, 2, 4), repeat=2)
    )
    assert simulated(costs, num_rows=16).run(3000, chance(right), arrivals(share)) <= 1.09 * best
