"""Bugs of phases: plans, axes, and outputs whose form or content depends on padding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from phonograph import Axis, Pad, Slot
from zoo.animals import WIDTH, Mechanism, Run, Subject, X, ints, rows, sampled
from zoo.host_values import phase
from zoo.judge import bug
from zoo.python_state import repeated


@bug(Mechanism.ADDRESSES, names="indptr", has_line=False)
def plan_makes_new_tensors(on: torch.device) -> Subject:
    """An attention library's plan() makes a new tensor for every step, and the graph reads the first one."""
    wrapper = SimpleNamespace(indptr=torch.zeros((), device=on))

    def plan(batch: Any, extent: Any) -> None:
        wrapper.indptr = batch["x"].detach()[0, 0].clone()

    def body(batch: Any) -> Tensor:
        return batch["x"] * wrapper.indptr

    def eagerly(batch: Any) -> Tensor:
        plan(batch, None)
        return body(batch)

    subject = phase(body, on, *({"x": rows(on, 3, seed)} for seed in (1, 2, 3)), host_plan=plan)
    return replace(subject, eager=eagerly)


@bug(Mechanism.OUTPUTS)
def axis_stands_in_wrongly(on: torch.device) -> Subject:
    """The recording for sampled batches is said to serve greedy ones too, and scales them."""
    axis = Axis(
        "sampling",
        ("greedy", "sampled"),
        of=lambda batch: batch["mode"],
        apply=lambda batch, value: batch | {"mode": value},
        unrecorded=frozenset({"greedy"}),
        stands_in=True,
    )

    def body(batch: Any) -> Tensor:
        return batch["x"] if batch["mode"] == "greedy" else batch["x"] * 2

    batches = [{"x": rows(on, 3, seed), "mode": mode} for seed, mode in enumerate(("sampled", "greedy"))]
    return phase(body, on, *batches, fields={"mode": lambda seed: "greedy"}, axes=[axis])


@bug(Mechanism.OTHER, names="bias")
def absent_value_that_is_not_neutral(on: torch.device) -> Subject:
    """A slot says that 1 stands for no bias, and the body adds it; without a bias nothing is to be added."""
    bias = Slot("bias", ("rows",), torch.float32, absent=1.0)

    def step(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x if bias is None else x + bias[:, None]

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1), bias=torch.full((3,), 2.0, device=on))
        run(x=rows(on, 3, 2), bias=None)

    return Subject(step, calls, slots=[X, bias])


@bug(Mechanism.OUTPUTS, names="extra", has_line=False)
def further_output_with_padding(on: torch.device) -> Subject:
    """A further output is returned for more than six rows, which a padded batch of five has."""

    def step(x: Tensor) -> dict[str, Tensor]:
        return {"y": x * 2} | ({"extra": x[:, 0]} if x.shape[0] > 6 else {})

    def calls(run: Run) -> None:
        for count in (3, 5, 8):
            run(x=rows(on, count))

    return Subject(step, calls)


@bug(Mechanism.OUTPUTS)
def nan_from_padding(on: torch.device) -> Subject:
    """Padded rows become NaN by their norm of 0, and are multiplied by a weight of 0 for other rows."""

    def step(x: Tensor) -> Tensor:
        unit = x / x.norm(dim=-1, keepdim=True)
        near = torch.eye(x.shape[0], device=x.device)
        return near @ unit

    return repeated(step, on)


@bug(Mechanism.WRITES)
def null_row_read_by_others(on: torch.device) -> Subject:
    """Padding writes row 0, as it should; but the next call averages over all rows of the cache."""
    cache = torch.zeros(8, WIDTH, device=on)
    place = Slot("place", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 7))

    def step(x: Tensor, place: Tensor) -> Tensor:
        mean = cache.mean(0)
        cache[place] = x + 1
        return x - mean

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1), place=ints(on, 1, 2, 3))
        run(x=rows(on, 2, 2), place=ints(on, 4, 5))

    def sample(extent: Any, seed: int) -> dict[str, Tensor]:
        count = extent.used["rows"]
        return {"x": rows(on, count, seed), "place": (torch.arange(count) % 7 + 1).to(on)}

    return Subject(step, calls, slots=[X, place], options={"sample": sample})


@bug(Mechanism.OUTPUTS)
def tail_reads_the_view(on: torch.device) -> Subject:
    """A recorded tail takes the last row of the body's outputs, which is padding's."""
    options = {"tail": lambda outputs, batch: outputs[-1:], "tail_captured": True, "sample": sampled(on, X)}

    def calls(run: Run) -> None:
        for count in (3, 8, 5):
            run(x=rows(on, count))

    def body(batch: Any) -> Tensor:
        return batch["x"] * 2

    return Subject(body, calls, is_phase=True, options=options, eager=lambda batch: body(batch)[-1:])
