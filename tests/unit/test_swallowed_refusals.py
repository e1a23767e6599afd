"""Swallowed refusals: what is refused while a body is warmed or recorded fails the recording, whatever catches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phonograph import Buckets, Graphed, Slot, current, graph_break, graphed
from phonograph.graphs.phases.context import Stage

NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged)


def made_from(body: Callable[..., Any], backend: str = "full", **others: Any) -> Graphed:
    return graphed(
        body, slots=[Slot("x", ("rows", 2), torch.float32)], bucketed="rows", buckets=Buckets.of(2, 4),
        backend=backend, device="emulated", **others,
    )  # fmt: skip


def trying(action: Callable[[torch.Tensor], object], *, raises: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """A body that does something, and gets over whatever that raises; or raises an error of its own."""

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        try:
            action(x)
        except Exception as error:
            if raises:
                raise ValueError("no answer") from error
        return y

    return body


def refusal_of(made: Graphed) -> str:
    """Why nothing is recorded, once it is called all the same."""
    report = made.capture(lambda *_: None)
    assert len(report.failures) == len(report.rows) == 2
    x = torch.ones(3, 2)
    torch.testing.assert_close(made(x=x), torch.full((3, 2), 2.0))
    return str(report.failures[0].error)


def read_at_capture(x: torch.Tensor) -> None:
    """A host read that no rehearsal sees."""
    if current().stage is Stage.CAPTURING:
        x.sum().item()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        pytest.param(lambda x: x.zero_(), "aten.zero_ writes the input 'x' in place", id="input"),
        pytest.param(lambda x: x.view(-1)[0].add_(1), "writes the input 'x' in place", id="view"),
        pytest.param(lambda x: NESTED * 2, "whose memory is that of other tensors", id="wrapped"),
        pytest.param(lambda x: torch.manual_seed(3), "torch.manual_seed sets the random numbers", id="seed"),
        pytest.param(
            lambda x: torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x,)),
            "branches on a device value",
            id="branch",
        ),
        pytest.param(read_at_capture, "reads the device from the host", id="at capture"),
        pytest.param(lambda x: x.tolist(), "reads the device from the host", id="method"),
    ],
)
def test_a_body_that_gets_over_it_is_not_recorded(action: Callable[[torch.Tensor], object], said: str) -> None:
    assert said in refusal_of(made_from(trying(action)))


def test_an_error_of_its_own_in_the_place_of_a_refusal_hides_nothing() -> None:
    report = made_from(trying(lambda x: x.zero_(), raises=True)).capture(lambda *_: None)
    assert len(report.failures) == 2
    assert all("aten.zero_ writes the input 'x' in place" in str(row.error) for row in report.failures)


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise"])
def test_other_backends_do_not_record_it_either(backend: str) -> None:
    assert "aten.zero_ writes the input 'x' in place" in refusal_of(made_from(trying(lambda x: x.zero_()), backend))


def test_verify_says_what_a_caught_write_does() -> None:
    made = made_from(trying(lambda x: x.zero_()))
    made.capture(lambda *_: None)
    assert not made.verify().ok


def test_a_gap_that_raises_in_a_trial_is_not_left_out_of_the_recording() -> None:
    @graph_break
    def gap(x: torch.Tensor) -> torch.Tensor:
        if current().stage is not Stage.EAGER:
            raise KeyError("nothing is known of this batch")
        return x

    assert "nothing is known of this batch" in refusal_of(made_from(trying(gap), "breakable"))


def test_a_gap_that_no_replay_could_call_is_not_left_out_of_the_recording() -> None:
    @graph_break
    def gap(parts: Any) -> None:
        next(parts)

    assert "is used up after one call" in refusal_of(made_from(trying(lambda x: gap(iter([x]))), "breakable"))


def test_a_read_of_a_live_argument_is_no_branch_to_record() -> None:
    def body(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
        try:
            return x * factor
        except Exception:
            return x

    assert "reads the live argument 'factor'" in refusal_of(made_from(body, "breakable", live=["factor"]))
