"""Properties of the pool: the order of requests does not matter, every lease is big enough, keys don't overlap."""

from __future__ import annotations

import random as randoms
from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph.devices import EmulatedDevice
from phonograph.graphs.pool import BufferPool, Lease, next_power_of_two

Request = tuple[str, int, torch.dtype]

REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["ids", "rows", "mask"]),
        st.integers(1, 100),
        st.sampled_from([torch.int64, torch.int32, torch.bool]),
    ),
    min_size=1,
    max_size=12,
)


def sealed(requests: list[Request]) -> tuple[BufferPool, list[Lease]]:
    pool = BufferPool(EmulatedDevice())
    leases = [pool.request(name, count, dtype, torch.device("cpu"), "owner") for name, count, dtype in requests]
    pool.seal()
    return pool, leases


def sharing(leases: list[Lease]) -> set[tuple[str, torch.dtype, int, int]]:
    """What each lease got: its size, and the size of the allocation it lies in."""
    return {(one.name, one.dtype, one.num_elements, one.tensor.untyped_storage().nbytes()) for one in leases}


@given(REQUESTS, st.randoms(use_true_random=False))
def test_the_result_does_not_depend_on_the_order(requests: list[Request], random: randoms.Random) -> None:
    shuffled = random.sample(requests, len(requests))
    first, first_leases = sealed(requests)
    second, second_leases = sealed(shuffled)
    assert first.report() == second.report()
    assert sharing(first_leases) == sharing(second_leases)


@given(REQUESTS)
def test_every_lease_is_big_enough_and_equal_keys_share(requests: list[Request]) -> None:
    pool, leases = sealed(requests)
    largest: dict[tuple[str, torch.dtype], int] = {}
    for name, count, dtype in requests:
        largest[name, dtype] = max(count, largest.get((name, dtype), 0))
    for lease, (name, count, dtype) in zip(leases, requests, strict=True):
        assert lease.tensor.numel() == count
        assert lease.tensor.dtype == dtype
        assert lease.tensor.untyped_storage().nbytes() == largest[name, dtype] * dtype.itemsize
    for one, other in combinations(leases, 2):
        shares = one.tensor.data_ptr() == other.tensor.data_ptr()
        assert shares == (one.key == other.key)
    assert pool.report().bytes_allocated == sum(n * dtype.itemsize for (_, dtype), n in largest.items())


@given(REQUESTS)
def test_leases_of_different_keys_do_not_overlap(requests: list[Request]) -> None:
    _, leases = sealed(requests)
    ends = {
        one.key: (one.tensor.data_ptr(), one.tensor.data_ptr() + one.tensor.untyped_storage().nbytes())
        for one in leases
    }
    for (start, end), (other_start, other_end) in combinations(ends.values(), 2):
        assert end <= other_start or other_end <= start


@given(REQUESTS, REQUESTS)
def test_later_requests_move_nothing(requests: list[Request], late: list[Request]) -> None:
    pool, leases = sealed(requests)
    before = [lease.tensor.data_ptr() for lease in leases]
    own = [pool.request(name, count, dtype, torch.device("cpu"), "late") for name, count, dtype in late]
    assert [lease.tensor.data_ptr() for lease in leases] == before
    addresses = [lease.tensor.data_ptr() for lease in own]
    assert len({*addresses, *before}) == len(addresses) + len(set(before))
    assert len(pool.report().private) == len(late)


@given(st.integers(0, 2**62))
def test_next_power_of_two_is_the_smallest_that_holds(size: int) -> None:
    power = next_power_of_two(size)
    assert power.bit_count() == 1
    assert power >= size
    assert power == 1 or power // 2 < size
