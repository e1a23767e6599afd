"""untouched: a runner that serves is left as it was, whatever is tried on it, also when a trial raises."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import torch

from phonograph.graphs.running.runner import Runner


@contextmanager
def untouched(runner: Runner) -> Iterator[None]:
    """Buffers, outputs that a caller may still look at, the right to repeat, counts, and every random generator."""
    outputs = runner.output_buffers.kept() if runner.options.outputs == "view" else nullcontext()
    with runner.registry.kept(), outputs, _generators_kept(runner.device.torch_device):
        yield


@contextmanager
def _generators_kept(on: torch.device) -> Iterator[None]:
    """The generators of all devices, Python's and numpy's."""
    python, numpy = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that saving the state of many devices takes long
            forked = torch.random.fork_rng([]) if on.type == "cpu" else torch.random.fork_rng(device_type=on.type)
            stack.enter_context(forked)
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        yield
