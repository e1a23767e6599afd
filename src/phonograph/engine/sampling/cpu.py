"""CpuSampler: C++ passes over the logits, without a sort, with helper threads that the caller does not wait for."""

from __future__ import annotations

import torch

from phonograph.engine.ops.native.library import Library
from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.sampling.sampler import SamplingRows, TopLogprobs, few_threads, top_logprobs
from phonograph.engine.state.columns import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P


class CpuSampler:
    """The protocol `Sampler`, for steps that are not recorded: a recorder can't see what C++ does.

    Torch's ops split a row as long as a vocabulary among threads, and each op waits for the slowest: with another
    program on one core, a step of thirty of them takes many times as long.
    """

    name = "cpu"
    columns = (TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED)
    rows = SamplingRows

    def __init__(self, library: Library) -> None:
        self._library = library

    def pick(self, logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
        logits = logits.float()
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        addresses: list[int | None] = [None] * 6
        if rows is not None and level > Sampling.GREEDY:
            cuts = (rows.top_k, rows.top_p, rows.min_p) if level > Sampling.SAMPLED else (None, None, None)
            parameters = (rows.temperature, *cuts, rows.seed, rows.positions)
            held = [None if tensor is None else tensor.contiguous() for tensor in parameters]
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in held]
        shape = logits.shape[0], logits.stride(0), logits.shape[1]
        self._library.picked(logits.data_ptr(), *shape, *addresses, out.data_ptr(), torch.get_num_threads())
        return out

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
        with few_threads(logits):
            return top_logprobs(logits.float(), tokens, count)
