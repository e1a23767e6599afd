"""bench/host_of_rounds.py: what is launched without a model keeps the engine's books right."""

from __future__ import annotations

from host_of_rounds import Bookkeeping, measured, opened


def test_rounds_without_a_model_bring_tokens() -> None:
    books = Bookkeeping(opened("ngram", 3), 3)
    before = books.core.scheduler.counts.generated_tokens
    assert books.microseconds(prompts=True) > 0
    counts = books.core.scheduler.counts
    assert counts.generated_tokens - before > 3 * 40
    assert books.core.speculation.counts.rounds > 100
    while not books.core.is_idle:
        books.core.step()
    books.core.scheduler.integrity()


def test_it_measures_every_case() -> None:
    found = measured(2, rounds=1)
    assert all(time > 0 for times in found.values() for time in times.values())
    assert [list(times) for times in found.values()] == [["steady", "among prompts"]] * 3
