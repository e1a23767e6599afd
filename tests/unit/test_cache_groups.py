"""Cache groups: layers of different shapes, pages counted in bytes, a second group on the same page numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged import DEVICE, Heads, case_of, spans_of
from phonograph.engine.cache.groups import CacheGroup, Paged, PagedCache, page_bytes
from phonograph.engine.ops.attention.prepared import PreparedAttention
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.queries import Queries, StepAttention

KINDS = st.lists(st.builds(Paged, st.sampled_from([1, 2, 8]), st.sampled_from([16, 32])), min_size=1, max_size=9)


def group_of(keeps: list[Paged], num_pages: int = 5, page_size: int = 4) -> CacheGroup:
    return CacheGroup.empty(keeps, num_pages, page_size, dtype=torch.float32, device=DEVICE)


@given(KINDS)
def test_every_layer_has_memory_of_its_own_and_shape(keeps: list[Paged]) -> None:
    group = group_of(keeps)
    for layer, ((cache, index), kept) in enumerate(zip(group.places, keeps, strict=True)):
        keys, values = cache.layers[index]
        assert keys.shape == values.shape == (5, 4, kept.num_kv_heads, kept.head_dim)
        keys.fill_(layer)
        values.fill_(-layer)
    for layer, (cache, index) in enumerate(group.places):
        assert (cache.keys[index] == layer).all()
        assert (cache.values[index] == -layer).all()
    assert len(group.caches) == len(set(keeps)), "layers of one shape are one allocation"


@given(KINDS, st.integers(1, 40), st.sampled_from([torch.float32, torch.float16]))
def test_a_page_costs_the_bytes_that_are_allocated_for_it(
    keeps: list[Paged], num_pages: int, dtype: torch.dtype
) -> None:
    group = CacheGroup.empty(keeps, num_pages, 4, dtype=dtype, device=DEVICE)
    assert sum(tensor.nbytes for tensor in group.tensors) == num_pages * page_bytes(keeps, 4, dtype)


def test_layers_of_one_shape_lie_as_one_tensor_in_their_order() -> None:
    group = group_of([Paged(2, 16)] * 3)
    (only,) = group.caches
    assert only.keys.shape == (3, 5, 4, 2, 16)
    assert [index for _, index in group.places] == [0, 1, 2]
    assert group.tensors == (only.keys, only.values)


def test_a_group_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no layers"):
        group_of([])


def test_a_second_group_has_the_same_page_numbers_and_memory_of_its_own() -> None:
    target = group_of([Paged(2, 16)] * 3, num_pages=7)
    drafter = target.beside([Paged(4, 32)], dtype=torch.float16)
    assert (drafter.num_pages, drafter.page_size) == (target.num_pages, target.page_size)
    assert drafter.tensors[0].dtype == torch.float16
    target.tensors[0].fill_(1.0)
    assert not drafter.tensors[0].any()
    keeps = [*[Paged(2, 16)] * 3, Paged(4, 32)]
    both = sum(tensor.nbytes for tensor in (*target.tensors, *target.beside([Paged(4, 32)]).tensors))
    assert both == 7 * page_bytes(keeps, 4, torch.float32)


class Counting:
    """Attention that notes what it is prepared for."""

    name = "counting"

    def __init__(self) -> None:
        self.prepared: list[tuple[int, int]] = []

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        self.prepared.append((cache.keys.shape[3], num_heads))
        return ReferenceAttention().prepare(cache, queries, num_heads)


@pytest.mark.parametrize("decode", [False, True])
def test_attention_is_prepared_once_for_each_shape(decode: bool) -> None:
    """Layers with other KV heads and head sizes in between give what each gives in a cache of its own."""
    spans = spans_of((5, 1), (2, 1)) if decode else spans_of((0, 5), (3, 4))
    shapes = [Heads(4, 2, 16), Heads(4, 1, 16), Heads(4, 2, 16), Heads(8, 2, 32), Heads(4, 1, 16)]
    cases = [case_of(spans, heads, decode=decode) for heads in shapes]
    keeps = [Paged(heads.kv, heads.dim) for heads in shapes]
    num_pages = cases[0].cache.keys.shape[1]
    group, counting = group_of(keeps, num_pages), Counting()
    attention = PreparedAttention(counting, group, cases[0].queries)
    for layer, case in enumerate(cases):
        keys, values = group.places[layer][0].layers[group.places[layer][1]]
        keys.copy_(case.cache.keys[1] * (layer + 1))
        values.copy_(case.cache.values[1] * (layer + 1))
        alone = replace(case.cache, keys=keys[None].clone(), values=values[None].clone())
        wanted = replace(case, cache=alone, queries=cases[0].queries).run(ReferenceAttention())
        assert torch.equal(attention.attend(layer, case.q, None)[: case.used], wanted)
    assert counting.prepared == [(2, 4), (1, 4), (2, 8)]
