"""Bugs of host values: a number that belongs to one batch, or that the host reads of one, is frozen into the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from phonograph import Pad, Slot
from zoo.animals import WIDTH, Mechanism, Run, Subject, X, ints, rows, sampled
from zoo.judge import bug
from zoo.python_state import repeated

GUARD, OPS = Mechanism.GUARD, Mechanism.OPS
KEYS = 8
LENS = Slot("lens", ("rows",), torch.int64, pad=Pad.fill(1), valid=(1, KEYS))


def phase(
    body: Callable[[Any], Any],
    on: torch.device,
    *batches: dict[str, Any],
    slots: tuple[Slot, ...] = (X,),
    fields: dict[str, Callable[[int], Any]] | None = None,
    **options: Any,
) -> Subject:
    """A runner over a phase; samples have fields beside the slots, drawn by seed."""

    def calls(run: Run) -> None:
        for batch in batches:
            run(**batch)

    options = {"sample": sampled(on, *slots, **(fields or {})), **options}
    return Subject(body, calls, slots=slots, is_phase=True, options=options)


@bug(GUARD, names="max_seqlen")
def baked_max_seqlen(on: torch.device) -> Subject:
    """Attention reads as many keys as `max_seqlen`, a Python int of the batch, said at capture."""
    keys = rows(on, KEYS, 5)

    def body(batch: Any) -> Tensor:
        scores = batch["x"] @ keys[: batch["max_seqlen"]].T
        visible = torch.arange(batch["max_seqlen"], device=on) < batch["lens"][:, None]
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ keys[: batch["max_seqlen"]]

    batches = [
        {"x": rows(on, 3, 1), "lens": ints(on, 1, 2, 3), "max_seqlen": 3},
        {"x": rows(on, 3, 2), "lens": ints(on, 4, 8, 6), "max_seqlen": 8},
    ]
    sample = sampled(on, X, LENS, max_seqlen=lambda seed: KEYS if seed % 2 else 4)

    def drawn(extent: Any, seed: int) -> dict[str, Any]:
        batch = sample(extent, seed)
        return batch | {"lens": batch["lens"].clamp(max=batch["max_seqlen"])}

    return phase(body, on, *batches, slots=(X, LENS), sample=drawn)


@bug(GUARD, names="num_pages|pages")
def page_table_one_column_too_narrow(on: torch.device) -> Subject:
    """The number of page-table columns comes from the capture batch's longest sequence, rounded down."""
    values = rows(on, 8, 5)
    table = Slot("table", ("rows", 4), torch.int64, pad=Pad.fill(0), valid=(0, 7))

    def body(batch: Any) -> Tensor:
        return batch["x"] + values[batch["table"][:, : batch["num_pages"]]].sum(1)

    batches = [
        {"x": rows(on, 2, 1), "table": ints(on, 1, 2, 3, 0, 4, 5, 0, 0).view(2, 4), "num_pages": 3},
        {"x": rows(on, 2, 2), "table": ints(on, 1, 2, 3, 6, 4, 5, 7, 1).view(2, 4), "num_pages": 4},
    ]
    return phase(body, on, *batches, slots=(X, table), fields={"num_pages": lambda seed: 3 + seed % 2})


@bug(GUARD, names="seqlens")
def loop_over_host_lengths(on: torch.device) -> Subject:
    """The body loops over requests by a list of lengths, which the graph unrolls for the one that samples have."""

    def body(batch: Any) -> Tensor:
        parts = batch["x"].new_zeros(batch["x"].shape[0], WIDTH)
        begin = 0
        for length in batch["seqlens"]:
            parts[begin : begin + length] = batch["x"][begin : begin + length].cumsum(0)
            begin += length
        return parts

    batches = [{"x": rows(on, 4, 1), "seqlens": [2, 2]}, {"x": rows(on, 4, 2), "seqlens": [1, 3]}]
    return phase(body, on, *batches, fields={"seqlens": lambda seed: [2, 2]})


@bug(GUARD, names="temperature")
def temperature_of_the_batch(on: torch.device) -> Subject:
    """A sampling temperature is a float of the batch, and 1 in every sample."""
    batches = [{"x": rows(on, 3, 1), "temperature": 1.0}, {"x": rows(on, 3, 2), "temperature": 0.25}]
    return phase(
        lambda batch: (batch["x"] / batch["temperature"]).softmax(-1),
        on,
        *batches,
        fields={"temperature": lambda seed: 1.0},
    )


@bug(GUARD, names="counts")
def gathered_counts_left_out(on: torch.device) -> Subject:
    """The counts of other data-parallel ranks are a slot that graphs leave out, so the sample's are frozen."""
    counts = Slot("counts", (2,), torch.int64, place="host")

    def body(batch: Any) -> Tensor:
        return batch["x"] * (sum(int(count) for count in batch["counts"]) if batch.get("counts") is not None else 1)

    batches: list[dict[str, Any]] = [
        {"x": rows(on, 3, 1), "counts": [3, 1]},
        {"x": rows(on, 3, 2), "counts": [3, 7]},
    ]
    fields: dict[str, Callable[[int], Any]] = {"counts": lambda seed: [3, 1 + seed % 4]}
    subject = phase(body, on, *batches, fields=fields, without=frozenset({"counts"}))
    more = {**subject.options, "eager_without": frozenset({"counts"})}
    return Subject(body, subject.calls, slots=(X, counts), is_phase=True, options=more)


@bug(GUARD, names="mask")
def mask_left_out_of_the_sample(on: torch.device) -> Subject:
    """An optional mask is no slot, and the sample has none: recordings never apply it."""

    def body(batch: Any) -> Tensor:
        return batch["x"] if batch.get("mask") is None else batch["x"] * batch["mask"]

    batches = [{"x": rows(on, 3, 1)}, {"x": rows(on, 3, 2), "mask": torch.zeros(WIDTH, device=on)}]
    return phase(body, on, *batches)


@bug(GUARD, names="flag")
def argument_that_is_no_slot(on: torch.device) -> Subject:
    """A flag is an argument of the function and no slot."""

    def step(x: Tensor, flag: bool = False) -> Tensor:
        return x * 2 if flag else x * 3

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        run(x=rows(on, 3, 2), flag=True)
        run(x=rows(on, 3, 3))

    return Subject(step, calls)


@bug(GUARD, names="meta")
def argument_object_changed_in_place(on: torch.device) -> Subject:
    """A metadata object is passed at every call, the same object with other numbers in it."""
    meta = {"scale": 2.0}

    def step(x: Tensor, meta: Any = None) -> Tensor:
        return x * (meta["scale"] if meta else 1.0)

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1), meta=meta)
        meta["scale"] = 5.0
        run(x=rows(on, 3, 2), meta=meta)

    return Subject(step, calls, options={"sample": sampled(on, X, meta=lambda seed: meta)})


@bug(OPS, names="_local_scalar_dense|item|bool")
def host_branch_on_data(on: torch.device) -> Subject:
    """Python branches on a sum."""
    return repeated(lambda x: x * 2 if x[0].sum() > 0 else -x, on)


@bug(OPS, names="_local_scalar_dense|item")
def host_read_swallowed(on: torch.device) -> Subject:
    """A host read stands in a try block, whose except takes a default while a graph is captured."""

    def step(x: Tensor) -> Tensor:
        try:
            scale = x[0, 0].item()
        except RuntimeError:
            scale = 1.0
        return x * scale

    return repeated(step, on)


@bug(OPS, names="_local_scalar_dense|one_hot|item")
def host_read_in_a_library(on: torch.device) -> Subject:
    """one_hot without a number of classes reads the largest index, three calls deep."""

    def count(indices: Tensor) -> Tensor:
        return functional.one_hot(indices.abs().long()).sum(-1)

    return repeated(lambda x: x[:, 0] + count(x[:, 0]), on)


@bug(OPS, names="repeat_interleave|nonzero|_local_scalar")
def repeat_interleave_by_data(on: torch.device) -> Subject:
    """Rows are repeated by counts on the device; the output's size is read by the host."""
    return repeated(lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0).sum(0) + x, on)


@bug(OPS, names="numpy|_to_copy|cpu|host")
def converted_to_numpy(on: torch.device) -> Subject:
    """A helper computes with numpy and comes back."""

    def step(x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.sort(x.detach().cpu().numpy(), axis=-1)).to(x.device)

    return repeated(step, on)


@bug(OPS, names="lift_fresh|tensor")
def tensor_from_a_list(on: torch.device) -> Subject:
    """The body makes a tensor of a Python list, as for penalties, at every call."""
    penalties = [1.0, 2.0, 3.0, 4.0]

    def step(x: Tensor) -> Tensor:
        return x * torch.tensor(penalties, device=x.device)

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        penalties[0] = 9.0
        run(x=rows(on, 3, 2))

    return Subject(step, calls)


@bug(OPS, names="index_put|add_|copy_|x")
def input_written_in_place(on: torch.device) -> Subject:
    """The body writes its input, which callers see afterwards."""

    def step(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    given = rows(on, 4)

    def calls(run: Run) -> None:
        run(x=given)
        run(x=given)

    return Subject(step, calls, state=lambda: given)


@bug(OPS, names="mul_|k|v")
def one_tensor_in_two_slots(on: torch.device) -> Subject:
    """The caller passes one tensor as two arguments, and the body writes one of them in place."""
    slots = [Slot(name, ("rows", WIDTH), torch.float32) for name in "kv"]

    def step(k: Tensor, v: Tensor) -> Tensor:
        k.mul_(2)
        return k + v

    def calls(run: Run) -> None:
        shared = rows(on, 4)
        run(k=shared, v=shared)

    return Subject(step, calls, slots=slots)


@bug(Mechanism.OTHER, names="hidden", has_line=False)
def own_state_as_input(on: torch.device) -> Subject:
    """The caller passes the model's own state, which the body writes before it reads the input."""
    hidden = torch.zeros(4, WIDTH, device=on)

    def step(x: Tensor) -> Tensor:
        hidden.add_(1)
        return x * 2

    def calls(run: Run) -> None:
        run(x=hidden)
        run(x=hidden)

    return Subject(step, calls, state=lambda: hidden)


@bug(OPS, names="generator|Generator|rand")
def frozen_device_generator(on: torch.device) -> Subject:
    """Noise comes from a generator object of the body's own, which a replay must advance."""
    generator = torch.Generator(on).manual_seed(4)
    return repeated(lambda x: x + torch.rand(WIDTH, generator=generator, device=x.device), on)


@bug(OPS, names="manual_seed")
def seeded_in_the_body(on: torch.device) -> Subject:
    """The body seeds with its step number before it draws."""

    def step(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return x + torch.rand(WIDTH, device=x.device)

    return repeated(step, on)
