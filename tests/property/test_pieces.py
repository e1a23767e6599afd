"""Pieces: whatever ops, breaks and opaque calls a body is made of, what is put together again computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import ShapeKey, Stage, graph_break, opaque
from phonograph.graphs.phases.context import Current, tracing
from phonograph.graphs.recording.backends.base import BodyView, SizedAxis
from phonograph.graphs.recording.backends.compilers import COMPILERS
from phonograph.graphs.recording.backends.pieces import Program, program_of
from phonograph.graphs.recording.backends.traced import TracedGraph, Tracer

WEIGHT = torch.arange(16.0).view(4, 4) / 16


def both_fake(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a), torch.empty_like(b)


@graph_break(fake=both_fake)
def broken(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a * 0.5, a - b


hidden = opaque(lambda a, b: torch.where(a > b, a, b), fake=lambda a, b: torch.empty_like(a))


def _add(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(b)


into = opaque(_add, fake=lambda a, b: None, mutates=("a",))


def run(steps: Sequence[tuple[str, int, int]], x: torch.Tensor) -> list[torch.Tensor]:
    """Every step makes a value of two earlier ones, or changes one of its own."""
    values = [x * 1.0, x + 1.0]
    for op, first, second in steps:
        a, b = values[first % len(values)], values[second % len(values)]
        if op == "add":
            values.append(a + b)
        elif op == "product":
            values.append(torch.tanh(a @ WEIGHT))
        elif op == "sized":
            values.append(a * b.shape[0])
        elif op == "break":
            values += broken(a, b)
        elif op == "opaque":
            values.append(hidden(a, b))
        elif a is not b:
            into(a, b * 0.25)
    return values[-3:]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "product", "sized", "break", "opaque", "into"]), st.integers(0, 9), st.integers(0, 9)
    ),
    max_size=8,
)


def make(graph: TracedGraph) -> Program:
    return program_of(graph, (), {}, COMPILERS["eager"])


@settings(max_examples=12, deadline=None)
@given(steps=STEPS)
def test_pieces_compute_what_the_body_does(steps: list[tuple[str, int, int]]) -> None:
    def traced(batch: Any, kwargs: Any) -> Any:
        return run(steps, batch["x"])

    tracer = Tracer(traced, make)
    for num in (6, 2, 1):
        x = torch.randn(num, 4)
        view = BodyView(ShapeKey("p", "seqs", num), {"x": x}, {}, [SizedAxis(x, 0, "seqs")])
        with tracing(Current(stage=Stage.COMPILING)):
            call = tracer.call(view)
        graph = call.program.graph
        assert not graph.misfit(call.flat)
        with torch.no_grad():
            found = call.program.run(call.flat, graph.sizes(call.flat), checks=True)
        by_stand_in = {id(one): value for one, value in zip(call.stand_ins, found, strict=True)}
        for one, wanted in zip(call.result, run(steps, x), strict=True):
            torch.testing.assert_close(by_stand_in[id(one)], wanted)
