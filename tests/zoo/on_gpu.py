"""Bugs of real devices: streams, host memory, and kernels that no dispatcher sees."""

from __future__ import annotations

import torch
from torch import Tensor

from phonograph import Slot
from zoo.animals import WIDTH, Mechanism, Run, Subject, rows
from zoo.judge import bug
from zoo.python_state import repeated
from zoo.python_values import changed

OPS, OTHER = Mechanism.OPS, Mechanism.OTHER


@bug(OPS, harmless="the device joins side streams at the end of a recording", needs_gpu=True)
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


@bug(OPS, names="copy|host|_to_copy|lens", needs_gpu=True)
def host_tensor_copied_in_the_body(on: torch.device) -> Subject:
    """The body copies lengths from a pinned host tensor, which is rewritten, then replaced."""
    held = {"lens": torch.ones(WIDTH).pin_memory()}

    def step(x: Tensor) -> Tensor:
        return x * held["lens"].to(x.device, non_blocking=True)

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        torch.cuda.synchronize()  # eager would race, too
        held["lens"].fill_(3.0)
        run(x=rows(on, 3, 2))
        torch.cuda.synchronize()
        held["lens"] = torch.full((WIDTH,), 5.0).pin_memory()
        run(x=rows(on, 3, 3))

    return Subject(step, calls)


@bug(OTHER, names="same view", has_line=False, needs_gpu=True)
def other_path_while_capturing(on: torch.device) -> Subject:
    """A library takes a path without checks, that rounds, while a stream is captured."""

    def step(x: Tensor) -> Tensor:
        return x.half().float() if torch.cuda.is_current_stream_capturing() else x * 1

    return repeated(step, on)


@bug(OTHER, harmless="the device's generator advances with every replay", needs_gpu=True)
def dropout_in_the_graph(on: torch.device) -> Subject:
    """Noise of a fixed shape: a replay that repeats the numbers of capture is wrong from the second call on."""
    return repeated(lambda x: x + torch.rand(WIDTH, device=x.device), on)


@bug(
    Mechanism.GUARD,
    names="data_ptr|address",
    has_line=False,
    needs_gpu=True,
    open="SILENT: what Python makes of an address is frozen, and all samples begin where the allocator puts them",
)
def address_by_value(on: torch.device) -> Subject:
    """The body reads its input's address as a number, as hand-written launchers do, and aligns by it."""

    def step(x: Tensor) -> Tensor:
        return x * (2 if x.data_ptr() % 512 == 0 else 3)

    def calls(run: Run) -> None:
        run(x=rows(on, 4, 1))
        run(x=rows(on, 5, 2)[1:])

    return Subject(step, calls)


_gain = 2.0


@torch.library.custom_op("zoo::gain", mutates_args=())
def gain(x: Tensor) -> Tensor:
    """An op written in Python, which reads a global number."""
    return x * _gain


@gain.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@bug(Mechanism.VALUES, names="_gain", needs_gpu=True)
def custom_op_reads_a_global(on: torch.device) -> Subject:
    """A custom op reads a global number that is changed; the emulated device runs its Python at every replay."""
    globals()["_gain"] = 2.0
    return changed(lambda x: gain(x) + 1, on, lambda: globals().update(_gain=5.0))


@bug(Mechanism.ADDRESSES, names="weight", needs_gpu=True)
def storage_freed_and_made_again(on: torch.device) -> Subject:
    """Sharded weights are freed between steps by resizing their storage to 0, and gathered again elsewhere."""
    weight = rows(on, WIDTH, 3)
    others: list[Tensor] = []

    def change() -> None:
        storage, values = weight.untyped_storage(), weight.clone() * 2
        num_bytes = storage.nbytes()
        storage.resize_(0)
        others.extend(torch.zeros(WIDTH, WIDTH, device=on) for _ in range(64))
        storage.resize_(num_bytes)
        weight.copy_(values)

    return changed(lambda x: x @ weight, on, change)


@bug(Mechanism.MODES, names="tf32|precision", has_line=False, needs_gpu=True)
def tf32_allowed_later(on: torch.device) -> Subject:
    """Matrix products are allowed to round to TF32 after capture."""
    weight = rows(on, 512, 3, 512)
    slot = Slot("x", ("rows", 512), torch.float32)

    def calls(run: Run) -> None:
        run(x=rows(on, 8, 1, 512))
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            run(x=rows(on, 8, 2, 512))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return Subject(lambda x: x @ weight, calls, slots=[slot])
