"""Brings sampled tokens to the host without waiting: pinned memory, and a fence behind each copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from phonograph.devices import Device, Fence
from phonograph.engine.request import MAX_LOGPROBS
from phonograph.engine.sampler import TopLogprobs


class Picked(NamedTuple):
    """What a pass picked, on the device."""

    tokens: torch.Tensor  # [num_rows]; below 0 where logits were none (see `step`)
    logprobs: TopLogprobs | None = None


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, on the host: a token for each of `step.sampling`."""

    tokens: list[int]
    logprobs: list[tuple[float, list[int], list[float]]] | None = None
    """(of the token, the likeliest tokens, their log-probabilities) for each, where somebody asks."""


class _Block:
    """Host memory for the results of one step."""

    def __init__(self, device: Device, max_rows: int) -> None:
        self.tokens = _pinned(device, torch.int64, max_rows)
        self.token_logprob = _pinned(device, torch.float32, max_rows)
        self.top_ids = _pinned(device, torch.int64, max_rows, MAX_LOGPROBS)
        self.top_logprobs = _pinned(device, torch.float32, max_rows, MAX_LOGPROBS)
        self.done = device.fence(timed=True)


def _pinned(device: Device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return device.host_block(count * dtype.itemsize).view(dtype).view(shape)


class Pending:
    """Results on their way; the memory is used again after as many further steps as the ring is long."""

    def __init__(self, block: _Block, count: int, num_top: int | None) -> None:
        """`num_top` likeliest tokens are told of each, fewer where the vocabulary is small; None: no logprobs."""
        self._block = block
        self._count = count
        self._num_top = num_top

    @property
    def fence(self) -> Fence:
        return self._block.done

    def wait(self) -> Sampled:
        """The results; waits for the device."""
        block, count = self._block, self._count
        block.done.synchronize()
        tokens = block.tokens[:count].tolist()
        if self._num_top is None:
            return Sampled(tokens)
        columns = (block.token_logprob, block.top_ids[:, : self._num_top], block.top_logprobs[:, : self._num_top])
        return Sampled(tokens, list(zip(*(column[:count].tolist() for column in columns), strict=True)))


class Readback:
    """A ring of host blocks, one for each step that may be in flight, and one more."""

    def __init__(self, device: Device, max_rows: int, depth: int) -> None:
        self._blocks = [_Block(device, max_rows) for _ in range(depth)]
        self._next = 0

    def start(self, picked: Picked) -> Pending:
        """Copy behind the work launched so far."""
        block = self._blocks[self._next]
        self._next = (self._next + 1) % len(self._blocks)
        count = picked.tokens.shape[0]
        block.tokens[:count].copy_(picked.tokens, non_blocking=True)
        logprobs, num_top = picked.logprobs, None
        if logprobs is not None:
            num_top = logprobs.top_ids.shape[1]
            block.token_logprob[:count].copy_(logprobs.token_logprob, non_blocking=True)
            block.top_ids[:count, :num_top].copy_(logprobs.top_ids, non_blocking=True)
            block.top_logprobs[:count, :num_top].copy_(logprobs.top_logprobs, non_blocking=True)
        block.done.record()
        return Pending(block, count, num_top)
