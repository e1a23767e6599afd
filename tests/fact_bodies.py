"""Bodies for tests of facts: a body over an object, what changes that object, and a graphed function of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phonograph import Graphed, Reason, Replay, RunEagerly, Slot, graphed
from phonograph.graphs.progress import silent

X = torch.ones(3, 4)
SLOTS = [Slot("x", ("rows", 4), torch.float32)]

Make = Callable[[], tuple[Callable[..., Any], Callable[[], object]]]
"""A body, and what changes what it reads."""


def made(body: Callable[..., Any], buckets: Sequence[int] = (4, 8), **options: Any) -> Graphed:
    """A graphed function whose shapes are all recorded."""
    run = graphed(body, slots=SLOTS, bucketed="rows", buckets=buckets, device="emulated", **options)
    report = run.capture(silent)
    assert not report.failures, report
    return run


def of(held: Any, body: Callable[[Any, torch.Tensor], Any], change: Callable[[Any], object]) -> Make:
    """A body over a copy of an object."""

    def make() -> tuple[Callable[..., Any], Callable[[], object]]:
        mine = copy.deepcopy(held)

        def step(x: torch.Tensor) -> Any:
            return body(mine, x)

        return step, lambda: change(mine)

    return make


def assert_seen_at_once(make: Make) -> None:
    """The first call after the change is eager, counted as stale, and right."""
    body, change = make()
    run = made(body)
    run(X)
    assert isinstance(run.runner.last, Replay)
    change()
    found = run(X)
    last = run.runner.last
    assert isinstance(last, RunEagerly)
    assert last.reason is Reason.STALE
    with torch.no_grad():
        assert torch.equal(found, body(X))
