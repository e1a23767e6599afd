"""Properties of the pool: the order of requests does not matter, every lease is big enough, keys don't overlap."""

from __future__ import annotations

import random as randoms
from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph.devices import EmulatedDevice
from phonograph.graphs.inputs.pool import BufferPool, Lease
from phonograph.sizes import next_power_of_two

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
    largest = {lease.key: lease.allocation for lease in leases}
    private = []
    for lease in own:
        fits = lease.key in largest and largest[lease.key].numel() >= lease.num_elements
        assert lease.shared == fits
        if fits:
            assert lease.tensor.data_ptr() == largest[lease.key].data_ptr()
        else:
            private.append(lease.tensor.data_ptr())
    assert len({*private, *before}) == len(private) + len(set(before))
    assert len(pool.report().private) == len(private)


@st.composite
def views(draw: st.DrawFn) -> list[tuple[int, tuple[slice, ...]]]:
    """Cuts out of a few tensors of 6 by 4."""
    cuts = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 3), st.integers(1, 4))
    drawn = draw(st.lists(st.tuples(st.integers(0, 2), cuts), min_size=1, max_size=6))
    return [
        (which, (slice(top, max(top + 1, bottom)), slice(left, max(left + 1, right))))
        for which, (top, bottom, left, right) in drawn
    ]


@given(views(), st.randoms(use_true_random=False), st.integers(0, 2))
def test_shared_in_fields_alias_each_other_as_before(
    cuts: list[tuple[int, tuple[slice, ...]]], random: randoms.Random, dtype_of: int
) -> None:
    """A write through any field shows in the others as it did before, in whatever order objects come."""
    dtypes = [torch.int64, torch.int32, torch.float32]
    bases = [torch.arange(24).view(6, 4).to(dtypes[(dtype_of + number) % 3]) for number in range(3)]
    model = [base.clone() for base in bases]
    objects = [{f"field{index}": bases[which][cut]} for index, (which, cut) in enumerate(cuts)]
    pool = BufferPool(EmulatedDevice())
    for target in random.sample(objects, len(objects)):
        pool.share_in(target)
    pool.seal()
    for index, (target, (which, cut)) in enumerate(zip(objects, cuts, strict=True)):
        target[f"field{index}"].fill_(100 + index)
        model[which][cut] = 100 + index
        for other, (shown, (base, part)) in enumerate(zip(objects, cuts, strict=True)):
            assert torch.equal(shown[f"field{other}"], model[base][part])


@given(st.integers(0, 2**62))
def test_next_power_of_two_is_the_smallest_that_holds(size: int) -> None:
    power = next_power_of_two(size)
    assert power.bit_count() == 1
    assert power >= size
    assert power == 1 or power // 2 < size
