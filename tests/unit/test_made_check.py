"""What a compiler made of a body is compared by how far it is off, at the ends of what numbers there are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from phonograph import CaptureError
from phonograph.graphs.recording.backends.traced import TracedGraph
from phonograph.graphs.recording.made_check import Outcome, refuse_another_result

ONES = torch.ones(4)


def refused(found: torch.Tensor, wanted: torch.Tensor, rounds_in: torch.dtype = torch.float32) -> bool:
    try:
        refuse_another_result(Outcome(found, []), Outcome(wanted, []), None, rounds_in)
    except CaptureError:
        return True
    return False


@pytest.mark.parametrize(
    ("found", "wanted", "is_refused"),
    [
        (ONES, ONES, False),
        (ONES * 1.001, ONES, False),
        (ONES * 1.1, ONES, True),
        (ONES * 0, ONES * 0, False),
        (ONES * 1e-9, ONES * 0, False),
        (ONES * 1e-3, ONES * 0, True),
        (ONES * 0, ONES, True),
        (torch.tensor([math.nan, 1.0]), torch.ones(2), True),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), False),
        (torch.tensor([-math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), False),
        (torch.full((2,), math.nan), torch.full((2,), math.nan), False),
        (torch.empty(0), torch.empty(0), False),
        (torch.ones(2, dtype=torch.bfloat16) * 1.1, torch.ones(2, dtype=torch.bfloat16), False),
        (torch.ones(2, dtype=torch.bfloat16) * 1.5, torch.ones(2, dtype=torch.bfloat16), True),
    ],
)
def test_how_far_a_compiler_may_be_off(found: torch.Tensor, wanted: torch.Tensor, is_refused: bool) -> None:
    assert refused(found, wanted) is is_refused


def test_values_are_as_exact_as_what_they_are_computed_from() -> None:
    scores = torch.tensor([-5.72, -2.43])
    assert refused(scores * 1.02, scores)
    assert not refused(scores * 1.02, scores, torch.bfloat16)
    assert refused(scores * 1.5, scores, torch.bfloat16)
    assert refused(scores.double() * 1.001, scores.double(), torch.float64)


def test_a_trace_tells_the_coarsest_dtype_that_it_computes_in() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2, dtype=torch.float64)
    parts = graph.call_function(torch.split, (x, 1))
    parts.meta["example_value"] = (torch.ones(1), [torch.ones(1, dtype=torch.bfloat16), torch.ones(1).half()], 3)
    graph.output((parts,))
    assert TracedGraph(fx.GraphModule(torch.nn.Module(), graph)).coarsest is torch.bfloat16
    whole = fx.Graph()
    numbers = whole.placeholder("x")
    numbers.meta["example_value"] = torch.ones(2, dtype=torch.int64)
    whole.output((numbers,))
    assert TracedGraph(fx.GraphModule(torch.nn.Module(), whole)).coarsest is None


def refusal_of(found: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor, rounds_in: torch.dtype | None) -> str:
    made, body = (Outcome(ONES, [], {"cache": state}, {"cache": before}) for state in (found, wanted))
    try:
        refuse_another_result(made, body, None, rounds_in)
    except CaptureError as error:
        return str(error)
    return ""


def test_written_state_is_compared_and_what_lies_around_it_hides_nothing() -> None:
    before = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    wanted = before.clone()
    wanted[:4] = 1.0
    near, far, nothing, other = (wanted.clone() for _ in range(4))
    near[:4] *= 1.001
    far[:4] *= 1.5
    nothing[:4] = before[:4]
    other[0] = -1.0
    assert not refusal_of(wanted.clone(), wanted, before, torch.float32)
    assert not refusal_of(near, wanted, before, torch.float32)
    # One row of four after another pick.
    assert not refusal_of(other, wanted, before, torch.float32)
    for wrong in (far, nothing, torch.full_like(wanted, math.nan)):
        assert "the state cache differs in 100% of the vectors" in refusal_of(wrong, wanted, before, torch.float32)
    for wrong in (near, other):
        assert "the state cache has" in refusal_of(wrong, wanted, before, None)


def test_what_is_not_finite_in_both_is_not_apart() -> None:
    before, wanted = torch.zeros(4, 3), torch.tensor([[-math.inf, 1.0, math.nan]]).repeat(4, 1)
    other = wanted * torch.tensor([1.0, 2.0, 1.0])
    assert not refusal_of(wanted.clone(), wanted, before, torch.float32)
    for wrong in (other, wanted.nan_to_num(), before):
        assert "differs in 100% of the vectors" in refusal_of(wrong, wanted, before, torch.float32)


@pytest.mark.parametrize("rounds_in", [None, torch.float32])
def test_what_differs_between_runs_of_the_body_excuses_nothing_else(rounds_in: torch.dtype | None) -> None:
    clock = iter(range(10))

    def outcome(steady: torch.Tensor, state: torch.Tensor = ONES) -> Outcome:
        return Outcome({"clock": ONES * (1 + next(clock)), "steady": steady}, [], {"cache": state}, {"cache": ONES * 0})

    refuse_another_result(outcome(ONES), outcome(ONES), lambda: outcome(ONES), rounds_in)
    with pytest.raises(CaptureError, match=r"output \['steady'\] has 2"):
        refuse_another_result(outcome(ONES * 2), outcome(ONES), lambda: outcome(ONES), rounds_in)
    with pytest.raises(CaptureError, match="the state cache"):
        refuse_another_result(outcome(ONES, ONES * 2), outcome(ONES), lambda: outcome(ONES), rounds_in)


def test_a_body_that_rounds_otherwise_in_every_run_excuses_no_more_than_that() -> None:
    with pytest.raises(CaptureError, match="the output has 2"):
        refuse_another_result(
            Outcome(ONES * 2, []), Outcome(ONES, []), lambda: Outcome(ONES * 1.005, []), torch.float32
        )
