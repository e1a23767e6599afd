"""Bugs of gaps and outputs: eager code between graphs that sees capture's values, and results that don't last."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from phonograph import current, graph_break
from zoo.animals import WIDTH, Mechanism, Run, Subject, X, rows, sampled
from zoo.host_values import phase
from zoo.judge import bug
from zoo.python_state import repeated

GAPS, OTHER = Mechanism.GAPS, Mechanism.OTHER


def broken(body: Any, on: torch.device, **more: Any) -> Subject:
    subject = repeated(body, on, **more)
    return Subject(body, subject.calls, options={"backend": "breakable"}, state=subject.state)


@bug(GAPS, names="lens")
def gap_reads_the_captured_batch(on: torch.device) -> Subject:
    """A gap is passed a field of the batch that capture saw, in place of the live one's."""

    @graph_break
    def attend(x: Tensor, lens: list[int]) -> Tensor:
        return x * sum(lens)

    batches = [{"x": rows(on, 3, 1), "lens": [1, 2]}, {"x": rows(on, 3, 2), "lens": [5, 5]}]
    fields: dict[str, Any] = {"lens": lambda seed: [1, 1 + seed % 3]}
    return phase(
        lambda batch: attend(batch["x"] + 1, batch["lens"]) - 1, on, *batches, fields=fields, backend="breakable"
    )


@bug(GAPS, names=r"aten\.div")
def gap_counts_padded_rows(on: torch.device) -> Subject:
    """A gap divides by the number of rows of its argument, which has the padding."""

    @graph_break
    def share(x: Tensor) -> Tensor:
        return x / x.shape[0]

    return broken(lambda x: share(x * 2) + 1, on)


@bug(GAPS, harmless="a gap gets objects that the body makes as they were when it was called")
def gap_argument_changed_later(on: torch.device) -> Subject:
    """An object made by the body is passed to a gap, and changed by the body after that."""

    @graph_break
    def attend(x: Tensor, meta: Any) -> Tensor:
        return x * meta.scale

    def step(x: Tensor) -> Tensor:
        meta = SimpleNamespace(scale=2.0)
        y = attend(x, meta)
        meta.scale = 7.0
        return y + attend(y, meta)

    return broken(step, on)


@bug(GAPS, names="scale")
def gap_argument_read_from_the_module(on: torch.device) -> Subject:
    """The body reads a number of the module and passes it to a gap, which gets that of capture."""
    model = SimpleNamespace(scale=2.0)

    @graph_break
    def attend(x: Tensor, scale: float) -> Tensor:
        return x * scale

    def step(x: Tensor) -> Tensor:
        return attend(x + 1, model.scale)

    def calls(run: Run) -> None:
        run(x=rows(on, 4, 1))
        model.scale = 5.0
        run(x=rows(on, 4, 2))

    return Subject(step, calls, options={"backend": "breakable"})


@bug(GAPS, names="attend|memo")
def gap_remembers_by_identity(on: torch.device) -> Subject:
    """A gap remembers what it made of a tensor by `is`."""
    memo: dict[str, Any] = {"of": None, "made": None}

    @graph_break
    def attend(x: Tensor) -> Tensor:
        if memo["of"] is not x:
            memo.update(of=x, made=x.sin())
        return memo["made"]

    return broken(lambda x: attend(x + 1) * 2, on)


@bug(GAPS, names="attend")
def gap_output_changes_its_shape(on: torch.device) -> Subject:
    """A gap returns as many rows as the live batch has, where the next graph has the padded number."""

    @graph_break
    def attend(x: Tensor) -> Tensor:
        return x[: current().batch["x"].shape[0]].clone()

    return broken(lambda x: attend(x * 2).sum(0) + x, on)


@bug(GAPS, names="loop|layer|variable")
def gap_reads_the_variable_of_a_loop(on: torch.device) -> Subject:
    """A gap made in a loop reads the loop's variable, which at replay has its last value."""

    def step(x: Tensor) -> Tensor:
        for layer in range(3):

            @graph_break
            def attend(y: Tensor) -> Tensor:
                return y * (layer + 1)  # noqa: B023 - the bug

            x = attend(x + 1)
        return x

    return broken(step, on)


@bug(GAPS, names="hidden|state")
def gap_replaces_state(on: torch.device) -> Subject:
    """A gap assigns a new tensor to the module, which the graph after it reads."""
    model = SimpleNamespace(hidden=torch.zeros(WIDTH, device=on))

    @graph_break
    def update(x: Tensor) -> None:
        model.hidden = model.hidden + x[0]

    def step(x: Tensor) -> Tensor:
        update(x * 1)
        return x + model.hidden

    return broken(step, on)


@bug(OTHER, harmless="outputs are copies by default")
def output_read_after_the_next_call(on: torch.device) -> Subject:
    """The caller keeps what a call returned and reads it after the next one."""
    kept: list[Tensor] = []

    def calls(run: Run) -> None:
        for seed in (1, 2, 3):
            kept.append(run(x=rows(on, 3, seed)))

    return Subject(lambda x: x * 2, calls, state=lambda: kept)


class Output:
    """A plain object."""

    def __init__(self, logits: Tensor, hidden: list[Tensor]) -> None:
        self.logits, self.hidden = logits, hidden


@bug(OTHER, harmless="outputs are copies by default, in objects too")
def output_in_a_plain_object(on: torch.device) -> Subject:
    """The body returns an object of its own, with tensors in its attributes, that the caller keeps."""
    kept: list[Output] = []

    def calls(run: Run) -> None:
        for seed in (1, 2, 3):
            kept.append(run(x=rows(on, 3, seed)))

    return Subject(lambda x: Output(x * 2, [x + 1]), calls, state=lambda: [one.logits for one in kept])


@dataclass
class Batch:
    x: Tensor
    logits: Tensor | None = None


@bug(OTHER, names="logits|result")
def output_left_in_the_batch(on: torch.device) -> Subject:
    """The body leaves its result in a field of the batch, and returns nothing that holds it."""

    class Boxed(dict[str, Any]):
        pass

    box = Boxed()

    def body(batch: Any) -> Tensor:
        batch["box"]["logits"] = batch["x"] * 2
        return batch["x"] + 1

    batches = [{"x": rows(on, 3, seed), "box": box} for seed in (1, 2)]
    subject = phase(body, on, *batches, fields={"box": lambda seed: Boxed()})
    return Subject(
        body, subject.calls, slots=(X,), is_phase=True, options=subject.options, state=lambda: box.get("logits")
    )


@bug(OTHER, names="number", has_line=False)
def number_returned(on: torch.device) -> Subject:
    """The body returns a Python number that depends on its size."""
    return repeated(lambda x: {"y": x * 2, "rows": x.shape[0]}, on)


@bug(OTHER, names="")
def encoder_fast_path(on: torch.device) -> Subject:
    """nn.TransformerEncoder puts out zeros for masked tokens in its fast path, and other values without it."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).to(on).eval()
    encoder.requires_grad_(False)
    hidden = torch.zeros(1, 3, dtype=torch.bool, device=on)
    hidden[:, 2] = True

    def step(x: Tensor) -> Tensor:
        tokens = x[:, None].expand(-1, 3, -1)
        return encoder(tokens, src_key_padding_mask=hidden.expand(x.shape[0], 3))

    return repeated(step, on)


@bug(Mechanism.VALUES, names="reset|hidden")
def state_replaced_by_a_branch_not_taken(on: torch.device) -> Subject:
    """A reset flag is set once in a while, and its branch gives the state a new tensor."""

    class Resettable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reset = False
            self.hidden = torch.zeros(WIDTH, device=on)

        def forward(self, x: Tensor) -> Tensor:
            if self.reset:
                self.hidden = torch.zeros(WIDTH, device=x.device)
            self.hidden.add_(x[0])
            return x + self.hidden

    model = Resettable()

    def calls(run: Run) -> None:
        run(x=rows(on, 4, 1))
        model.reset = True
        run(x=rows(on, 4, 2))
        model.reset = False
        run(x=rows(on, 4, 3))

    return Subject(model, calls, options={"sample": sampled(on, X)})
