"""The latest requests: what is kept of them, how many, and what is never kept."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.engine.process.traces import PassCounts, SequenceTrace
from phonograph.engine.requests.request import FinishReason, GrammarSpec, Request, SamplingParams
from phonograph.server.observe.request_book import MAX_CHOICES, MAX_REQUESTS, RequestBook


def request(name: str, n: int = 1) -> Request:
    grammar = GrammarSpec("regex", "secret pattern")
    return Request(
        name, (1, 2, 3), SamplingParams(n=n, stop=("secret stop",), grammar=grammar), deadline=70.0, arrival=10
    )


def trace(name: str, index: int = 0, eager: int = 0) -> SequenceTrace:
    prompt = (PassCounts("prefill", 1, {"too large": eager} if eager else {}),)
    output = (PassCounts("decode", 7, {}),)
    return SequenceTrace(name, index, FinishReason.LENGTH, 3, 0, 8, 0.5, 0.75, 2.0, 0, prompt, output)


def book() -> RequestBook:
    return RequestBook(clock=lambda: 1000.0, monotonic=lambda: 15.0)


def test_a_request_is_active_until_all_of_it_has_ended() -> None:
    found = book()
    found.started(request("a", n=2))
    (line,) = found.newest()
    assert (line.state, line.prompt_tokens, line.output_tokens, line.seconds) == ("active", 3, 0, 5.0)
    found.traced(trace("a", 1, eager=2))
    assert found.newest()[0].state == "active"
    found.traced(trace("a", 0))
    story = found.story("a")
    assert story is not None
    assert (story.line.state, story.line.output_tokens, story.line.seconds, story.line.eager) == ("length", 16, 2.0, 2)
    assert [one.index for one in story.traces] == [0, 1]
    assert (story.deadline, story.grammar, story.choices) == (60.0, "regex", 2)


def test_a_request_whose_core_went_down_has_ended() -> None:
    found = book()
    found.started(request("a"))
    found.is_live = lambda name: False
    assert found.newest()[0].state == "ended"


def test_no_text_of_a_request_is_kept() -> None:
    found = book()
    found.started(request("a"))
    found.traced(trace("a"))
    assert b"secret" not in msgspec.json.encode(found.story("a"))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3 * MAX_REQUESTS), max_size=60), st.integers(0, 2 * MAX_REQUESTS))
def test_it_never_grows_beyond_its_bound(names: list[int], flood: int) -> None:
    found = book()
    for name in (*names, *range(flood), *names):
        found.started(request(str(name)))
    kept = [name for name in {*map(str, names), *map(str, range(flood))} if found.story(name) is not None]
    assert len(kept) <= MAX_REQUESTS
    newest = list(dict.fromkeys(reversed([*map(str, range(flood)), *map(str, names)])))
    assert [line.id for line in found.newest()] == newest[:12]


def test_of_many_choices_the_first_to_end_are_kept_and_all_are_counted() -> None:
    found = book()
    found.started(request("a", n=100))
    for index in range(100):
        found.traced(trace("a", index))
    found.traced(trace("unknown"))
    story = found.story("a")
    assert story is not None
    assert (len(story.traces), story.line.output_tokens, story.line.state) == (MAX_CHOICES, 800, "length")
