"""Function memory: pointers to code and defaults follow what Python shows."""

from __future__ import annotations

import torch

from fact_bodies import X, made
from phonograph import Replay
from phonograph.graphs.recording.function_memory import pointers_of


def one(number: int = 1) -> int:
    return number


def test_pointers_differ_while_code_or_defaults_do() -> None:
    held = pointers_of(one)  # type: ignore[arg-type]
    assert held is not None, "this Python's functions are laid out otherwise: checks still work, and are slower"
    before, code, defaults = held.raw, one.__code__, one.__defaults__
    one.__defaults__ = (2,)
    assert held.raw != before
    one.__defaults__ = defaults
    assert held.raw == before
    one.__code__ = (lambda number=1: number + 1).__code__
    assert held.raw != before
    one.__code__ = code
    assert held.raw == before


def test_a_function_whose_code_or_defaults_are_replaced_is_seen_until_they_are_back() -> None:
    def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * by

    run = made(scaled)
    run(X)
    before = scaled.__defaults__
    scaled.__defaults__ = (5.0,)
    assert torch.equal(run(X), X * 5)
    scaled.__defaults__ = before
    assert torch.equal(run(X), X * 2)
    assert isinstance(run.runner.last, Replay)
    scaled.__code__ = (lambda x, by=2.0: x - by).__code__
    assert torch.equal(run(X), X - 2)
