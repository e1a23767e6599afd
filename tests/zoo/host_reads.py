"""Bugs of host reads in disguise: the host learns a value by a way that does not look like `.item()`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.animals import WIDTH, Mechanism, Subject
from zoo.judge import bug
from zoo.python_state import repeated

OPS = Mechanism.OPS


def scaled_by(read: Callable[[Tensor], float], on: torch.device) -> Subject:
    """Multiplies by what the host reads of the first row."""

    def step(x: Tensor) -> Tensor:
        return x * read(x[0])

    return repeated(step, on)


@bug(OPS, names="equal")
def read_by_equal(on: torch.device) -> Subject:
    """torch.equal gives a Python bool."""
    return scaled_by(lambda row: 2.0 if torch.equal(row, row.abs()) else 3.0 + float(row.shape[0]), on)


@bug(OPS, names="allclose|_local_scalar_dense")
def read_by_allclose(on: torch.device) -> Subject:
    """torch.allclose gives a Python bool."""
    return scaled_by(lambda row: 2.0 if torch.allclose(row, row.abs(), atol=0.5) else 3.0, on)


@bug(OPS, names="_local_scalar_dense|index")
def read_as_an_index(on: torch.device) -> Subject:
    """A Python list is indexed by a tensor."""
    table = [1.0, 2.0, 3.0, 4.0]
    return scaled_by(lambda row: table[row.argmax()], on)


@bug(OPS, names="_local_scalar_dense|tolist|host")
def read_by_formatting(on: torch.device) -> Subject:
    """A key is made of a tensor's repr."""
    return scaled_by(lambda row: float(len(repr(row[0] > 0))), on)


@bug(OPS, names="dlpack|host|numpy")
def read_through_dlpack(on: torch.device) -> Subject:
    """numpy reads the tensor's memory by DLPack."""
    return scaled_by(lambda row: float(np.from_dlpack(row.cpu() if row.is_cuda else row)[0]), on)


@bug(OPS, names="storage|host|_local_scalar")
def read_through_the_storage(on: torch.device) -> Subject:
    """A byte of the tensor's storage is read."""
    return scaled_by(lambda row: 1.0 + row.clone().untyped_storage()[3], on)


@bug(OPS, names="nonzero|unique|shape")
def unique_values(on: torch.device) -> Subject:
    """The number of unique values decides a shape."""
    return repeated(lambda x: x * torch.unique(x[0].round()).shape[0], on)


@bug(OPS, names="_local_scalar_dense|range|index")
def read_as_a_loop_count(on: torch.device) -> Subject:
    """A tensor is the end of a range."""

    def step(x: Tensor) -> Tensor:
        for _ in range(int((x[0] > 0).sum()) + 1):
            x = x * 2
        return x

    return repeated(step, on)


@bug(Mechanism.OTHER, names="thread", has_line=False)
def work_in_another_thread(on: torch.device) -> Subject:
    """Part of the body runs in a thread pool, where no recorder looks."""
    pool = ThreadPoolExecutor(1)

    def step(x: Tensor) -> Tensor:
        return x + pool.submit(torch.tanh, x).result()

    return repeated(step, on)


@bug(Mechanism.STATE, names="shared|counts")
def numpy_view_of_a_tensor(on: torch.device) -> Subject:
    """The body writes a tensor's memory through numpy, which shares it."""
    counts = torch.zeros(WIDTH)
    shared: Any = counts.numpy()

    def step(x: Tensor) -> Tensor:
        np.add(shared, 1, out=shared)
        return x * float(shared[0])

    return repeated(step, on, lambda: counts)
