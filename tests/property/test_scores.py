"""Scores: any scale, soft cap, sinks and window, over any step, as by hand in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged import DEVICE, Heads, by_hand, case_of, spans_of
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.queries import Scores

SEQUENCES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 7)), min_size=1, max_size=4)
GROUPS = st.sampled_from([Heads(2, 2, 4), Heads(4, 2, 8), Heads(3, 1, 6)])


@settings(max_examples=60, deadline=None)
@given(
    sequences=SEQUENCES,
    heads=GROUPS,
    window=st.none() | st.integers(1, 9),
    scale=st.none() | st.floats(0.01, 4.0),
    softcap=st.none() | st.floats(0.1, 50.0),
    sinks=st.none() | st.lists(st.floats(-60.0, 60.0), min_size=4, max_size=4),
    told=st.booleans(),
)
def test_the_reference_computes_what_the_formula_says(
    sequences: list[tuple[int, int]],
    heads: Heads,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: list[float] | None,
    told: bool,
) -> None:
    spans = spans_of(*sorted(sequences, key=lambda one: one[1]))  # those that decode stand first
    case = case_of(spans, heads, padding=2)
    if told:
        case = replace(case, queries=replace(case.queries, spans=tuple(spans)))
    given_sinks = None if sinks is None else torch.tensor(sinks[: heads.queries], device=DEVICE)
    scores = Scores(scale, softcap, given_sinks)
    found = case.run(ReferenceAttention(), 1, window, scores)
    torch.testing.assert_close(found.double(), by_hand(case, 1, window, scores), rtol=1e-3, atol=1e-4)
