"""What is counted of drafts: those that could be accepted, by place, and the reasons of plain steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phonograph import SamplingParams
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.passes.ngram import ngram
from phonograph.engine.process.generation import Generation
from phonograph.engine.process.messages import Output
from phonograph.engine.process.observer import Observers
from phonograph.engine.requests.request import FinishReason, Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Sampled, ScheduledStep
from phonograph.engine.scheduling.speculation_tally import SpeculationCounts, SpeculationTally
from phonograph.engine.text import Tokenizer
from server import tiny
from speculation import MAX_LEN, Driver, Even, check, oracle, plain, speculating

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPT = (5, 9, 200, 3)
DEPTH = 3


# -- without an engine ----------------------------------------------------------------------------------------


def decoding(before: int, max_outputs: int = 9, speculate: int | None = None) -> Sequence:
    """A sequence that has so many outputs."""
    request = Request("a", (1, 2), SamplingParams(max_tokens=max_outputs, speculate=speculate))
    sequence = Sequence(request, 0, max_outputs, frozenset({0}), rank=(1, 0, 0.0, 0))
    sequence.outputs += [7] * before
    return sequence


def noted(sequence: Sequence, tokens: tuple[int, ...], drafted: int = DEPTH, *, width: int = 4) -> SpeculationCounts:
    """The counts after one step, in which the device took these tokens."""
    tally, step = SpeculationTally(DEPTH), ScheduledStep(1, (sequence,), (), (), width, pass_name="x")
    taken, finish, _ = sequence.take([*tokens])
    tally.note(step, [(sequence, tuple(taken), finish)], Sampled([*tokens], [len(tokens)], drafted=[drafted]))
    return tally.counts


@pytest.mark.parametrize(
    ("before", "tokens", "drafted", "accepted"),
    [
        (1, (5, 5, 5, 5), (1, 1, 1), (1, 1, 1)),
        (1, (5,), (1, 1, 1), (0, 0, 0)),
        (5, (5, 5, 5, 5), (1, 1, 1), (1, 1, 1)),  # the last token is the target's own
        (6, (5, 5, 5), (1, 1, 0), (1, 1, 0)),
        (6, (5,), (1, 1, 0), (0, 0, 0)),
        (7, (5, 5), (1, 0, 0), (1, 0, 0)),
        (7, (5,), (1, 0, 0), (0, 0, 0)),
        (8, (5,), (0, 0, 0), (0, 0, 0)),  # a round all the same
    ],
)
def test_places_past_the_end_are_not_drafted(
    before: int, tokens: tuple[int, ...], drafted: tuple[int, ...], accepted: tuple[int, ...]
) -> None:
    sequence = decoding(before)
    found = noted(sequence, tokens)
    assert (found.rounds, found.tokens, found.drafted, found.accepted) == (1, len(tokens), drafted, accepted)
    assert (sequence.num_drafted, sequence.num_accepted) == (sum(drafted), sum(accepted))


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        ((5, 0, 5, 5), 1),  # the stop token was drafted too; what comes after it is dropped
        ((5, 0), 1),  # it is the target's: the second draft was another
        ((5, 5, 5, 0), 3),
        ((0,), 0),
        ((0, 5), 0),
    ],
)
def test_drafts_of_a_stop_token_and_after_it_are_none(tokens: tuple[int, ...], accepted: int) -> None:
    found = noted(decoding(1), tokens)
    assert sum(found.drafted) == sum(found.accepted) == accepted


@pytest.mark.parametrize(
    ("text", "drafts", "wanted"),
    [
        ("b.cd", (15, 3), (1, 1)),  # what comes after the stop string is dropped
        (".bcd", (3, 3), (0, 0)),
        ("b.", (3, 1), (1, 1)),  # the second draft was another
        ("bcd.", (3, 3), (3, 3)),
        (".", (0, 0), (0, 0)),  # a plain step
    ],
)
def test_drafts_after_a_stop_string_are_none(
    text: str, drafts: tuple[int, int], wanted: tuple[int, int], tmp_path: Path
) -> None:
    """As the front counts them, which finds the stop string; rounds before it count as they are."""
    tokenizer = Tokenizer.from_folder(tiny.write(tmp_path / "model"))
    first, second, last = (tuple(tokenizer.encode(part, add_special=False)) for part in ("a", "bc", text))
    request = Request("r", (1,), SamplingParams(stop=(".",), max_tokens=24))
    generation = Generation([request], tokenizer, Observers([]), lambda generation, left: None, eos_ids=())
    assert not generation.put(Output("r", 0, first), 0.0)
    assert not generation.put(Output("r", 0, second, drafts=(3, 1)), 0.0)
    assert generation.put(Output("r", 0, last, drafts=(3 + drafts[0], 1 + drafts[1])), 0.0)
    usage = generation.usage
    assert usage.output_tokens == 3 + len(text[: text.index(".") + 1])
    assert (usage.drafted_tokens - 3, usage.accepted_tokens - 1) == wanted


@pytest.mark.parametrize(
    ("sequence", "drafted", "width", "reason"),
    [
        (decoding(1), 0, 4, "no_draft"),
        (decoding(8), 0, 4, "no_draft"),
        (decoding(1), DEPTH, 1, "cost"),
        (decoding(1, speculate=0), DEPTH, 4, "request"),
        (decoding(1, speculate=0), DEPTH, 1, "request"),
    ],
)
def test_plain_steps_have_a_reason(sequence: Sequence, drafted: int, width: int, reason: str) -> None:
    found = noted(sequence, (5,), drafted, width=width)
    assert found.rounds == sequence.num_drafted == 0
    assert {name for name, count in found.plain.items() if count} == {reason}
    assert found.steps == {"round": int(width > 1), "plain": int(width == 1)}


def test_counts_in_words() -> None:
    assert str(noted(decoding(6), (5, 5))) == (
        "2.00 tokens a round over 1 rounds; accepted by position: 100%, 0%, –; 100% of 1 steps were rounds"
    )
    assert str(SpeculationTally(2).counts) == "no drafts verified yet"
    assert str(noted(decoding(1), (5,), 0, width=4)) == (
        "no drafts verified yet; decoded plainly: 1 by no_draft (there was no draft to verify); "
        "100% of 1 steps were rounds"
    )


def test_words_of_several_tokens_count_as_a_grammar_and_are_named() -> None:
    core = counting(0)
    Driver(core).run([(PROMPT, replace(GREEDY, max_tokens=4, bad_token_ids=((250, 251),)))])
    found = core.speculation.counts
    assert {reason for reason, count in found.plain.items() if count} == {"grammar"}
    assert "by grammar (a grammar, or forbidden words of several tokens)" in str(found)


# -- of an engine ---------------------------------------------------------------------------------------------


def counting(spoiled: int, max_ahead: int = 0, depth: int = DEPTH) -> EngineCore[Executor]:
    return speculating(oracle(depth, spoiled), "disabled", max_ahead=max_ahead, prefix_cache=False)


def usage(core: EngineCore[Executor], params: SamplingParams) -> tuple[int, int]:
    """(drafted, accepted) of one request."""
    sequences = Driver(core).run([(PROMPT, params)])
    check(sequences)
    return sequences[0].num_drafted, sequences[0].num_accepted


@pytest.mark.parametrize("max_ahead", [0, 3])
@pytest.mark.parametrize("spoiled", [0, 40, 100])
def test_usage_of_short_outputs_is_the_beginning_of_a_long_one_s(spoiled: int, max_ahead: int) -> None:
    """Drafts depend on places alone here: with `max_tokens` the same rounds run, and the last is cut off."""
    core = counting(spoiled, max_ahead)
    whole = list[tuple[int, int]]()  # (outputs before a round, accepted)
    [sequence] = core.add(Request("long", PROMPT, replace(GREEDY, max_tokens=20)))
    while not core.is_idle:
        whole += [(len(sequence.outputs) - len(new), len(new) - 1) for _, new, _ in core.step()]
    for max_tokens in range(1, 9):
        rooms = [(max_tokens - before - 1, accepted) for before, accepted in whole[1:] if before < max_tokens]
        wanted = sum(min(DEPTH, room) for room, _ in rooms), sum(min(accepted, room) for room, accepted in rooms)
        assert usage(core, replace(GREEDY, max_tokens=max_tokens)) == wanted, max_tokens


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_drafter_that_is_right_has_no_draft_rejected(max_tokens: int, depth: int) -> None:
    drafted, accepted = usage(counting(0, depth=depth), replace(GREEDY, max_tokens=max_tokens))
    assert drafted == accepted == max(0, max_tokens - 1 - -(-(max_tokens - 1) // (depth + 1)))


@pytest.mark.parametrize("offset", range(1, 9))
def test_nor_where_a_stop_token_ends_it(offset: int) -> None:
    stop = plain(PROMPT, GREEDY).tokens[offset]
    drafted, accepted = usage(counting(0, 2), replace(GREEDY, stop_token_ids=(stop,)))
    assert drafted == accepted


def test_nor_where_the_context_ends() -> None:
    core, long = counting(0, 2), tuple(range(30, 30 + MAX_LEN - 7))
    [sequence] = Driver(core).run([(long, replace(GREEDY, max_tokens=40))])
    assert (len(sequence.outputs), sequence.finish) == (7, FinishReason.LENGTH)
    assert sequence.num_drafted == sequence.num_accepted == 4


def test_a_place_for_which_nothing_was_drafted_is_not_counted() -> None:
    """The n-gram drafter knows nothing of tokens that never came before."""
    core = speculating(ngram(3), "disabled", max_ahead=0, prefix_cache=False)
    (found_for,) = Driver(core).run([(tuple(range(3, 9)), replace(GREEDY, max_tokens=2))])
    tokens = found_for.outputs
    found = core.speculation.counts
    assert len(set(range(3, 9)) | set(tokens)) == 8, "no token comes twice, or there might be a draft"
    assert (found.rounds, sum(found.drafted), found.plain["no_draft"]) == (0, 0, 1)
    again = (*range(3, 9), *tokens)
    Driver(core).run([((*again, *range(3, 9)), GREEDY), (again * 2, GREEDY)])
    found = core.speculation.counts
    assert found.drafted[0] > found.drafted[2] > 0, "what came before is drafted, up to the ends"


def test_drafts_are_counted_by_place_and_plain_rounds_by_reason() -> None:
    core = counting(0)
    Driver(core).run([(PROMPT, replace(GREEDY, max_tokens=25))])
    Driver(core).run([(PROMPT, replace(GREEDY, max_tokens=5, speculate=False))])
    core.add(Request("guided", (5, 6, 7), replace(GREEDY, max_tokens=4), run_ahead=False), [Even()])
    while not core.is_idle:
        core.step()
    found = core.speculation.counts
    assert (found.rounds, found.tokens, found.drafted, found.accepted) == (6, 24, (6, 6, 6), (6, 6, 6))
    assert found.plain == {"grammar": 3, "request": 4, "cost": 0, "no_draft": 0}
    assert found.steps == {"round": 6, "plain": 7}
    assert found.tokens_per_round == 4.0
    assert str(found).startswith("4.00 tokens a round over 6 rounds; accepted by position: 100%, 100%, 100%; decoded")


def test_rounds_that_end_bring_what_is_taken_of_them() -> None:
    core = counting(0, max_ahead=3)
    assert usage(core, replace(GREEDY, max_tokens=8)) == (5, 5)
    assert core.speculation.counts.rounds == 2, "rounds launched ahead of the end are none"
