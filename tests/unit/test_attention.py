"""Attention over pages: the reference by hand, and Triton (interpreted where there is no GPU) against the reference."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from phonograph.engine.attention.base import Attention, PagedCache, Queries, Span
from phonograph.engine.attention.reference import ReferenceAttention
from phonograph.engine.kernels.reference import store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 4


def cache_and_queries(
    spans: list[Span], num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[PagedCache, Queries, torch.Tensor]:
    """A random cache in shuffled pages, and queries of these spans."""
    torch.manual_seed(0)
    most = max(-(-(span.start + span.count) // PAGE) for span in spans)
    cache = PagedCache.empty(2, 1 + most * len(spans), PAGE, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    cache.keys.normal_()
    cache.values.normal_()
    pages = (torch.randperm(most * len(spans)) + 1).view(len(spans), most).int()
    table = torch.cat([torch.zeros(1, most, dtype=torch.int32), pages]).to(DEVICE)
    rows = torch.tensor([span.row for span in spans for _ in range(span.count)], device=DEVICE)
    places = [span.start + offset for span in spans for offset in range(span.count)]
    positions = torch.tensor(places, device=DEVICE)
    q = torch.randn(len(places), num_heads, head_dim, device=DEVICE).to(dtype)
    return cache, Queries(rows, positions, table, one_per_sequence=False), q


def by_hand(cache: PagedCache, layer: int, queries: Queries, q: torch.Tensor, window: int | None) -> torch.Tensor:
    """One query at a time, in float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // cache.keys.shape[3]
    for token in range(q.shape[0]):
        position = int(queries.positions[token])
        first = 0 if window is None else max(0, position - window + 1)
        pages = queries.table[queries.rows[token]].long()
        keys = cache.keys[layer][pages].flatten(0, 1)[first : position + 1].double()
        values = cache.values[layer][pages].flatten(0, 1)[first : position + 1].double()
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[token, head].double() * q.shape[2] ** -0.5
            out[token, head] = scores.softmax(0) @ values[:, head // group]
    return out


SPANS = {
    "decode": [Span(1, 0, 0, 1), Span(2, 1, 6, 1), Span(3, 2, 19, 1)],
    "prefill": [Span(1, 0, 0, 9)],
    "cached prefix": [Span(1, 0, 7, 6)],
    "mixed": [Span(1, 0, 10, 1), Span(2, 1, 0, 5), Span(3, 6, 3, 8), Span(4, 14, 70, 1)],
}


def implementations() -> dict[str, Attention]:
    found: dict[str, Attention] = {"reference": ReferenceAttention()}
    try:
        from phonograph.engine.attention.triton import TritonAttention
    except ImportError:
        return found
    return {**found, "triton": TritonAttention()}


IMPLEMENTATIONS = implementations()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 64), (8, 8, 32), (6, 2, 24)], ids=str)
@pytest.mark.parametrize("kind", list(SPANS))
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_every_token_sees_its_sequence_up_to_itself(
    name: str, kind: str, heads: tuple[int, int, int], window: int | None
) -> None:
    cache, queries, q = cache_and_queries(SPANS[kind], *heads)
    found = IMPLEMENTATIONS[name].prepare(cache, queries).attend(1, q, window)
    torch.testing.assert_close(found.double(), by_hand(cache, 1, queries, q, window), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(SPANS))
def test_spans_change_the_way_not_the_result(kind: str) -> None:
    cache, queries, q = cache_and_queries(SPANS[kind], 4, 2, 16)
    spans = replace(queries, spans=tuple(SPANS[kind]))
    attention = ReferenceAttention()
    by_span, by_token = (attention.prepare(cache, given).attend(0, q, None) for given in (spans, queries))
    torch.testing.assert_close(by_span, by_token)


@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_bfloat16_is_near_float64(name: str) -> None:
    if name == "triton" and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter does not compute in bfloat16")
    cache, queries, q = cache_and_queries(SPANS["mixed"], 8, 2, 64, torch.bfloat16)
    found = IMPLEMENTATIONS[name].prepare(cache, queries).attend(0, q, None)
    wanted = by_hand(cache, 0, queries, q, None)
    assert ((found.double() - wanted).norm() / wanted.norm()).item() <= 1e-2


def test_store_writes_each_token_to_its_place_and_nothing_else() -> None:
    cache, queries, _ = cache_and_queries(SPANS["mixed"], 4, 2, 16)
    before = cache.keys.clone()
    k, v = torch.randn(2, len(queries.positions), 2, 16, device=DEVICE).unbind(0)
    store(cache, 1, queries, k, v)
    touched = torch.zeros(cache.keys.shape[:3], dtype=torch.bool, device=DEVICE)
    for token, position in enumerate(queries.positions.tolist()):
        page = int(queries.table[queries.rows[token], position // PAGE])
        torch.testing.assert_close(cache.keys[1, page, position % PAGE], k[token])
        torch.testing.assert_close(cache.values[1, page, position % PAGE], v[token])
        touched[1, page, position % PAGE] = True
    assert torch.equal(cache.keys[~touched], before[~touched])
