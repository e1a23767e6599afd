"""Buckets: which sizes get a graph, and which of them serves a batch."""

from __future__ import annotations

from typing import Any

import pytest

from phonograph.errors import DeclarationError
from phonograph.graphs.phases.buckets import Buckets


def test_fit_is_the_smallest_that_holds() -> None:
    buckets = Buckets.of(2, 4, 8)
    assert [buckets.fit(used) for used in range(10)] == [2, 2, 2, 4, 4, 8, 8, 8, 8, None]


def test_exact_serves_only_its_sizes() -> None:
    buckets = Buckets.of(2, 4, exact=True)
    assert [buckets.fit(used) for used in range(6)] == [None, None, 2, None, 4, None]


@pytest.mark.parametrize("limit", [1, 2, 3, 97, 100, 256, 257, 4096, 5000])
def test_the_top_is_closed(limit: int) -> None:
    for buckets in (Buckets.up_to(limit), Buckets.tokens_up_to(limit)):
        assert buckets.largest == limit
        assert buckets.fit(limit) == limit
        assert buckets.fit(limit + 1) is None


def test_sizes_for_sequences() -> None:
    assert Buckets.up_to(40).sizes == (1, 2, 4, 8, 12, 16, 24, 32, 40)
    assert len(Buckets.up_to(256)) == 36


def test_sizes_for_tokens_are_coarser() -> None:
    assert Buckets.tokens_up_to(64).sizes == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert len(Buckets.tokens_up_to(8192)) == 58


def test_sizes_are_sorted_and_unique_whatever_they_came_in() -> None:
    assert Buckets((8, 2, 8)).sizes == (2, 8)
    listed: Any = [2, 4]
    assert hash(Buckets(listed)) == hash(Buckets.of(2, 4))
    assert list(Buckets.of(4, 2)) == [2, 4]


@pytest.mark.parametrize(
    ("sizes", "word"),
    [((), "empty"), ((0, 2), "positive"), ((-1,), "positive"), ((True,), "positive"), ((2.0,), "positive"), (8, "of(")],
)
def test_bad_sizes_are_refused(sizes: Any, word: str) -> None:
    with pytest.raises(DeclarationError, match=word.replace("(", r"\(")):
        Buckets(sizes)


@pytest.mark.parametrize("limit", [0, -4, True, 2.5, None])
def test_bad_limits_are_refused(limit: Any) -> None:
    with pytest.raises(DeclarationError, match="positive whole number"):
        Buckets.up_to(limit)
