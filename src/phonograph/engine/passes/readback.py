"""Readback: sampled tokens on their way to the host, without waiting: pinned memory, and a fence after each copy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.devices import Device, Fence
from phonograph.engine.requests.request import MAX_LOGPROBS
from phonograph.engine.requests.step import NO_TOKEN, Sampled, TokenDetails
from phonograph.engine.sampling.sampler import TopLogprobs
from phonograph.errors import StepOrderError


class Picked(NamedTuple):
    """What a pass picked, on the device.

    Where rows may have several tokens or none, they lie in one block with `NO_TOKEN` after the last of each row, and
    there are logprobs of each place of the block.
    """

    tokens: torch.Tensor  # [num_rows] or [num_rows, tokens_per_row]; below 0 where logits were none (see `step`)
    logprobs: TopLogprobs | None = None  # [num_rows, …] or [num_rows, tokens_per_row, …]


class _Block:
    """Host memory for the results of one step."""

    def __init__(self, device: Device, max_tokens: int) -> None:
        self.tokens = _pinned(device, torch.int64, max_tokens)
        self.token_logprob = _pinned(device, torch.float32, max_tokens)
        self.top_ids = _pinned(device, torch.int64, max_tokens, MAX_LOGPROBS)
        self.top_logprobs = _pinned(device, torch.float32, max_tokens, MAX_LOGPROBS)
        self.done = device.fence(timed=True)
        self.num_uses = 0


def _pinned(device: Device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return device.host_block(count * dtype.itemsize).view(dtype).view(shape)


class Pending:
    """Results on their way; the memory is used again after as many further steps as the ring is long."""

    def __init__(self, block: _Block, count: int, num_top: int | None, width: int | None) -> None:
        """`num_top` likeliest tokens are told of each, fewer where the vocabulary is small; None: no logprobs."""
        self._block = block
        self._use = block.num_uses
        self._count = count
        self._num_top = num_top
        self._width = width
        """Places of each row, where rows may have several tokens or none."""

    @property
    def fence(self) -> Fence:
        return self._block.done

    def wait(self) -> Sampled:
        """The results; waits for the device."""
        block, count = self._block, self._count
        if block.num_uses != self._use:
            raise StepOrderError(
                "collecting a step: so many were launched after it that its results are overwritten. Collect one "
                "before more than limits.max_ahead steps are launched after it."
            )
        block.done.synchronize()
        tokens = block.tokens[:count].tolist()
        logprobs: list[TokenDetails] | None = None
        if (num_top := self._num_top) is not None:
            columns = (block.token_logprob, block.top_ids[:, :num_top], block.top_logprobs[:, :num_top])
            logprobs = list(zip(*(column[:count].tolist() for column in columns), strict=True))
        return Sampled(tokens, None, logprobs) if self._width is None else _counted(tokens, self._width, logprobs)


def _counted(tokens: list[int], width: int, logprobs: list[TokenDetails] | None) -> Sampled:
    """Of blocks of so many places, what comes before the first place without a token."""
    counts, kept = list[int](), list[int]()
    for first in range(0, len(tokens), width):
        row = tokens[first : first + width]
        counts.append(row.index(NO_TOKEN) if NO_TOKEN in row else width)
        kept += range(first, first + counts[-1])
    found = [tokens[place] for place in kept]
    return Sampled(found, counts, None if logprobs is None else [logprobs[place] for place in kept])


class Readback:
    """A ring of host blocks, one for each step that may be in flight, and one more."""

    def __init__(self, device: Device, max_tokens: int, depth: int) -> None:
        self._blocks = [_Block(device, max_tokens) for _ in range(depth)]
        self._next = 0

    def start(self, picked: Picked) -> Pending:
        """Copy behind the work launched so far."""
        block = self._blocks[self._next]
        self._next = (self._next + 1) % len(self._blocks)
        block.num_uses += 1
        tokens, width = picked.tokens, None
        if tokens.dim() == 2:
            width, tokens = tokens.shape[1], tokens.flatten()
        count = tokens.shape[0]
        block.tokens[:count].copy_(tokens, non_blocking=True)
        logprobs, num_top = picked.logprobs, None
        if logprobs is not None:
            num_top = logprobs.top_ids.shape[-1]
            block.token_logprob[:count].copy_(logprobs.token_logprob.flatten(), non_blocking=True)
            block.top_ids[:count, :num_top].copy_(logprobs.top_ids.view(count, num_top), non_blocking=True)
            block.top_logprobs[:count, :num_top].copy_(logprobs.top_logprobs.view(count, num_top), non_blocking=True)
        block.done.record()
        return Pending(block, count, num_top, width)
