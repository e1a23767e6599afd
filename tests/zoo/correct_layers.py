"""Correct models of whole layers, odd inputs, and objects that models carry with them."""

from __future__ import annotations

import enum
import itertools
import logging
import pathlib
import re
import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phonograph import Slot
from zoo.animals import WIDTH, Run, Subject, calling, rows
from zoo.correct import in_turn
from zoo.judge import correct

log = logging.getLogger("zoo")


@correct()
def recurrent_layer(on: torch.device) -> Subject:
    """A GRU over the columns of each row."""
    gru = nn.GRU(1, 3, batch_first=True).to(on).eval()
    return in_turn(lambda x: gru(x[..., None])[0], on)


@correct()
def attention_layer(on: torch.device) -> Subject:
    """nn.MultiheadAttention in eval mode, whose eager calls may take a fast path."""
    layer = nn.MultiheadAttention(2, 1, batch_first=True).to(on).eval()

    def step(x: Tensor) -> Tensor:
        pairs = x.view(-1, 2, 2)
        return layer(pairs, pairs, pairs, need_weights=False)[0]

    return in_turn(step, on)


@correct()
def encoder_layer(on: torch.device) -> Subject:
    """nn.TransformerEncoderLayer in eval mode, without a mask."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True).to(on).eval()
    return in_turn(lambda x: layer(x[:, None].expand(-1, 3, -1)), on)


@correct()
def convolution(on: torch.device) -> Subject:
    """Images: convolution, pooling, interpolation, unfold."""
    image = Slot("x", ("rows", 2, 6, 6), torch.float32)
    conv = nn.Conv2d(2, 3, 3, padding=1).to(on)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.max_pool2d(conv(x), 2)
        return functional.interpolate(y, scale_factor=2, mode="bilinear"), functional.unfold(y, 2)

    def calls(run: Run) -> None:
        for seed, count in enumerate((3, 8, 1, 5)):
            run(x=rows(on, count, seed, 72).view(count, 2, 6, 6))

    return Subject(step, calls, slots=[image])


@correct()
def rows_against_rows(on: torch.device) -> Subject:
    """A causal matrix of rows against rows is an output, beside a table that has a bucket's size by accident."""
    table = rows(on, 4, 3)

    def step(x: Tensor) -> dict[str, Tensor]:
        return {"scores": torch.tril(x @ x.T), "table": table * 2}

    return in_turn(step, on)


@correct()
def nan_in_padded_rows_alone(on: torch.device) -> Subject:
    """Rows are divided by their norm, which is 0 in padding: NaN, which nobody sees."""
    return in_turn(lambda x: (x / x.norm(dim=-1, keepdim=True), x.masked_fill(x == 0, -torch.inf).softmax(-1)), on)


@correct()
def strided_inputs(on: torch.device) -> Subject:
    """Inputs are transposed, expanded, sliced with steps, parameters, and parts of one another."""
    other = Slot("y", ("rows", WIDTH), torch.float32)

    def calls(run: Run) -> None:
        whole = rows(on, 8, 1, 8)
        run(x=whole[:, ::2], y=whole[:, 1::2])
        run(x=whole[:4, :4].T, y=whole[:1, :4].expand(4, 4))
        run(x=whole[::2, :4], y=whole[::2, :4])
        run(x=nn.Parameter(whole[:3, 4:].clone()), y=whole[:3, :4])

    return Subject(lambda x, y: x * 2 + y, calls, slots=[Slot("x", ("rows", WIDTH), torch.float32), other])


@correct()
def masks_cached_by_size(on: torch.device) -> Subject:
    """Causal masks are made once per size and kept in a dict."""
    masks: dict[int, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        count = x.shape[0]
        if count not in masks:
            masks[count] = torch.ones(count, count, device=x.device).tril()
        return masks[count] @ x

    return in_turn(step, on)


@correct()
def cast_weights_kept(on: torch.device) -> Subject:
    """A half-precision copy of the weight is made at the first call and kept by dtype."""
    weight = rows(on, WIDTH, 3)
    copies: dict[torch.dtype, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        if torch.float16 not in copies:
            copies[torch.float16] = weight.half()
        return x * copies[torch.float16].float()[0]

    return in_turn(step, on)


@correct()
def warned_once(on: torch.device) -> Subject:
    """The first call logs a warning and remembers that it has."""

    class Wordy(nn.Module):
        has_warned = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.has_warned:
                log.debug("slow path")
                self.has_warned = True
            return x * 2

    return in_turn(Wordy(), on)


@correct()
def flag_set_and_put_back(on: torch.device) -> Subject:
    """The body sets a flag for a submodule and puts it back in a finally."""

    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_prefill = False
            self.stack: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.is_prefill = True
            self.stack.append(1)
            try:
                return x * (2 if self.is_prefill else 3) * len(self.stack)
            finally:
                self.is_prefill = False
                self.stack.pop()

    return in_turn(Flagged(), on)


@correct()
def time_only_logged(on: torch.device) -> Subject:
    """The body takes the time for a log line; a profiler's range is around it."""

    def step(x: Tensor) -> Tensor:
        begun = time.perf_counter()
        with torch.profiler.record_function("zoo"):
            y = torch.tanh(x)
        log.debug("took %s s", time.perf_counter() - begun)
        return y

    return in_turn(step, on)


@correct()
def local_iterators(on: torch.device) -> Subject:
    """Generators, zip, chains and recursion, all of them the body's own."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).to(on)

    def halves(x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else halves(x * 0.5, depth - 1)

    def step(x: Tensor) -> Tensor:
        scales = (1.0 / number for number in itertools.count(1))
        for layer, scale in zip(layers, scales, strict=False):
            x = x + layer(x) * scale
        return halves(next(iter([x])), 2)

    return in_turn(step, on)


@correct(open="FALSE ALARM: an iterator that the body reaches is refused, though it never advances it")
def iterator_left_alone(on: torch.device) -> Subject:
    """The model numbers its requests by an itertools.count, which the body does not touch."""

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.request_ids = itertools.count()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    return in_turn(Numbered().to(on), on)


class Kind(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


@correct()
def odd_attributes(on: torch.device) -> Subject:
    """Locks, patterns, paths, enums, threads, weak references and a cycle hang on the model; a lock is taken."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.RLock()
            self.event, self.local = threading.Event(), threading.local()
            self.pattern, self.path = re.compile("a+"), pathlib.Path("/tmp")
            self.kind, self.bytes = Kind.TANH, bytearray(8)
            self.child: dict[str, Any] = {"parent": self, "weak": weakref.ref(self)}
            self.view = memoryview(self.bytes)

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return torch.tanh(x) if self.child["parent"].kind is Kind.TANH else x

    return in_turn(Odd(), on)


@correct()
def model_in_a_closure_of_a_method(on: torch.device) -> Subject:
    """A bound method of an object that is no module, which holds a module."""

    class Engine:
        def __init__(self) -> None:
            self.model = nn.Linear(WIDTH, 3).to(on)
            self.steps = 0

        def decode(self, x: Tensor) -> Tensor:
            return self.model(x)

    engine = Engine()

    def calls(run: Run) -> None:
        for count in (3, 8, 2):
            engine.steps += 1
            run(x=rows(on, count))

    return Subject(engine.decode, calls)


@correct()
def layers_in_eval_and_training(on: torch.device) -> Subject:
    """A model in training mode whose layers don't care, and one dropout of 0."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.LayerNorm(WIDTH)).to(on).train()
    return in_turn(calling(model), on)
