"""Correct models, unusual in their Python: what they hold, set, take and return."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from phonograph import current, graph_break
from zoo.animals import WIDTH, Run, Subject, X, rows, sampled
from zoo.correct import in_turn
from zoo.judge import correct

log = logging.getLogger("zoo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = 2.0
        self.sizes = [1, 2]
        self.note = "first"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + sum(self.sizes)


# -- what calls take and return -------------------------------------------------------------------------------


@dataclass
class Hidden:
    states: tuple[Tensor, ...]
    logits: Tensor
    loss: Tensor | None = None


@correct()
def nested_outputs(on: torch.device) -> Subject:
    """A dataclass of tuples and None, inside a dict and a list."""

    def step(x: Tensor) -> dict[str, Any]:
        return {"hidden": Hidden((x, x * 2), x.sum(-1)), "extras": [None, (x > 0,)], "name": "decode"}

    return in_turn(step, on)


class Pair(NamedTuple):
    values: Tensor
    indices: Tensor


@correct()
def named_tuples(on: torch.device) -> Subject:
    """A named tuple of the body's own, and torch's own of topk."""
    return in_turn(lambda x: (Pair(*x.max(-1)), x.topk(2)), on)


class ModelOutput(OrderedDict[str, Any]):
    """A dict whose entries are attributes too, as Hugging Face returns them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@correct()
def dict_subclass_returned(on: torch.device) -> Subject:
    """The output is of a subclass of OrderedDict."""
    return in_turn(lambda x: ModelOutput(logits=x * 2, cache=None), on)


@correct()
def nothing_returned(on: torch.device) -> Subject:
    """The body returns None and writes a buffer in place."""
    seen = torch.zeros(WIDTH, device=on)

    def step(x: Tensor) -> None:
        seen.add_(x[0])

    return in_turn(step, on, state=lambda: seen)


@correct()
def input_returned(on: torch.device) -> Subject:
    """The input is returned as it is, beside a view of it."""
    return in_turn(lambda x: (x, x[:, 1:], x.T), on)


@correct()
def view_of_state_returned(on: torch.device) -> Subject:
    """A view of a buffer that later calls write is returned."""
    total = torch.zeros(2, WIDTH, device=on)

    def step(x: Tensor) -> Tensor:
        total[0].add_(x[0])
        return total[0].view(2, 2)

    return in_turn(step, on)


@correct()
def no_rows_and_no_columns(on: torch.device) -> Subject:
    """Batches without rows, and tensors without columns on the way."""

    def calls(run: Run) -> None:
        for count in (3, 0, 8, 0, 1):
            run(x=rows(on, count))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, x[:, :0]], dim=-1) * 2, x[:, :0]

    return Subject(step, calls)


@dataclass(frozen=True)
class Batch:
    x: Tensor
    name: str = "request"


@correct()
def dataclass_batch(on: torch.device) -> Subject:
    """A phase whose batch holds a dataclass, with a slot inside it."""
    slot = replace(X, source="inputs.x")

    def calls(run: Run) -> None:
        for count in (3, 8, 2):
            run(inputs=Batch(rows(on, count)))

    def sample(extent: Any, seed: int) -> dict[str, Any]:
        return {"inputs": Batch(rows(on, extent.used["rows"], seed))}

    def body(batch: Any) -> Tensor:
        return batch["inputs"].x * 3

    return Subject(body, calls, slots=[slot], is_phase=True, options={"sample": sample})


@correct()
def constant_argument(on: torch.device) -> Subject:
    """An argument that is no slot has the same value in samples and in all calls, in a new object each time."""

    def step(x: Tensor, config: Any = None) -> Tensor:
        return x * config["scale"]

    def calls(run: Run) -> None:
        for count in (3, 8, 2):
            run(x=rows(on, count), config={"scale": 2.0})

    return Subject(step, calls, options={"sample": sampled(on, X, config=lambda seed: {"scale": 2.0})})


# -- what models hold -----------------------------------------------------------------------------------------


@correct()
def memo_table(on: torch.device) -> Subject:
    """A memo of constants by size is filled on the way."""
    memo: dict[int, float] = {}

    def step(x: Tensor) -> Tensor:
        width = x.shape[-1]
        if width not in memo:
            memo[width] = width**-0.5
        return x * memo[width]

    return in_turn(step, on)


@correct()
def cached_function(on: torch.device) -> Subject:
    """functools.lru_cache over a pure function of sizes that makes a tensor."""

    @functools.lru_cache
    def slopes(heads: int) -> Tensor:
        return torch.linspace(0, 1, heads, device=on)

    return in_turn(lambda x: x * slopes(x.shape[-1]), on)


@correct()
def lazy_rotary_cache(on: torch.device) -> Subject:
    """A rotary table is built at the first call, from nothing but the config."""

    class Rotary(nn.Module):
        cos: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cos is None:
                self.cos = torch.arange(WIDTH, device=x.device).float().cos()
            return x * self.cos

    return in_turn(Rotary(), on)


@correct()
def same_value_set_every_call(on: torch.device) -> Subject:
    """The body sets an attribute to the same value at every call."""

    class Setting(nn.Module):
        is_causal = False

        def forward(self, x: Tensor) -> Tensor:
            self.is_causal = True
            self.shape = (WIDTH,)
            return x.view(-1, *self.shape) * 2

    return in_turn(Setting(), on)


@correct()
def hooks_that_do_nothing(on: torch.device) -> Subject:
    """Hooks on modules that return None, and one that logs."""
    model = Net().to(on)
    model.register_forward_pre_hook(lambda module, args: None)
    model.linear.register_forward_hook(lambda module, args, out: log.debug("%s", tuple(out.shape)))
    return in_turn(model, on)


@correct()
def lora_adders(on: torch.device) -> Subject:
    """Two adapters with low-rank weights are added by a loop over a dict."""
    base = nn.Linear(WIDTH, WIDTH).to(on)
    adapters = {name: (rows(on, 2, seed), rows(on, WIDTH, seed + 1, 2)) for seed, name in enumerate("ab")}

    def step(x: Tensor) -> Tensor:
        y = base(x)
        for down, up in adapters.values():
            y = y + x @ down.T @ up.T
        return y

    return in_turn(step, on)


@correct()
def gradient_inside(on: torch.device) -> Subject:
    """No-grad and enable-grad blocks inside the body; nothing is differentiated."""
    model = nn.Linear(WIDTH, 3).to(on)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = model(x)
        with torch.enable_grad():
            return y.detach() + x.mean(-1, keepdim=True)

    return in_turn(step, on)


@correct()
def module_with_computed_attributes(on: torch.device) -> Subject:
    """Properties, __getattr__ and a class-level table are read at every call."""

    class Computed(nn.Module):
        table: ClassVar = {"a": 1.0, "b": 2.0}

        @property
        def scale(self) -> float:
            return self.table["a"] + self.table["b"]

        def __getattr__(self, name: str) -> Any:
            if name.startswith("times_"):
                return int(name.removeprefix("times_"))
            return super().__getattr__(name)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * self.times_3

    return in_turn(Computed(), on)


@correct()
def several_graph_breaks(on: torch.device) -> Subject:
    """Two gaps, one of which reads the live batch, between three graphs."""

    @graph_break
    def count(x: Tensor) -> Tensor:
        return x * current().batch["x"].shape[0]

    @graph_break
    def largest(x: Tensor) -> Tensor:
        return x - float(x.detach()[0].max())

    def step(x: Tensor) -> Tensor:
        return largest(count(x + 1) * 2) + x

    return in_turn(step, on, options={"backend": "breakable"})


@correct()
def random_numbers_beside_the_rows(on: torch.device) -> Subject:
    """Noise has a shape of its own, whatever the batch, from torch's generator."""
    return in_turn(lambda x: x + torch.rand(WIDTH, device=x.device), on)
