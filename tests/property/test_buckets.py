"""Properties of buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phonograph.graphs.phases.buckets import Buckets

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=20)


@given(SIZES, st.integers(0, 320))
def test_fit_is_the_smallest_that_holds(sizes: list[int], used: int) -> None:
    holding = [size for size in sizes if size >= used]
    assert Buckets(tuple(sizes)).fit(used) == (min(holding) if holding else None)


@given(SIZES, st.integers(0, 320))
def test_exact_fits_its_own_sizes_and_no_other(sizes: list[int], used: int) -> None:
    assert Buckets(tuple(sizes), exact=True).fit(used) == (used if used in sizes else None)


@given(st.integers(1, 20_000), st.data())
def test_a_limit_serves_everything_up_to_itself(limit: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(1, limit))
    for buckets in (Buckets.up_to(limit), Buckets.tokens_up_to(limit)):
        assert buckets.fit(limit) == limit
        assert buckets.fit(limit + 1) is None
        size = buckets.fit(used)
        assert size is not None
        assert used <= size <= limit


@given(st.integers(1, 20_000))
def test_generated_sizes_ascend(limit: int) -> None:
    for buckets in (Buckets.up_to(limit), Buckets.tokens_up_to(limit)):
        assert list(buckets) == sorted(set(buckets))
