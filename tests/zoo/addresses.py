"""Bugs of addresses: a tensor that a recording reads by its address is replaced by another one, or moves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from zoo.animals import WIDTH, Mechanism, Run, Subject, calling, rows
from zoo.judge import bug
from zoo.python_values import changed

ADDRESSES = Mechanism.ADDRESSES


class Net(nn.Module):
    """A linear layer behind a buffer that scales."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def weight(on: torch.device, seed: int = 9) -> Tensor:
    return rows(on, WIDTH, seed)


@bug(ADDRESSES, names=r"linear\.weight")
def weight_reassigned(on: torch.device) -> Subject:
    """A parameter is replaced by a new one."""
    model = Net().to(on)
    return changed(model, on, lambda: setattr(model.linear, "weight", nn.Parameter(weight(on))))


@bug(ADDRESSES, names=r"linear\.weight")
def weight_data_reassigned(on: torch.device) -> Subject:
    """`p.data = …`: the parameter stays the same object over other memory."""
    model = Net().to(on)
    return changed(model, on, lambda: setattr(model.linear.weight, "data", weight(on)))


@bug(ADDRESSES, names="scale")
def buffer_replaced(on: torch.device) -> Subject:
    """A buffer is assigned anew."""
    model = Net().to(on)
    return changed(model, on, lambda: setattr(model, "scale", torch.full((WIDTH,), 3.0, device=on)))


@bug(ADDRESSES, names=r"linear\.(weight|bias)|scale")
def weights_assigned_by_load_state_dict(on: torch.device) -> Subject:
    """New weights are loaded with assign=True."""
    model = Net().to(on)
    other = {name: value * 2 + 1 for name, value in Net().to(on).state_dict().items()}
    return changed(model, on, lambda: model.load_state_dict(other, assign=True))


@bug(ADDRESSES, names=r"linear\.(weight|bias)")
def moved_by_to(on: torch.device) -> Subject:
    """The model goes to another dtype and back, which moves its weights; later they are updated in place."""
    model = Net().to(on)

    def change() -> None:
        model.double().float()
        with torch.no_grad():
            model.linear.weight.mul_(2)

    return changed(model, on, change)


@bug(ADDRESSES, names=r"linear\.weight")
def storage_replaced_by_set(on: torch.device) -> Subject:
    """`set_` puts a weight over other memory, as flat-parameter sharding does."""
    model = Net().to(on)
    return changed(model, on, lambda: _set(model, on))


def _set(model: Net, on: torch.device) -> None:
    with torch.no_grad():
        model.linear.weight.set_(weight(on).untyped_storage(), 0, (WIDTH, WIDTH), (WIDTH, 1))


@bug(ADDRESSES, names=r"linear\.weight")
def weight_swapped(on: torch.device) -> Subject:
    """torch.utils.swap_tensors exchanges a weight with another."""
    model = Net().to(on)
    other = nn.Parameter(weight(on))
    return changed(model, on, lambda: torch.utils.swap_tensors(model.linear.weight, other))


@bug(ADDRESSES, names=r"linear\.weight")
def offloaded_and_woken(on: torch.device) -> Subject:
    """Sleep mode drops the weights' memory; waking allocates it elsewhere and loads other weights."""
    model = Net().to(on)

    def change() -> None:
        kept = model.linear.weight.data * 0.5
        model.linear.weight.data = torch.empty(0, device=on)
        model.linear.weight.data = kept

    return changed(model, on, change)


@bug(ADDRESSES, names="caches|keys")
def cache_reset_by_new_tensors(on: torch.device) -> Subject:
    """A reset gives a static cache new tensors in place of zeroing the old ones."""
    caches = [torch.zeros(8, WIDTH, device=on)]

    def step(x: Tensor) -> Tensor:
        caches[0][: x.shape[0]] += x
        return caches[0][: x.shape[0]] * 2

    def calls(run: Run) -> None:
        run(x=rows(on, 8, 1))
        run(x=rows(on, 8, 2))
        caches[0] = torch.zeros(8, WIDTH, device=on)
        run(x=rows(on, 8, 3))

    return Subject(step, calls)


@bug(ADDRESSES, names="head|weight")
def tie_broken(on: torch.device) -> Subject:
    """The head that shares the embedding's weight gets its own copy, which is then changed."""
    embedding, head = nn.Linear(WIDTH, WIDTH, bias=False).to(on), nn.Linear(WIDTH, WIDTH, bias=False).to(on)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)

    def change() -> None:
        head.weight = nn.Parameter(head.weight.detach().clone() * 3)

    return changed(calling(model), on, change)


class Negated(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


@bug(ADDRESSES, names="linear|weight|parametriz")
def parametrization_added(on: torch.device) -> Subject:
    """A weight is parametrized after capture."""
    model = Net().to(on)
    return changed(model, on, lambda: parametrize.register_parametrization(model.linear, "weight", Negated()))


@bug(ADDRESSES, names="cos")
def rotary_table_rebuilt(on: torch.device) -> Subject:
    """Dynamic rotary scaling: a long context, served eagerly, replaces the table that recordings read."""

    class Rotary(nn.Module):
        cos: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.ones(WIDTH, device=on))
            self.longest = 16

        def forward(self, x: Tensor, seq_len: int = 16) -> Tensor:
            if seq_len > self.longest:
                self.longest = seq_len
                self.cos = torch.full((WIDTH,), 16 / seq_len, device=x.device)
            return x * self.cos

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        run(x=rows(on, 3, 2), seq_len=64)
        run(x=rows(on, 3, 3))

    return Subject(Rotary(), calls)


@bug(ADDRESSES, names="hidden")
def made_in_capture_and_freed(on: torch.device) -> Subject:
    """The state is allocated when the body first runs, in capture, and freed by a reset; graphs keep its address."""

    class Resettable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.hidden is None:
                self.hidden = torch.zeros(WIDTH, device=x.device)
            self.hidden.add_(1)
            return x + self.hidden

    model, others = Resettable(), list[Tensor]()

    def calls(run: Run) -> None:
        model.hidden = None  # that of capture is freed
        others.extend(torch.full((WIDTH,), 9.0, device=on) for _ in range(64))  # and used by somebody else
        for seed in (1, 2):
            run(x=rows(on, 3, seed))
        model.hidden = None
        run(x=rows(on, 3, 3))

    return Subject(model, calls, state=lambda: others)


@bug(ADDRESSES, harmless="the largest bucket runs first, so that nothing grows once a graph has an address")
def workspace_grown_in_capture(on: torch.device) -> Subject:
    """A workspace that keeps sums grows while the next bucket is captured, and the graph before it has the old one."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.workspace = torch.zeros(1, WIDTH, device=on)

        def forward(self, x: Tensor) -> Tensor:
            count = x.shape[0]
            if count > self.workspace.shape[0]:
                grown = torch.zeros(count, WIDTH, device=x.device)
                grown[: self.workspace.shape[0]] = self.workspace
                self.workspace = grown
            self.workspace[:1] += x[:1]
            return self.workspace[:1] + x

    model = Growing()

    def calls(run: Run) -> None:
        for seed, count in enumerate((3, 8, 3, 5, 4)):
            run(x=rows(on, count, seed))

    return Subject(model, calls, state=lambda: model.workspace[:1])


@bug(ADDRESSES, names="workspace")
def workspace_grown(on: torch.device) -> Subject:
    """A workspace that keeps sums grows when a batch too large for any graph comes, and recordings have the old one."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.workspace = torch.zeros(8, WIDTH, device=on)

        def forward(self, x: Tensor) -> Tensor:
            count = x.shape[0]
            if count > self.workspace.shape[0]:
                grown = torch.zeros(count, WIDTH, device=x.device)
                grown[: self.workspace.shape[0]] = self.workspace
                self.workspace = grown
            self.workspace[:count] += x
            return self.workspace[:count] * 1

    def calls(run: Run) -> None:
        run(x=rows(on, 8, 1))
        run(x=rows(on, 12, 2))
        run(x=rows(on, 8, 3))

    return Subject(Growing(), calls)


@bug(ADDRESSES, names="weights|weight")
def functional_weights_replaced(on: torch.device) -> Subject:
    """functional_call takes its weights from a dict, whose entries are replaced."""
    model = Net().to(on)
    weights: dict[str, Any] = {name: value.detach().clone() for name, value in model.named_parameters()}

    def step(x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,))

    return changed(step, on, lambda: weights.update({name: value * 2 for name, value in weights.items()}))


@bug(ADDRESSES, names="weight")
def weight_behind_a_scripted_module(on: torch.device) -> Subject:
    """The weight of a TorchScript module is set through `.data`."""
    scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH).to(on))

    def step(x: Tensor) -> Tensor:
        return scripted(x)

    return changed(step, on, lambda: setattr(scripted.weight, "data", weight(on)))


@bug(ADDRESSES, names="embedding|weight")
def embedding_resized(on: torch.device) -> Subject:
    """The embedding is resized for added tokens: a new module with more rows, and other values in the old ones."""
    model = nn.ModuleDict({"embedding": nn.Embedding(8, WIDTH).to(on)})

    def step(x: Tensor) -> Tensor:
        return model["embedding"](x.argmax(-1))

    return changed(step, on, lambda: setattr(model, "embedding", nn.Embedding(12, WIDTH).to(on)))


@bug(ADDRESSES, names="averaged|weight")
def averaged_weights_switched_in(on: torch.device) -> Subject:
    """Evaluation switches to an averaged copy of the model by exchanging modules."""
    held = {"model": Net().to(on)}
    averaged = copy.deepcopy(held["model"])
    with torch.no_grad():
        averaged.linear.weight.mul_(0.5)

    def step(x: Tensor) -> Tensor:
        return held["model"](x)

    return changed(step, on, lambda: held.update(model=averaged))


WINDOW = 64
"""Addresses are looked at in turn: a moved parameter is seen within so many calls."""


@bug(ADDRESSES, names="parameters|weight|77")
def one_of_many_weights_moved(on: torch.device) -> Subject:
    """One of 150 parameters moves, and must be seen within the window that is documented."""
    model = nn.ParameterList(torch.full((WIDTH,), float(index)) for index in range(150)).to(on)

    def step(x: Tensor) -> Tensor:
        return x + torch.stack(list(model)).sum(0)

    def calls(run: Run) -> None:
        run(x=rows(on, 3, 1))
        model[77].data = torch.full((WIDTH,), 5000.0, device=on)
        for _ in range(WINDOW):
            run.unjudged(x=rows(on, 3, 2))
        run(x=rows(on, 3, 3))

    return Subject(step, calls)
