"""Bugs of real devices: streams, host memory, and kernels that no dispatcher sees."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.animals import WIDTH, Mechanism, Run, Subject, rows
from zoo.judge import bug
from zoo.python_state import repeated

OPS, OTHER = Mechanism.OPS, Mechanism.OTHER


@bug(OPS, names="stream|unjoined|capture", has_line=False, needs_gpu=True)
def side_stream_not_joined(on: torch.device) -> Subject:
    """Work is put on a side stream, and the main one never waits for it."""
    side = torch.cuda.Stream()
    state = torch.zeros(WIDTH, device=on)

    def step(x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            state.add_(x[0])
        return x * 2

    return repeated(step, on, lambda: state)


@bug(OPS, names="stream|capture", has_line=False, needs_gpu=True)
def side_stream_not_forked(on: torch.device) -> Subject:
    """Work is put on a side stream that never waited for the main one, so that it is in no graph."""
    side = torch.cuda.Stream()
    state = torch.zeros(WIDTH, device=on)

    def step(x: Tensor) -> Tensor:
        with torch.cuda.stream(side):
            state.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        return x + state

    return repeated(step, on, lambda: state)


@bug(OPS, names="copy|host|_to_copy", needs_gpu=True)
def host_tensor_copied_in_the_body(on: torch.device) -> Subject:
    """The body copies lengths from a pinned host tensor, which is rewritten, then replaced."""
    held = {"lens": torch.ones(WIDTH).pin_memory()}

    def step(x: Tensor) -> Tensor:
        return x * held["lens"].to(x.device, non_blocking=True)

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        held["lens"].fill_(3.0)
        run(x=rows(on, 3, 2))
        torch.cuda.synchronize()
        held["lens"] = torch.full((WIDTH,), 5.0).pin_memory()
        run(x=rows(on, 3, 3))

    return Subject(step, calls)


@bug(OTHER, names="capturing", has_line=False, needs_gpu=True)
def other_path_while_capturing(on: torch.device) -> Subject:
    """A library takes a path without checks, that rounds, while a stream is captured."""

    def step(x: Tensor) -> Tensor:
        return x.half().float() if torch.cuda.is_current_stream_capturing() else x * 1

    return repeated(step, on)


@bug(OTHER, names="rand|generator", has_line=False, needs_gpu=True)
def dropout_in_the_graph(on: torch.device) -> Subject:
    """Noise of a fixed shape: a replay that repeats the numbers of capture is wrong from the second call on."""
    return repeated(lambda x: x + torch.rand(WIDTH, device=x.device), on)


@bug(Mechanism.GUARD, names="data_ptr|address", has_line=False, needs_gpu=True)
def address_by_value(on: torch.device) -> Subject:
    """The body reads its input's address as a number, as hand-written launchers do, and aligns by it."""

    def step(x: Tensor) -> Tensor:
        return x * (2 if x.data_ptr() % 512 == 0 else 3)

    def calls(run: Run) -> None:
        run(x=rows(on, 4, 1))
        run(x=rows(on, 5, 2)[1:])

    return Subject(step, calls)
