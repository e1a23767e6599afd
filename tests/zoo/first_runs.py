"""Bugs of first runs: trial runs, which are not the caller's, make or move what later calls use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.animals import WIDTH, Run, Subject, rows
from zoo.judge import bug
from zoo.python_state import STATE, repeated


class Lazy(nn.Module):
    """Makes its state at the first call."""

    def __init__(self, first: Callable[[Tensor], Tensor], later: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.first, self.later = first, later

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.first(x)
        return self.later(self.kept, x)


@bug(STATE, harmless="what the first run makes and later ones write is kept as state")
def lazily_made_state(on: torch.device) -> Subject:
    """The first call makes the state that later calls add to."""
    model = Lazy(lambda x: torch.zeros(WIDTH, device=x.device), lambda kept, x: x + kept.add_(x[0]))
    return repeated(model, on, lambda: model.kept)


@bug(STATE, names="kept")
def calibrated_on_the_first_batch(on: torch.device) -> Subject:
    """A quantisation scale is taken from the first batch, which capture makes a random sample."""
    model = Lazy(lambda x: x[0].abs().amax(), lambda kept, x: (x / kept * 7).round())
    return repeated(model, on, lambda: model.kept)


@bug(STATE, names="kept|first")
def first_call_returns_early(on: torch.device) -> Subject:
    """A cache for video features: the first call fills it and returns, later calls take the difference."""

    class Early(nn.Module):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = x[0].clone()
                return x
            return x - self.kept

    model = Early()
    return repeated(model, on, lambda: model.kept)


@bug(STATE, names="sums")
def state_per_batch_size(on: torch.device) -> Subject:
    """Running sums are kept per batch size, which with padding is the bucket's."""
    sums = {size: torch.zeros(WIDTH, device=on) for size in range(1, 9)}

    def step(x: Tensor) -> Tensor:
        return x + sums[x.shape[0]].add_(x[0])

    return repeated(step, on, lambda: sums)


@bug(STATE, names="table|means", has_line=False)
def dict_cache_keyed_by_batch(on: torch.device) -> Subject:
    """A dict remembers, by batch size, a statistic of the first batch of that size."""
    means: dict[int, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        if x.shape[0] not in means:
            means[x.shape[0]] = x[0] * 2
        return x - means[x.shape[0]]

    return repeated(step, on, lambda: sorted(means))


@bug(STATE, names=r"aten\.add\.Tensor")
def cached_function_of_the_size(on: torch.device) -> Subject:
    """functools.cache over the size keeps a noise vector that is drawn once per size."""

    @functools.cache
    def remember(size: int) -> Tensor:
        return torch.rand(WIDTH, device=on) * size

    return repeated(lambda x: x + remember(x.shape[0]), on)


@bug(STATE, names="optimizer|weight")
def optimizer_inside(on: torch.device) -> Subject:
    """Test-time training: the body takes an optimizer step with momentum on its weights."""
    weight = nn.Parameter(torch.ones(WIDTH, device=on))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        weight.grad = x[0].clone()
        optimizer.step()
        return x * weight.detach()

    return repeated(step, on, weight.detach)


@bug(STATE, names="grad|weight")
def gradients_accumulated(on: torch.device) -> Subject:
    """Gradients are left on in the body: backward() accumulates into `.grad` at every call."""
    weight = nn.Parameter(torch.ones(WIDTH, device=on))

    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            (x[0] * weight).sum().backward()
        assert weight.grad is not None
        return x + weight.grad

    return repeated(step, on, lambda: weight.grad)


@bug(STATE, names="last_hidden")
def output_left_on_the_module(on: torch.device) -> Subject:
    """The caller reads a hidden state that the body leaves on the module."""

    class Tapped(nn.Module):
        last_hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last_hidden = torch.tanh(x)
            return self.last_hidden + 1

    model = Tapped()
    taken: list[Tensor | None] = []

    def calls(run: Run) -> None:
        for seed, count in enumerate((3, 8, 4)):
            run(x=rows(on, count, seed))
            taken.append(model.last_hidden)

    return Subject(model, calls, state=lambda: taken)


@bug(STATE, names="scratch", needs_gpu=True)
def scratch_made_when_needed(on: torch.device) -> Subject:
    """Scratch memory is made by the first run; a larger batch, served eagerly, frees what recordings write to."""

    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scratch: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scratch is None or self.scratch.shape[0] < x.shape[0]:
                self.scratch = torch.zeros(max(64, x.shape[0] * 16), 64, device=x.device)
            self.scratch[: x.shape[0], :WIDTH] = x * 2
            return self.scratch[: x.shape[0], :WIDTH] + 1

    others: list[Tensor] = []

    def calls(run: Run) -> None:
        run(x=rows(on, 8, 1))
        run(x=rows(on, 200, 2))
        others.extend(torch.zeros(128, 64, device=on) for _ in range(16))
        run(x=rows(on, 8, 3))

    return Subject(Scratch(), calls, state=lambda: others)


@bug(STATE, harmless="what trial runs write is put back")
def weight_view_written_in_place(on: torch.device) -> Subject:
    """The body decays a row of its own weight through a view of it, and trial runs decay it too."""
    model = nn.Linear(WIDTH, WIDTH).to(on)

    def step(x: Tensor) -> Tensor:
        model.weight.detach()[1].view(2, 2).mul_(0.5)
        model.weight.data.view(-1)[0].add_(1)
        return model(x)

    return repeated(step, on, lambda: model.weight)


@bug(STATE, harmless="what trial runs write is put back")
def state_advanced_by_trial_runs(on: torch.device) -> Subject:
    """A recurrent state is written in place, by every op that can: out=, foreach, copy into a slice, set by index."""
    hidden = [torch.zeros(WIDTH, device=on) for _ in range(3)]

    def step(x: Tensor) -> Tensor:
        torch.add(hidden[0], x[0], out=hidden[0])
        torch._foreach_add_(hidden[1:], 1.0)
        hidden[1][:2].copy_(hidden[0][2:])
        hidden[2][torch.arange(2, device=x.device)] = hidden[1][:2]
        return x + torch.stack(hidden).sum(0)

    return repeated(step, on, lambda: hidden)
