"""The scheduler, one decision at a time; tests/property/test_scheduler.py has them all at once."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phonograph.engine.execution.sizing import with_pages
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence, State
from phonograph.engine.requests.step import Sampled, ScheduledStep, Update
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import Planned
from phonograph.errors import PhonographError, PlanError, RequestError

PACKAGE = Path(__file__).parents[2] / "src" / "phonograph"


def limits(**changes: Any) -> Limits:
    usual: dict[str, Any] = {"max_seqs": 4, "max_tokens": 32, "max_len": 64, "page_size": 4, "num_pages": 65}
    return Limits(**{**usual, "reserve_tokens": 0, "max_ahead": 0, **changes})


PARAMS = ("n", "stop_token_ids", "speculate")


def request(name: str, num_prompt: int = 5, max_tokens: int = 4, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **{k: fields.pop(k) for k in PARAMS if k in fields})
    # Prompts differ from the first token on, unless a test says otherwise.
    start = sum(map(ord, name)) * 1000
    return Request(name, fields.pop("prompt", tuple(range(start, start + num_prompt))), params, **fields)


def launched(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    return step


def committed(scheduler: Scheduler, step: ScheduledStep, token: int = 7, now: float = 0.0) -> list[Update]:
    return scheduler.commit(step, Sampled([token] * len(step.sampling)), now)


def run(scheduler: Scheduler, steps: int) -> list[ScheduledStep]:
    """So many steps without lag."""
    done = []
    for _ in range(steps):
        done.append(launched(scheduler))
        committed(scheduler, done[-1])
    return done


def drained(scheduler: Scheduler, bound: int = 1000) -> int:
    """Run to the end; returns the number of steps."""
    for number in range(bound):
        if scheduler.is_idle:
            scheduler.integrity()
            return number
        run(scheduler, 1)
    raise AssertionError(f"still running after {bound} steps: {scheduler.counts}")


def shape(step: ScheduledStep) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Who decodes, and who prefills which tokens."""
    return (
        [sequence.request.id for sequence in step.decodes],
        [(chunk.sequence.request.id, chunk.start, chunk.count) for chunk in step.prefills],
    )


# -- limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_seqs": 0}, "max_seqs"),
        ({"page_size": True}, "page_size"),
        ({"num_pages": 1}, "num_pages"),
        ({"max_len": 1}, "max_len"),
        ({"reserve_tokens": -1}, "reserve_tokens"),
        ({"max_ahead": 0.5}, "max_ahead"),
        ({"chunk": 0}, "chunk"),
        ({"patience": 0}, "patience"),
        ({"eos_ids": 3}, "eos_ids"),
        ({"max_tokens": 3}, "Raise max_tokens or lower max_seqs"),
    ],
)
def test_limits_that_can_t_be_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        limits(**change)


# -- add ------------------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        Scheduler(limits()).add(request("a", 0))


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"has 64 tokens.*room for 63.*Shorten the prompt, or raise max_len"):
        Scheduler(limits()).add(request("a", 64))


def test_where_the_pages_cut_the_context_off_more_of_them_help() -> None:
    found = with_pages(limits(), 9)
    assert (found.max_len, found.is_cut_off, limits().is_cut_off) == (32, True, False)
    with pytest.raises(
        RequestError, match=r"32, all that the KV cache holds, has room for 31 .*, or raise cache_tokens"
    ):
        Scheduler(found).add(request("a", 32))


def test_a_prompt_that_never_fits_in_the_pages_is_refused() -> None:
    with pytest.raises(RequestError, match=r"has 9 tokens.*all 2 pages.*hold 8.*more pages"):
        Scheduler(limits(num_pages=3)).add(request("a", 9))


def test_an_id_is_served_once_at_a_time() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("a"))
    with pytest.raises(RequestError, match=r"'a'.*already"):
        scheduler.add(request("a"))
    scheduler.cancel("a")
    scheduler.add(request("a"))


def test_max_tokens_is_clipped_to_the_context_and_the_pages() -> None:
    (by_context,) = Scheduler(limits()).add(request("a", 60, max_tokens=99))
    assert by_context.max_outputs == 4
    scheduler = Scheduler(limits(num_pages=3))
    (by_pages,) = scheduler.add(request("a", 8, max_tokens=99))
    assert by_pages.max_outputs == 1, "the last output needs no page"
    assert drained(scheduler) == 1
    assert by_pages.finish is FinishReason.LENGTH


# -- steps ----------------------------------------------------------------------------------------------------


def test_a_request_is_prefilled_and_then_decoded_from_the_tables() -> None:
    scheduler = Scheduler(limits())
    (sequence,) = scheduler.add(request("a", 5, max_tokens=3))
    first = launched(scheduler)
    (chunk,) = first.prefills
    assert (chunk.start, chunk.tokens, chunk.samples, chunk.enters) == (0, sequence.request.prompt, True, True)
    assert first.new_rows == (chunk,)
    assert first.sampling == (sequence,)
    assert first.pass_name == "prefill"
    assert first.page_updates == tuple((sequence.row, index, page) for index, page in enumerate(sequence.pages))
    assert committed(scheduler, first) == [(sequence, (7,), None)]
    second = launched(scheduler)
    assert (second.decodes, second.prefills, second.pass_name) == ((sequence,), (), "decode")
    assert committed(scheduler, second) == [(sequence, (7,), None)]
    assert committed(scheduler, launched(scheduler)) == [(sequence, (7,), FinishReason.LENGTH)]
    assert scheduler.schedule() is None
    assert scheduler.is_idle
    scheduler.integrity()


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    scheduler = Scheduler(limits(max_tokens=8))
    scheduler.add(request("a", 4, max_tokens=9))
    run(scheduler, 1)
    scheduler.add(request("b", 16))
    assert [shape(step) for step in run(scheduler, 4)] == [
        (["a"], [("b", 0, 7)]),
        (["a"], [("b", 7, 7)]),
        (["a"], [("b", 14, 2)]),
        (["a", "b"], []),
    ]


def test_a_chunk_leaves_room_for_others() -> None:
    scheduler = Scheduler(limits(max_tokens=8, chunk=5))
    scheduler.add(request("a", 12))
    scheduler.add(request("b", 4))
    assert [shape(step)[1] for step in run(scheduler, 2)] == [[("a", 0, 5), ("b", 0, 3)], [("a", 5, 5), ("b", 3, 1)]]


def test_pure_steps_prefill_first() -> None:
    scheduler = Scheduler(limits(), mixed=False)
    scheduler.add(request("a", 4))
    run(scheduler, 1)
    scheduler.add(request("b", 4))
    assert [shape(step) for step in run(scheduler, 2)] == [([], [("b", 0, 4)]), (["a", "b"], [])]


def test_pure_steps_let_decodes_through_now_and_then() -> None:
    scheduler = Scheduler(limits(), mixed=False)
    scheduler.add(request("a", 4, max_tokens=3))
    kinds = []
    for number in range(20):
        scheduler.add(request(f"b{number}", 4, max_tokens=1))
        kinds.append(run(scheduler, 1)[0].pass_name)
    assert kinds.index("decode") == 8


def test_higher_priority_then_earlier_arrival_goes_first() -> None:
    scheduler = Scheduler(limits(max_seqs=1))
    for name, priority, arrival in [("late", 0, 2.0), ("early", 0, 1.0), ("urgent", 1, 3.0)]:
        scheduler.add(request(name, 4, max_tokens=1, priority=priority, arrival=arrival))
    assert [shape(step)[1][0][0] for step in run(scheduler, 3)] == ["urgent", "early", "late"]


def test_nobody_overtakes_a_head_that_waits_for_pages() -> None:
    scheduler = Scheduler(limits(num_pages=6), prefix_cache=False)
    scheduler.add(request("a", 8, max_tokens=4))
    run(scheduler, 1)
    scheduler.add(request("large", 16, max_tokens=1))
    scheduler.add(request("small", 2, max_tokens=1))
    order = [entry[0] for step in run(scheduler, 4) for entry in shape(step)[1]]
    assert order == ["large", "small"]


def test_endless_urgent_requests_do_not_starve_an_idle_one() -> None:
    scheduler = Scheduler(limits(max_seqs=1, patience=20))
    (humble,) = scheduler.add(request("humble", 4, max_tokens=2, priority=-1))
    for number in range(60):
        scheduler.add(request(f"u{number}", 4, max_tokens=2, priority=5))
        run(scheduler, 1)
    assert humble.finish is FinishReason.LENGTH


def test_a_row_is_given_to_so_many_sequences_at_a_time() -> None:
    scheduler = Scheduler(limits(max_seqs=2))
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=2))
    (first,) = run(scheduler, 1)
    assert shape(first)[1] == [("a", 0, 2), ("b", 0, 2)]
    assert sorted(sequence.row for sequence in first.sequences) == [1, 2]
    assert (scheduler.counts.running, scheduler.counts.waiting) == (2, 1)


def test_steady_steps_carry_the_same_tuple_and_change_no_table() -> None:
    scheduler = Scheduler(limits(reserve_tokens=32, max_ahead=1))
    for name, num_prompt in (("a", 2), ("b", 7), ("c", 11)):
        scheduler.add(request(name, num_prompt, max_tokens=50))
    run(scheduler, 2)
    steps = run(scheduler, 44)
    changing = [step.number for step in steps if step.page_updates]
    assert len(changing) == 1, "whoever runs low is served together with the first"
    assert len({id(step.decodes) for step in steps}) == 1


def test_pages_are_reserved_ahead_but_never_past_the_last_token() -> None:
    scheduler = Scheduler(limits(reserve_tokens=16))
    (long,) = scheduler.add(request("long", 5, max_tokens=50))
    (short,) = scheduler.add(request("short", 5, max_tokens=4))
    run(scheduler, 1)
    assert (len(long.pages), len(short.pages)) == (6, 2)


# -- commit behind launch -------------------------------------------------------------------------------------


def test_steps_are_launched_ahead_of_their_tokens() -> None:
    scheduler = Scheduler(limits(max_ahead=2))
    (sequence,) = scheduler.add(request("a", 4, max_tokens=9))
    steps = [launched(scheduler) for _ in range(3)]
    assert scheduler.schedule() is None, "three are in flight"
    assert (sequence.num_computed, sequence.num_launched_outputs, sequence.outputs) == (6, 3, [])
    committed(scheduler, steps[0], 11)
    assert sequence.outputs == [11]
    assert launched(scheduler).decodes == (sequence,)


def test_a_sequence_is_not_launched_past_its_count() -> None:
    scheduler = Scheduler(limits(max_ahead=3))
    (sequence,) = scheduler.add(request("a", 4, max_tokens=2))
    steps = [launched(scheduler), launched(scheduler)]
    assert scheduler.schedule() is None
    committed(scheduler, steps[0])
    assert committed(scheduler, steps[1]) == [(sequence, (7,), FinishReason.LENGTH)]
    scheduler.integrity()


class PlainSteps:
    """The protocol `StepWidth`: one token a row."""

    def of(self, *args: object) -> Planned:
        return Planned(1)

    def took(self, *args: object) -> None:
        """Whatever it was."""


@pytest.mark.parametrize("max_ahead", [0, 1, 4])
def test_plain_steps_of_an_engine_that_drafts_go_no_further_than_those_of_others(max_ahead: int) -> None:
    """At the end of each sequence, whose last token is launched before the one before is known."""
    numbers = list[list[int]]()
    for width in (1, 4):
        scheduler = Scheduler(limits(max_ahead=max_ahead, tokens_per_row=width, max_tokens=64))
        scheduler.width = PlainSteps()
        for name, max_tokens in (("a", 2), ("b", 9), ("c", 1), ("d", 30)):
            scheduler.add(request(name, max_tokens=max_tokens))
        steps, in_flight = list[int](), deque[ScheduledStep]()
        while not scheduler.is_idle:
            step = scheduler.schedule()
            if step is not None:
                steps.append(len(step.decodes))
                in_flight.append(step)
            if step is None or len(in_flight) > max_ahead:
                committed(scheduler, in_flight.popleft())
        numbers.append(steps)
    assert numbers[0] == numbers[1]
    assert sum(numbers[0]) == 1 + 8 + 29


@pytest.mark.parametrize("speculate", [False, None])
def test_rows_that_decode_plainly_leave_prompts_the_room_of_plain_decoding(speculate: bool | None) -> None:
    """A step holds rounds of all rows; where these take one token each, prompts get what is left of it."""
    chunks = list[list[int]]()
    for width in (1, 4):
        scheduler = Scheduler(limits(max_seqs=4, max_ahead=0, tokens_per_row=width, max_tokens=17), prefix_cache=False)
        scheduler.width = scheduler.width if speculate is False else PlainSteps()
        params: dict[str, Any] = {} if width == 1 else {"speculate": speculate}
        for name in ("a", "b", "c"):
            scheduler.add(request(name, 2, 40, **params))
        run(scheduler, 3)
        scheduler.add(request("long", 40, 4, **params))
        chunks.append([chunk.count for step in run(scheduler, 4) for chunk in step.prefills])
    assert chunks[0] == chunks[1] == [14, 14, 12]


def test_no_step_follows_a_round_that_ends_all() -> None:
    """Not even a plain one, which was planned before that round was committed."""
    scheduler = Scheduler(limits(max_ahead=1, tokens_per_row=4, max_tokens=64))
    (sequence,) = scheduler.add(request("a", max_tokens=8))
    scheduler.commit(launched(scheduler), Sampled([7]))
    first = launched(scheduler)
    assert first.tokens_per_row == 4
    scheduler.width = PlainSteps()
    second = launched(scheduler)
    scheduler.commit(first, Sampled([7] * 4, [4]))
    third = launched(scheduler)
    scheduler.commit(second, Sampled([7], [1]))
    fourth = launched(scheduler)
    scheduler.commit(third, Sampled([7], [1]))
    assert scheduler.schedule() is None, "the last of its tokens is in flight"
    scheduler.commit(fourth, Sampled([7], [1]))
    assert len(sequence.outputs) == 8
    assert scheduler.is_idle


def test_what_was_launched_in_vain_is_not_seen_and_holds_row_and_pages_until_it_is_committed() -> None:
    scheduler = Scheduler(limits(max_ahead=2, eos_ids=(1,)), prefix_cache=False)
    (sequence,) = scheduler.add(request("a", 4, max_tokens=9))
    steps = [launched(scheduler) for _ in range(3)]
    row, pages = sequence.row, list(sequence.pages)
    assert committed(scheduler, steps[0], token=1) == [(sequence, (1,), FinishReason.STOP)]
    assert (sequence.row, sequence.pages) == (row, pages)
    assert committed(scheduler, steps[1]) == []
    assert sequence.row == row
    assert committed(scheduler, steps[2]) == []
    assert (sequence.row, sequence.pages, sequence.outputs) == (0, [], [1])
    assert scheduler.counts.free_pages == 64
    scheduler.integrity()


def test_a_request_that_depends_on_its_text_does_not_run_ahead() -> None:
    scheduler = Scheduler(limits(max_ahead=1))
    scheduler.add(request("grammar", 4, run_ahead=False))
    scheduler.add(request("plain", 4))
    first, second = launched(scheduler), launched(scheduler)
    assert shape(second) == (["plain"], [])
    committed(scheduler, first)
    assert shape(launched(scheduler)) == (["grammar", "plain"], [])


def test_commits_come_in_the_order_of_launch() -> None:
    scheduler = Scheduler(limits(max_ahead=1))
    scheduler.add(request("a"))
    first, second = launched(scheduler), launched(scheduler)
    with pytest.raises(PhonographError, match=r"step 2: the steps in flight are \[1, 2\]"):
        committed(scheduler, second)
    with pytest.raises(PhonographError, match="found 3 tokens, expected 1"):
        scheduler.commit(first, Sampled([1, 2, 3]))
    committed(scheduler, first)
    with pytest.raises(PhonographError, match="Commit each once"):
        committed(scheduler, first)


# -- how sequences end ----------------------------------------------------------------------------------------


def test_stop_ids_are_the_request_s_and_the_engine_s() -> None:
    scheduler = Scheduler(limits(eos_ids=(1,)))
    (own,) = scheduler.add(request("own", stop_token_ids=(2,)))
    (ignoring,) = scheduler.add(Request("ignoring", (1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True)))
    step = launched(scheduler)
    scheduler.commit(step, Sampled([2, 1]))
    assert (own.finish, ignoring.finish) == (FinishReason.STOP, None)


@pytest.mark.parametrize("num_launched", [0, 1, 2])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda scheduler, _: scheduler.cancel("a"), FinishReason.CANCELLED),
        (lambda scheduler, _: scheduler.expire(5.0), FinishReason.DEADLINE),
        (lambda scheduler, sequence: scheduler.fail(sequence, "no"), FinishReason.ERROR),
        (lambda scheduler, sequence: scheduler.finish(sequence, FinishReason.STOP), FinishReason.STOP),
    ],
)
def test_a_sequence_can_end_at_any_moment(
    end: Callable[[Scheduler, Sequence], list[Update]], reason: FinishReason, num_launched: int
) -> None:
    scheduler = Scheduler(limits(max_ahead=1))
    (sequence,) = scheduler.add(request("a", deadline=5.0))
    steps = [launched(scheduler) for _ in range(num_launched)]
    assert end(scheduler, sequence) == [(sequence, (), reason)]
    assert end(scheduler, sequence) == [], "it ends once"
    assert scheduler.schedule() is None
    for step in steps:
        assert committed(scheduler, step) == []
    assert scheduler.is_idle
    assert sequence.outputs == []
    scheduler.integrity()


def test_a_deadline_is_met_or_missed_at_commit() -> None:
    scheduler = Scheduler(limits(), clock=lambda: 0.0)
    (sequence,) = scheduler.add(request("a", deadline=5.0))
    assert committed(scheduler, launched(scheduler), now=4.9) == [(sequence, (7,), None)]
    step = launched(scheduler)
    assert committed(scheduler, step, now=5.0) == [(sequence, (7,), None), (sequence, (), FinishReason.DEADLINE)]


def test_a_failure_tells_why_and_keeps_nothing() -> None:
    scheduler = Scheduler(limits())
    (sequence,) = scheduler.add(request("a", 9))
    step = launched(scheduler)
    scheduler.fail(sequence, "the device said no")
    committed(scheduler, step)
    assert sequence.error == "the device said no"
    assert scheduler.counts.cached_pages == 0


def test_cancelling_what_is_not_served_does_nothing() -> None:
    assert Scheduler(limits()).cancel("nobody") == []


# -- preemption -----------------------------------------------------------------------------------------------


def short_of_pages(*, mixed: bool = True, **changes: Any) -> tuple[Scheduler, Sequence, Sequence]:
    """Two sequences that grow to three pages each, and four pages for both."""
    scheduler = Scheduler(limits(num_pages=5, **changes), prefix_cache=False, mixed=mixed)
    (first,) = scheduler.add(request("first", 4, max_tokens=9))
    (second,) = scheduler.add(request("second", 4, max_tokens=9))
    return scheduler, first, second


def until_preempted(scheduler: Scheduler, sequence: Sequence) -> list[ScheduledStep]:
    """Run with a step of lag until the sequence is preempted; returns what is in flight then."""
    flying = [launched(scheduler)]
    while True:
        step = scheduler.schedule()
        flying += [step] if step else []
        if sequence.state is State.WAITING:
            return flying
        committed(scheduler, flying.pop(0))


def test_the_last_in_rank_is_preempted_and_computed_again() -> None:
    scheduler, first, second = short_of_pages()
    run(scheduler, 5)
    assert (first.state, second.state) == (State.RUNNING, State.RUNNING)
    assert shape(launched(scheduler)) == (["first"], [])
    assert (second.state, second.row, second.pages, len(second.outputs)) == (State.WAITING, 0, [], 5)
    assert scheduler.counts.preemptions == 1


def test_a_preempted_sequence_is_computed_from_prompt_and_outputs() -> None:
    scheduler, first, second = short_of_pages()
    run(scheduler, 9)
    assert first.finish is FinishReason.LENGTH
    (chunk,) = launched(scheduler).prefills
    assert (chunk.sequence, chunk.start, chunk.samples, chunk.enters) == (second, 0, True, True)
    assert chunk.tokens == (*second.request.prompt, *second.outputs)


def test_a_preempted_sequence_keeps_its_pages_until_its_steps_are_committed() -> None:
    scheduler, _, second = short_of_pages(max_ahead=1)
    flying = until_preempted(scheduler, second)
    assert second.row, "a step with it is in flight"
    assert len(second.pages) == 2
    while flying:
        committed(scheduler, flying.pop(0))
    assert second.row == 0
    assert len(second.outputs) == 5, "tokens that were in flight are not lost"
    assert shape(launched(scheduler)) == (["first"], [])
    scheduler.integrity()


def test_pages_that_come_back_go_to_a_decode_before_anybody_is_admitted() -> None:
    scheduler, _, second = short_of_pages(max_ahead=1, mixed=False)
    flying = until_preempted(scheduler, second)
    scheduler.add(request("urgent", 3, max_tokens=1, priority=9))
    assert scheduler.schedule() is None, "the page is on its way"
    while flying:
        committed(scheduler, flying.pop(0))
    assert shape(launched(scheduler)) == (["first"], [])


def test_priority_decides_who_is_preempted() -> None:
    scheduler = Scheduler(limits(num_pages=5), prefix_cache=False)
    (humble,) = scheduler.add(request("humble", 4, max_tokens=9, priority=0))
    (urgent,) = scheduler.add(request("urgent", 4, max_tokens=9, priority=1))
    run(scheduler, 6)
    assert (urgent.state, humble.state) == (State.RUNNING, State.WAITING)
    assert drained(scheduler) > 0


def test_what_was_preempted_is_found_again_in_the_prefix_cache() -> None:
    scheduler = Scheduler(limits(num_pages=6))
    (first,) = scheduler.add(request("first", 4, max_tokens=9))
    (second,) = scheduler.add(request("second", 8, max_tokens=9))
    drained(scheduler)
    assert scheduler.counts.preemptions >= 1
    assert scheduler.counts.prefix_hit_tokens >= 4
    assert len(first.outputs) == len(second.outputs) == 9


# -- prefixes -------------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler = Scheduler(limits())
    prompt = tuple(range(10))
    scheduler.add(request("a", prompt=prompt, max_tokens=1))
    run(scheduler, 1)
    (again,) = scheduler.add(request("b", prompt=prompt, max_tokens=1))
    assert shape(launched(scheduler))[1] == [("b", 8, 2)]
    assert (again.num_cached, scheduler.counts.prefix_hit_tokens) == (8, 8)


def test_outputs_are_part_of_the_next_turn_s_prefix() -> None:
    scheduler = Scheduler(limits())
    (first,) = scheduler.add(request("a", prompt=(1, 2, 3), max_tokens=6))
    drained(scheduler)
    scheduler.add(request("b", prompt=(1, 2, 3, *first.outputs, 9), max_tokens=1))
    assert shape(launched(scheduler))[1] == [("b", 8, 2)]


def test_only_what_committed_steps_wrote_is_shared() -> None:
    scheduler = Scheduler(limits(max_ahead=1))
    scheduler.add(request("a", 3, max_tokens=9))
    first, second = launched(scheduler), launched(scheduler)
    committed(scheduler, first)
    assert scheduler.counts.cached_pages == 0, "the fourth token of the page is written by a step in flight"
    committed(scheduler, second)
    drained(scheduler)
    assert scheduler.counts.cached_pages == 2


def test_siblings_wait_for_the_prompt_of_the_first_and_share_it() -> None:
    scheduler = Scheduler(limits())
    sequences = scheduler.add(request("a", 9, max_tokens=2, n=3))
    assert [sequence.index for sequence in sequences] == [0, 1, 2]
    first, second = run(scheduler, 2)
    assert shape(first) == ([], [("a", 0, 9)])
    assert shape(second) == (["a"], [("a", 8, 1), ("a", 8, 1)])
    drained(scheduler)
    assert all(sequence.finish is FinishReason.LENGTH for sequence in sequences)


def test_siblings_start_at_once_where_nothing_is_shared() -> None:
    scheduler = Scheduler(limits(), prefix_cache=False)
    scheduler.add(request("a", 9, n=2))
    assert shape(launched(scheduler))[1] == [("a", 0, 9), ("a", 0, 9)]


def test_siblings_go_on_when_the_first_fails() -> None:
    scheduler = Scheduler(limits())
    first, second = scheduler.add(request("a", 9, n=2))
    scheduler.fail(first, "no")
    drained(scheduler)
    assert second.finish is FinishReason.LENGTH


# -- integrity ------------------------------------------------------------------------------------------------


def test_a_lost_page_is_told() -> None:
    scheduler = Scheduler(limits())
    scheduler.rows.reservations.pool.take(1)
    with pytest.raises(PhonographError, match=r"lost or freed too early: \{1: '1 references, 0 holders'\}"):
        scheduler.integrity()


def test_a_page_freed_too_early_is_told() -> None:
    scheduler = Scheduler(limits())
    (sequence,) = scheduler.add(request("a"))
    launched(scheduler)
    scheduler.rows.reservations.pool.give_back(sequence.pages[:1])
    with pytest.raises(PhonographError, match="0 references, 1 holders"):
        scheduler.integrity()


def test_counts_add_up() -> None:
    scheduler = Scheduler(limits(max_seqs=1))
    scheduler.add(request("a", 8))
    scheduler.add(request("b", 8))
    run(scheduler, 1)
    counts = scheduler.counts
    assert (counts.waiting, counts.running, counts.preemptions) == (1, 1, 0)
    assert (counts.free_pages, counts.cached_pages, counts.used_pages) == (62, 2, 2)
    assert (counts.steps, counts.prompt_tokens, counts.prefill_tokens, counts.generated_tokens) == (1, 8, 8, 1)
    drained(scheduler)
    counts = scheduler.counts
    assert (counts.waiting, counts.running, counts.used_pages) == (0, 0, 0)
    assert (counts.prompt_tokens, counts.generated_tokens) == (16, 8)


def test_a_prompt_that_is_shared_counts_once_and_its_lookups_each_time() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("a", 9, n=3))
    drained(scheduler)
    counts = scheduler.counts
    assert (counts.prompt_tokens, counts.prefix_lookup_tokens, counts.prefix_hit_tokens) == (9, 27, 16)
    assert counts.prefill_tokens == 27 - 16


@pytest.mark.parametrize("num_prompt", [3, 9])
def test_cancelling_many_choices_takes_time_that_grows_with_their_number(num_prompt: int) -> None:
    scheduler, num_calls = Scheduler(limits()), 0
    sequences = scheduler.add(request("a", num_prompt, n=1024))
    committed(scheduler, launched(scheduler))

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        updates = scheduler.cancel("a")
    finally:
        sys.setprofile(before)
    assert len(updates) == len(sequences)
    assert num_calls < 100 * len(sequences)
    assert drained(scheduler) == 0


def test_the_torch_free_half_imports_no_torch() -> None:
    program = f"""
import sys, types
package = types.ModuleType("phonograph")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["phonograph"] = package
sys.modules["torch"] = sys.modules["numpy"] = None
import phonograph.engine.scheduling.scheduler
"""
    subprocess.run([sys.executable, "-c", program], check=True)
