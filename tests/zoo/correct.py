"""Correct models, unusual in what they compute: none may raise an alarm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from phonograph import Dim, Pad, Slot
from zoo.animals import WIDTH, Run, Subject, X, calling, ints, rows
from zoo.judge import correct

SIZES = (3, 8, 1, 5, 4, 2, 7, 8, 6)
"""Up and down, within buckets and at their ends."""
TOKEN = Slot("token", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 7))


def in_turn(body: Any, on: torch.device, **more: Any) -> Subject:
    """Calls of all sizes."""

    def calls(run: Run) -> None:
        for index, count in enumerate(SIZES):
            run(x=rows(on, count, index + 1))

    return Subject(body, calls, **more)


def of_tokens(body: Any, on: torch.device, **more: Any) -> Subject:
    def calls(run: Run) -> None:
        for index, count in enumerate(SIZES):
            numbers = torch.Generator().manual_seed(index)
            run(token=torch.randint(1, 8, (count,), generator=numbers).to(on))

    return Subject(body, calls, slots=[TOKEN], **more)


@correct()
def tied_weights(on: torch.device) -> Subject:
    """The head is the embedding's weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, WIDTH)
            self.head = nn.Linear(WIDTH, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, token: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embedding(token)))

    return of_tokens(Tied().to(on), on)


@correct()
def shared_layers(on: torch.device) -> Subject:
    """One layer stands three times in a ModuleList."""
    layer = nn.Linear(WIDTH, WIDTH).to(on)
    layers = nn.ModuleList([layer, nn.Tanh(), layer, nn.Tanh(), layer])

    def step(x: Tensor) -> Tensor:
        for one in layers:
            x = one(x)
        return x

    return in_turn(step, on)


@correct()
def in_place_activations(on: torch.device) -> Subject:
    """Activations are computed in place, on intermediates."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 2), nn.SiLU(inplace=True))
    return in_turn(calling(model.to(on)), on)


@correct()
def kv_cache_by_index_copy(on: torch.device) -> Subject:
    """A KV cache is a buffer written by index_copy_; row 0 is nobody's, and padding's."""

    class Cached(nn.Module):
        keys: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(9, WIDTH))

        def forward(self, x: Tensor, place: Tensor) -> Tensor:
            self.keys.index_copy_(0, place, x)
            return torch.softmax(x @ self.keys[1:].T, -1) @ self.keys[1:]

    model = Cached().to(on)
    place = Slot("place", ("rows",), torch.int64, pad=Pad.fill(0, null=True), valid=(0, 8))

    def calls(run: Run) -> None:
        for seed, count in enumerate(SIZES):
            run(x=rows(on, count, seed), place=torch.arange(1, count + 1, device=on))

    def sample(extent: Any, seed: int) -> dict[str, Tensor]:
        count = extent.used["rows"]
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:count] + 1
        return {"x": rows(on, count, seed), "place": order.to(on)}

    return Subject(model, calls, slots=[X, place], options={"sample": sample}, state=lambda: model.keys[1:])


@correct()
def sliding_window_buffer(on: torch.device) -> Subject:
    """A window of the last hidden states of each sequence, by its row, is rolled in place."""
    window = torch.zeros(9, 3, WIDTH, device=on)
    row = Slot("row", ("rows",), torch.int64, pad=Pad.fill(0, null=True), valid=(0, 8))

    def step(x: Tensor, row: Tensor) -> Tensor:
        rolled = torch.cat([window[row][:, 1:], x[:, None]], dim=1)
        window[row] = rolled
        return rolled.mean(1)

    def calls(run: Run) -> None:
        for seed, count in enumerate(SIZES):
            run(x=rows(on, count, seed), row=torch.arange(1, count + 1, device=on))

    def sample(extent: Any, seed: int) -> dict[str, Tensor]:
        count = extent.used["rows"]
        return {"x": rows(on, count, seed), "row": torch.arange(1, count + 1, device=on)}

    return Subject(step, calls, slots=[X, row], options={"sample": sample}, state=lambda: window[1:])


@correct()
def step_counter_on_the_device(on: torch.device) -> Subject:
    """A step counter is a tensor that the body advances in place."""
    steps = torch.zeros((), dtype=torch.int64, device=on)

    def step(x: Tensor) -> Tensor:
        steps.add_(1)
        return x * steps

    return in_turn(step, on, state=lambda: steps)


@correct()
def mixture_of_experts_dense(on: torch.device) -> Subject:
    """All experts run on all tokens, and a gate of the two best weighs them."""
    experts = torch.randn(3, WIDTH, WIDTH, device=on)
    gate = nn.Linear(WIDTH, 3).to(on)

    def step(x: Tensor) -> Tensor:
        weights, chosen = gate(x).softmax(-1).topk(2, dim=-1)
        dense = torch.zeros(x.shape[0], 3, device=x.device).scatter_(1, chosen, weights)
        return torch.einsum("ne,nd,edf->nf", dense, x, experts)

    return in_turn(step, on)


@correct()
def cumulative_sum_over_rows(on: torch.device) -> Subject:
    """A running sum over rows goes forwards, so that padding at the end changes nobody."""
    return in_turn(lambda x: x.cumsum(0) + x.flip(-1).cumprod(-1), on)


@correct()
def sorted_columns(on: torch.device) -> Subject:
    """Sort, argsort and searchsorted within rows."""

    def step(x: Tensor) -> dict[str, Tensor]:
        values, order = x.sort(-1, descending=True)
        return {"values": values, "order": order, "back": values.gather(-1, order.argsort(-1))}

    return in_turn(step, on)


@correct()
def fourier_transform(on: torch.device) -> Subject:
    """FFT over columns, filtered, and back: complex intermediates and a complex output."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(x)
        return spectrum, torch.fft.irfft(spectrum * 0.5, n=WIDTH)

    return in_turn(step, on)


@correct()
def complex_rotary(on: torch.device) -> Subject:
    """Rotary embedding by complex multiplication, over view_as_complex."""
    turns = torch.polar(torch.ones(8, WIDTH // 2), torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])).to(on)
    position = Slot("position", ("rows",), torch.int64, pad=Pad.fill(0), valid=(0, 7))

    def step(x: Tensor, position: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.view(x.shape[0], WIDTH // 2, 2))
        return torch.view_as_real(pairs * turns[position]).flatten(1)

    def calls(run: Run) -> None:
        for seed, count in enumerate(SIZES):
            run(x=rows(on, count, seed), position=torch.arange(count, device=on))

    return Subject(step, calls, slots=[X, position])


@correct()
def integers_only(on: torch.device) -> Subject:
    """Hashes of tokens by integer arithmetic and bits."""
    return of_tokens(lambda token: ((token * 2654435761) ^ (token >> 1)) % 97, on)


@correct()
def boolean_masks(on: torch.device) -> Subject:
    """Masks in, masks out, with logical operators and where."""
    keep = Slot("keep", ("rows", WIDTH), torch.bool, pad=Pad.fill(False))

    def step(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return (x > 0) & keep | ~keep, torch.where(keep, x, -math.inf)

    def calls(run: Run) -> None:
        for seed, count in enumerate(SIZES):
            run(x=rows(on, count, seed), keep=rows(on, count, seed + 50) > 0)

    return Subject(step, calls, slots=[X, keep])


@correct()
def group_norm(on: torch.device) -> Subject:
    """GroupNorm and LayerNorm normalise within a row."""
    model = nn.Sequential(nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH)).to(on)
    return in_turn(calling(model), on)


@correct()
def weight_norm(on: torch.device) -> Subject:
    """A weight-normalised layer computes its weight at every call."""
    return in_turn(calling(parametrizations.weight_norm(nn.Linear(WIDTH, 3)).to(on)), on)


@correct()
def spectral_norm_in_eval(on: torch.device) -> Subject:
    """Spectral norm in eval mode reads its vectors and does not move them."""
    return in_turn(calling(parametrizations.spectral_norm(nn.Linear(WIDTH, 3)).to(on).eval()), on)


@correct()
def batch_norm_in_eval(on: torch.device) -> Subject:
    """BatchNorm in eval mode uses its running statistics."""
    norm = nn.BatchNorm1d(WIDTH).to(on)
    with torch.no_grad():
        norm.running_mean.copy_(torch.arange(4.0))  # type: ignore[union-attr]
    return in_turn(calling(norm.eval()), on)


@correct()
def checkpointed_block(on: torch.device) -> Subject:
    """A block runs under activation checkpointing, as training code left it."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(on)

    def step(x: Tensor) -> Tensor:
        return x + checkpoint(block, x, use_reentrant=False)

    return in_turn(step, on)


@correct()
def scripted_function(on: torch.device) -> Subject:
    """A TorchScript function with a loop over columns."""

    def scan(x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for column in range(x.shape[1]):
            state = torch.tanh(state + x[:, column])
        return state

    return in_turn(calling(torch.jit.script(scan)), on)


@correct()
def keeps_a_meta_tensor(on: torch.device) -> Subject:
    """Keeps what has a shape and no numbers, as compilers do."""
    shapes: dict[str, Tensor] = {}

    def body(x: Tensor) -> Tensor:
        if "x" not in shapes:
            shapes["x"] = torch.ones(WIDTH, device="meta")
        return x * shapes["x"].shape[0]

    return in_turn(calling(body), on)


@correct()
def vmapped_function(on: torch.device) -> Subject:
    """A function of one row, mapped over rows by torch.func.vmap."""
    matrix = rows(on, WIDTH, 5)

    def of_a_row(row: Tensor) -> Tensor:
        return torch.tanh(matrix @ row) + row.sum()

    return in_turn(calling(vmap(of_a_row)), on)


@correct()
def weights_by_functional_call(on: torch.device) -> Subject:
    """functional_call with a scaled copy of the weights, made at every call."""
    model = nn.Linear(WIDTH, 3).to(on)

    def step(x: Tensor) -> Tensor:
        return functional_call(model, {name: value * 2 for name, value in model.named_parameters()}, (x,))

    return in_turn(step, on)


@correct()
def autocast_inside(on: torch.device) -> Subject:
    """The body enters and leaves autocast by itself."""
    model = nn.Linear(WIDTH, 3).to(on)

    def step(x: Tensor) -> Tensor:
        with torch.autocast(on.type, dtype=torch.float16):
            y = model(x)
        return y.float() + x.sum(-1, keepdim=True)

    return in_turn(step, on)


class Straight(torch.autograd.Function):
    """Rounds, with a gradient that goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@correct()
def custom_autograd_function(on: torch.device) -> Subject:
    """A torch.autograd.Function that saves for a backward pass that never comes."""
    model = nn.Linear(WIDTH, WIDTH).to(on)
    return in_turn(lambda x: Straight.apply(model(x) * 4) / 4, on)


@correct()
def double_precision(on: torch.device) -> Subject:
    """All in float64, with a float64 slot."""
    slot = Slot("x", ("rows", WIDTH), torch.float64)
    weight = rows(on, WIDTH, 3).double()

    def calls(run: Run) -> None:
        for seed, count in enumerate(SIZES):
            run(x=rows(on, count, seed).double())

    return Subject(lambda x: torch.linalg.vector_norm(x @ weight, dim=-1), calls, slots=[slot])


@correct()
def ragged_tokens_by_segment(on: torch.device) -> Subject:
    """Tokens of several sequences lie flat, with a second dim of their segments' starts; padding is a segment apart."""
    segment = Slot("segment", ("rows",), torch.int64, pad=Pad.fill(3), valid=(0, 3))

    def step(x: Tensor, segment: Tensor) -> Tensor:
        sums = torch.zeros(4, WIDTH, device=x.device).index_add_(0, segment, x)
        return sums[segment]

    def calls(run: Run) -> None:
        run(x=rows(on, 5, 1), segment=ints(on, 0, 0, 1, 1, 2))
        run(x=rows(on, 3, 2), segment=ints(on, 2, 1, 2))
        run(x=rows(on, 8, 3), segment=ints(on, 0, 0, 1, 1, 2, 2, 2, 0))

    def sample(extent: Any, seed: int) -> dict[str, Tensor]:
        count = extent.used["rows"]
        return {"x": rows(on, count, seed), "segment": (torch.arange(count) % 3).to(on)}

    return Subject(step, calls, slots=[X, segment], options={"sample": sample})


@correct()
def attention_over_a_second_dim(on: torch.device) -> Subject:
    """Keys have a dim of their own with a limit; a mask slot hides what is padding."""
    keys = Slot("keys", ("rows", "context", WIDTH), torch.float32)
    seen = Slot("seen", ("rows", "context"), torch.bool, pad=Pad.fill(False))

    def step(x: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        mask = seen[:, None, None]
        return functional.scaled_dot_product_attention(
            x[:, None, None], keys[:, None], keys[:, None], attn_mask=mask | ~mask.any(-1, keepdim=True)
        )[:, 0, 0]

    def calls(run: Run) -> None:
        for seed, (count, length) in enumerate([(3, 4), (8, 2), (1, 6), (5, 5)]):
            made = torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(seed)).to(on)
            seen = torch.ones(count, length, dtype=torch.bool, device=on)
            run(x=rows(on, count, seed), keys=made, seen=seen)

    def sample(extent: Any, seed: int) -> dict[str, Tensor]:
        count, length = extent.used["rows"], extent.used["context"]
        made = torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(seed)).to(on)
        seen = torch.ones(count, length, dtype=torch.bool, device=on)
        return {"x": rows(on, count, seed), "keys": made, "seen": seen}

    options = {"dims": [Dim("context", limit=6)], "sample": sample}
    return Subject(step, calls, slots=[X, keys, seen], options=options)
