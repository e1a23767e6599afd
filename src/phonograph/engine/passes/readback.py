"""Readback: asynchronous copies of sampled tokens to the host: pinned memory, and a fence after each copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from phonograph.devices import Device, Fence
from phonograph.engine.passes.prompt_scores import PromptScores
from phonograph.engine.requests.request import MAX_LOGPROBS
from phonograph.engine.requests.step import NO_DRAFT, NO_TOKEN, PromptDetails, Sampled, TokenDetails
from phonograph.engine.sampling.sampler import TopLogprobs
from phonograph.errors import StepOrderError


class Picked(NamedTuple):
    """What a pass picked, on the device.

    Where rows may have several tokens or none, they lie in one block, with `NO_TOKEN` or `NO_DRAFT` after the last of
    each row, and there are logprobs of each place of the block.
    """

    tokens: torch.Tensor  # [num_rows] or [num_rows, tokens_per_row]; below 0 where logits were none (see `step`)
    logprobs: TopLogprobs | None = None  # [num_rows, …] or [num_rows, tokens_per_row, …]
    scores: PromptScores | None = None
    """Of tokens of prompts, where a request wants them."""
    pooled: torch.Tensor | None = None  # [num_pooled, hidden], float32
    states: torch.Tensor | None = None
    """What each token was picked from, where a request wants that: as tokens, [..., hidden], float32."""
    prompt_states: torch.Tensor | None = None  # [any, hidden], float32: of prompts, where a request wants them
    probed: torch.Tensor | None = None  # [num_decodes, depth]: see `Sampled`
    handed: object = None
    """The batch of the pass that runs next in the same step (`Pass.then`); it stays on the device."""


class _Details:
    """Host memory for log-probabilities."""

    def __init__(self, device: Device, max_tokens: int) -> None:
        self.token_logprob = _pinned(device, torch.float32, max_tokens)
        self.top_ids = _pinned(device, torch.int64, max_tokens, MAX_LOGPROBS)
        self.top_logprobs = _pinned(device, torch.float32, max_tokens, MAX_LOGPROBS)

    def start(self, found: TopLogprobs) -> Callable[[], list[TokenDetails]]:
        """Copy after the work launched so far; returns a function that reads the results once they have arrived."""
        num_top = found.top_ids.shape[-1]  # fewer where the vocabulary is small
        count = found.top_ids.numel() // num_top
        columns = (self.token_logprob[:count], self.top_ids[:count, :num_top], self.top_logprobs[:count, :num_top])
        for column, values in zip(columns, (found.token_logprob, found.top_ids, found.top_logprobs), strict=True):
            column.copy_(values.view(column.shape), non_blocking=True)
        return lambda: list(zip(*(column.tolist() for column in columns), strict=True))


class _Block:
    """Host memory for the results of one step."""

    def __init__(self, device: Device, max_tokens: int, max_scored: int, pooled: tuple[int, int] | None) -> None:
        self.tokens = _pinned(device, torch.int64, max_tokens)
        self.found: npt.NDArray[np.int64] = self.tokens.numpy()
        """The same memory."""
        self.details = _Details(device, max_tokens)
        self.scores = _Details(device, max_scored)
        self.ranks = _pinned(device, torch.int64, max_scored)
        self.pooled = None if pooled is None else _pinned(device, torch.float32, *pooled)
        self.done = device.fence(timed=True)
        self.num_uses = 0

    def start_scores(self, found: PromptScores) -> Callable[[], list[PromptDetails]]:
        """As `_Details.start`, with ranks."""
        read, ranks = self.scores.start(found.logprobs), self.ranks[: found.ranks.shape[0]]
        ranks.copy_(found.ranks, non_blocking=True)
        return lambda: [(*details, rank) for details, rank in zip(read(), ranks.tolist(), strict=True)]

    def start_pooled(self, found: torch.Tensor) -> Callable[[], npt.NDArray[np.float32]]:
        """As `_Details.start`; what reads them makes a copy, since the block is used again."""
        assert self.pooled is not None
        place = self.pooled[: found.shape[0]]
        place.copy_(found, non_blocking=True)
        return lambda: place.numpy().copy()

    def start_probed(self, found: torch.Tensor, first: int) -> torch.Size:
        """Copy after the work launched so far, to the places after those of tokens: a plain step has one for each row,
        and a row of places for a round holds a token and all drafts."""
        self.tokens[first : first + found.numel()].copy_(found.flatten(), non_blocking=True)
        return found.shape


def _pinned(device: Device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return device.host_block(count * dtype.itemsize).view(dtype).view(shape)


class Pending:
    """Results being copied; the memory is reused after as many further steps as the ring is long."""

    def __init__(
        self,
        block: _Block,
        count: int,
        width: int | None,
        logprobs: Callable[[], list[TokenDetails]] | None,
        scores: Callable[[], list[PromptDetails]] | None,
        pooled: Callable[[], npt.NDArray[np.float32]] | None = None,
        states: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        probed: torch.Size | None = None,
    ) -> None:
        """What is there besides tokens is read by functions; `width` is the number of places of each row, where rows
        may have several tokens or none. `states` are those of tokens and of prompts, in memory of their own; drafts of
        the shape `probed` come after the tokens."""
        self._block = block
        self._use = block.num_uses
        self._count = count
        self._width = width
        self._logprobs = logprobs
        self._scores = scores
        self._pooled = pooled
        self._states = states
        self._probed = probed

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
        logprobs = self._logprobs() if self._logprobs is not None else None
        scores = self._scores() if self._scores is not None else None
        pooled = self._pooled() if self._pooled is not None else None
        states, prompt_states = (None if one is None else one.numpy() for one in self._states)
        found, width = block.found[:count], self._width
        if width is None:
            one_each = Sampled(found.tolist(), None, logprobs, scores, pooled, states, prompt_states)
            return one_each if self._probed is None else replace(one_each, probed=self._drafts(self._probed))
        places = found.reshape(-1, width)
        is_undrafted = places == NO_DRAFT
        is_kept = (places != NO_TOKEN) & ~is_undrafted  # nothing stays after a place without a token
        kept = None if logprobs is None and states is None else np.flatnonzero(is_kept)
        return Sampled(
            places[is_kept].tolist(),
            is_kept.sum(1).tolist(),
            None if logprobs is None or kept is None else [logprobs[place] for place in kept],
            scores,
            pooled,
            None if states is None else states[kept],
            prompt_states,
            (width - 1 - is_undrafted.sum(1)).tolist(),
        )

    def _drafts(self, shape: torch.Size) -> npt.NDArray[np.int64]:
        return self._block.found[self._count : self._count + shape.numel()].reshape(shape).copy()


class Readback:
    """A ring of host blocks, one for each step that may be in flight, and one more."""

    def __init__(
        self,
        device: Device,
        max_tokens: int,
        depth: int,
        max_scored: int = 0,
        pooled: tuple[int, int] | None = None,
    ) -> None:
        """For so many sampled tokens, the drafts of a probe included, and so many of prompts that are scored, at most;
        `pooled` is how many vectors a step may bring, and how long they are."""
        self._device = device
        self._blocks = [_Block(device, max_tokens, max_scored, pooled) for _ in range(depth)]
        self._next = 0

    def start(self, picked: Picked) -> Pending:
        """Copy after the work launched so far."""
        block = self._blocks[self._next]
        self._next = (self._next + 1) % len(self._blocks)
        block.num_uses += 1
        tokens, width = picked.tokens, None
        if tokens.dim() == 2:
            width, tokens = tokens.shape[1], tokens.flatten()
        count = tokens.shape[0]
        block.tokens[:count].copy_(tokens, non_blocking=True)
        logprobs = None if picked.logprobs is None else block.details.start(picked.logprobs)
        scores = None if picked.scores is None else block.start_scores(picked.scores)
        pooled = None if picked.pooled is None else block.start_pooled(picked.pooled)
        states = self._start_states(picked.states), self._start_states(picked.prompt_states)
        probed = None if picked.probed is None else block.start_probed(picked.probed, count)
        block.done.record()
        return Pending(block, count, width, logprobs, scores, pooled, states, probed)

    def _start_states(self, found: torch.Tensor | None) -> torch.Tensor | None:
        """Copied to memory of their own, which whoever asked for them keeps: few ask, and they are large."""
        if found is None:
            return None
        place = _pinned(self._device, torch.float32, found.numel() // found.shape[-1], found.shape[-1])
        return place.copy_(found.reshape(place.shape), non_blocking=True)
