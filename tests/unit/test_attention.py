"""Attention over pages: the reference and Triton (interpreted where there is no GPU) against float64 by hand."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from paged import DEVICE, LAUNCHES, Heads, by_hand, case_of, spans_of
from phonograph.engine.ops.attention.apart import ApartAttention
from phonograph.engine.ops.attention.cpu import CpuAttention
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.kernels import Places
from phonograph.engine.ops.layers.reference import store
from phonograph.engine.ops.native.library import library
from phonograph.engine.ops.queries import Attention, Scores
from phonograph.errors import DeviceError

SPANS = {
    "decode": spans_of((0, 1), (6, 1), (19, 1)),
    "prefill": spans_of((0, 9)),
    "cached prefix": spans_of((7, 6)),
    "mixed": spans_of((10, 1), (0, 5), (3, 8), (40, 1)),
}


def implementations() -> dict[str, Attention]:
    found: dict[str, Attention] = {"reference": ReferenceAttention()}
    with suppress(DeviceError):
        found |= {"cpu": CpuAttention(library())} if DEVICE.type == "cpu" else {}
    try:
        from phonograph.engine.ops.attention.triton import TritonAttention
    except ImportError:
        return found
    return {**found, "triton": TritonAttention(LAUNCHES)}


IMPLEMENTATIONS = implementations()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(9, 3, 64), Heads(6, 2, 24)], ids=str)
@pytest.mark.parametrize("kind", list(SPANS))
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_every_token_sees_its_sequence_up_to_itself(name: str, kind: str, heads: Heads, window: int | None) -> None:
    case = case_of(SPANS[kind], heads, padding=3)
    found = case.run(IMPLEMENTATIONS[name], 1, window)
    torch.testing.assert_close(found.double(), by_hand(case, 1, window), rtol=1e-4, atol=1e-4)


SCORES = {
    "scale": Scores(scale=0.7),
    "softcap": Scores(softcap=1.5),
    "sinks": Scores(sinks=torch.tensor([-2.0, 0.0, 3.0, 40.0], device=DEVICE)),
    "all": Scores(0.4, 2.0, torch.tensor([1.0, -1.0, 0.5, -40.0], device=DEVICE)),
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", list(SPANS))
@pytest.mark.parametrize("scores", list(SCORES))
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_scores_are_scaled_bent_and_sunk(name: str, scores: str, kind: str, told: bool, window: int | None) -> None:
    """Whether the host knows the sequences or not; and where the numbers of a token's heads lie far apart."""
    case = case_of(SPANS[kind], Heads(4, 2, 16), padding=3, decode=kind == "decode" and not told)
    if told:
        case = replace(case, queries=replace(case.queries, spans=tuple(SPANS[kind])))
    wanted = by_hand(case, 1, window, SCORES[scores])
    by_head = replace(case, q=case.q.transpose(0, 1).contiguous().transpose(0, 1))
    for one in (case, by_head):
        found = one.run(IMPLEMENTATIONS[name], 1, window, SCORES[scores])
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_untold", range(5))
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_tokens_that_spans_tell_nothing_of_are_attended_apart(name: str, num_untold: int, window: int | None) -> None:
    """As rounds of three tokens, whose places only the device knows, before prompts."""
    spans = spans_of((10, 3), (0, 3), (3, 8), (40, 1))
    case = case_of(spans, Heads(4, 2, 16), padding=3)
    count = sum(span.count for span in spans[:num_untold])
    told = replace(case, queries=replace(case.queries, spans=tuple(spans[num_untold:]), spans_from=count))
    found = told.run(ApartAttention(IMPLEMENTATIONS[name]), 1, window)
    torch.testing.assert_close(found.double(), by_hand(case, 1, window), rtol=1e-4, atol=1e-4)
    out = torch.full_like(case.q, float("nan"))
    assert (
        ApartAttention(IMPLEMENTATIONS[name]).prepare(case.cache, told.queries, 4).attend(1, case.q, window, out) is out
    )
    assert torch.equal(out[: case.used], found)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", list(SPANS))
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_what_lies_behind_a_sequence_is_not_seen_even_if_it_is_not_finite(
    name: str, kind: str, window: int | None
) -> None:
    """As a sequence that failed leaves it in the rest of the last page, and in pages that others list next."""
    case = case_of(SPANS[kind], Heads(4, 2, 16))
    size, own = case.cache.page_size, torch.zeros(case.cache.keys.shape[1:3], dtype=torch.bool, device=DEVICE)
    for span in SPANS[kind]:
        at = torch.arange(span.start + span.count, device=DEVICE)
        own[case.queries.table[span.row, at // size].long(), at % size] = True
    for part in (case.cache.keys, case.cache.values):
        part[:, ~own] = float("nan")
    for queries in (case.queries, replace(case.queries, spans=tuple(SPANS[kind]))):
        found = replace(case, queries=queries).run(IMPLEMENTATIONS[name], 1, window)
        torch.testing.assert_close(found.double(), by_hand(case, 1, window), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(SPANS))
def test_spans_change_the_way_not_the_result(kind: str) -> None:
    case = case_of(SPANS[kind], Heads(4, 2, 16))
    with_spans = replace(case, queries=replace(case.queries, spans=tuple(SPANS[kind])))
    attention = ReferenceAttention()
    torch.testing.assert_close(with_spans.run(attention), case.run(attention))


@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_bfloat16_is_near_float64(name: str) -> None:
    if name == "triton" and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter does not compute in bfloat16")
    case = case_of(SPANS["mixed"], Heads(8, 2, 64), dtype=torch.bfloat16)
    found, wanted = case.run(IMPLEMENTATIONS[name]), by_hand(case)
    assert ((found.double() - wanted).norm() / wanted.norm()).item() <= 1e-2


def test_store_writes_each_token_to_its_place_and_nothing_else() -> None:
    case = case_of(SPANS["mixed"], Heads(4, 2, 16))
    cache, queries, size = case.cache, case.queries, case.cache.page_size
    before = cache.keys.clone()
    k, v = torch.randn(2, len(queries.positions), 2, 16, device=DEVICE).unbind(0)
    pages = queries.table[queries.rows, queries.positions // size].long()
    slots = pages * size + queries.positions % size
    store(cache, 1, Places(torch.empty(0), torch.empty(0), slots), k, v)
    touched = torch.zeros(cache.keys.shape[:3], dtype=torch.bool, device=DEVICE)
    for token, position in enumerate(queries.positions.tolist()):
        page = int(queries.table[queries.rows[token], position // size])
        torch.testing.assert_close(cache.keys[1, page, position % size], k[token])
        torch.testing.assert_close(cache.values[1, page, position % size], v[token])
        touched[1, page, position % size] = True
    assert torch.equal(cache.keys[~touched], before[~touched])
