"""Sampler protocol and TorchSampler: the next token of every sequence, inside the graph.

The rule, which every implementation follows: a logit's distance from the row's highest, over the temperature, plus
Gumbel noise of (seed, position, token), is the token's score, and the token with the highest score among those that
truncation keeps is the draw. Truncation is what `transformers` does: top-k, which keeps all that equal the k-th; top-p
over the probabilities of what top-k left; min-p relative to the likeliest token. Where the edge of top-p is among
equals, those with the higher numbers stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.requests.step import NOT_FINITE, NOTHING_ALLOWED
from phonograph.engine.state.column import Column
from phonograph.engine.state.columns import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P
from phonograph.errors import DeclarationError

_MASK = 0xFFFFFFFF
_FEW = 1 << 18


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of the rows of a step, gathered from the columns of the same names."""

    temperature: torch.Tensor  # [num_rows], 0 for greedy
    top_k: torch.Tensor  # 0 for all
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor  # int64
    positions: torch.Tensor  # of the token that is picked


@dataclass(frozen=True)
class TopLogprobs:
    """Log-probabilities of the picked tokens and of the most likely ones, before temperature and penalties."""

    token_logprob: torch.Tensor  # [num_rows]
    top_ids: torch.Tensor  # [num_rows, MAX_LOGPROBS]
    top_logprobs: torch.Tensor


class Sampler(Protocol):
    """One implementation; stateless, so that graphs of all shapes share it. Logits may be of any float type."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Sequence[Column]:
        """The columns of the parameters that it honours. Each sampler names its own: what it would ignore is not among
        them, and requests that set it are refused."""
        ...

    @property
    def rows(self) -> type[SamplingRows]:
        """What it wants gathered: its fields are these columns, and the positions."""
        ...

    def pick(self, logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
        """The next token of every row, from logits after penalties; at a level, what it and those below it offer.

        Where a row's logits are no logits, NOT_FINITE or NOTHING_ALLOWED. Only a greedy batch may come without rows.
        """
        ...

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
        """Log-probabilities of these tokens and of the `count` likeliest, from raw logits.

        Equals come in any order. Where there is no token but a problem, they mean nothing.
        """
        ...


def check_declared(sampler: Sampler) -> None:
    """Refuse a sampler that says that it honours what it is never given, or that wants what it does not name."""
    named, gathered = {column.name for column in sampler.columns}, {one.name for one in fields(sampler.rows)}
    ignored, unknown = sorted(named - gathered), sorted(gathered - named - {"positions"})
    if ignored:
        raise DeclarationError(
            f"the sampler {sampler.name!r} names the column {ignored[0]!r}, which its rows don't have. "
            "Add the field, or take the column out: requests that set the parameter are refused then."
        )
    if unknown:
        raise DeclarationError(
            f"the rows of the sampler {sampler.name!r} have {unknown[0]!r}, of which it names no column. "
            "Name it, or give the sampler rows without it."
        )


class TorchSampler:
    """In torch ops, for any device; truncation sorts."""

    name = "torch"
    columns: Sequence[Column] = (TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED)
    rows: type[SamplingRows] = SamplingRows

    def pick(self, logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
        with few_threads(logits):
            return pick(logits.float(), rows, level)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
        with few_threads(logits):
            return top_logprobs(logits.float(), tokens, count)


@contextmanager
def few_threads(logits: torch.Tensor) -> Iterator[None]:
    """On a CPU, one thread for ops on a few rows of logits.

    Each op waits for the slowest of its threads. Where another program has one of the cores, that is a time slice for
    every op, and there are dozens of them; what a second thread saves on so few rows is less than a step's noise.
    """
    threads = torch.get_num_threads()
    if logits.device.type != "cpu" or logits.numel() > _FEW or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
    """Log-probabilities of these tokens and of the `count` likeliest, from raw logits."""
    total = logits.logsumexp(-1, keepdim=True)
    top, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    own = logits.gather(1, tokens.clamp_min(0)[:, None]) - total
    return TopLogprobs(own[:, 0], ids, top - total)


def pick(logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
    """The next token of every row, or what is wrong with its logits."""
    top, best = logits.max(-1)  # NaN where there is one
    picked = best if level is Sampling.GREEDY or rows is None else _drawn(logits, top, best, rows, level)
    problem = torch.where(top == float("-inf"), NOTHING_ALLOWED, NOT_FINITE)
    return torch.where(top.isfinite(), picked, problem)


def _drawn(
    logits: torch.Tensor, top: torch.Tensor, best: torch.Tensor, rows: SamplingRows, level: Sampling
) -> torch.Tensor:
    warm = rows.temperature > 0
    # From the highest down: nothing overflows upwards, and a low temperature leaves room for the noise.
    scaled = (logits - top[:, None]) / torch.where(warm, rows.temperature, 1.0)[:, None]
    score = scaled + gumbel(rows.seed, rows.positions, logits.shape[-1])
    if level > Sampling.SAMPLED:
        score = torch.where(kept(scaled, rows), score, float("-inf"))
    return torch.where(warm, score.argmax(-1), best)


def kept(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Which tokens top-k, top-p and min-p leave, from logits over temperature whose highest is 0."""
    vocab = scaled.shape[-1]
    ordered, tokens = scaled.sort(dim=-1, stable=True)
    ordered, tokens = ordered.flip(-1), tokens.flip(-1)  # of equals the last comes first
    last = torch.where(rows.top_k > 0, rows.top_k, vocab).clamp(max=vocab).long() - 1
    allowed = ordered >= ordered.gather(1, last[:, None])
    weights = torch.where(allowed, ordered.exp(), 0.0)
    before, total = weights.cumsum(-1) - weights, weights.sum(-1, keepdim=True)
    allowed &= (before < rows.top_p[:, None] * total) | (rows.top_p >= 1)[:, None]
    allowed &= weights >= rows.min_p[:, None]
    return torch.zeros_like(allowed).scatter(1, tokens, allowed)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Gumbel noise for every token: it depends on seed, position and token alone, never on the batch."""
    return noise(hashes(seeds, positions, torch.arange(vocab, device=seeds.device)))


def hashes(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[num_rows, num_tokens]: 32 bits of (seed, position, token), in int64.

    Every step can be undone: at a position no two seeds have the same 64 bits, in a row no two tokens the same hash.
    """
    high, low = (seeds >> 32) & _MASK, seeds & _MASK
    low = _mixed(low ^ _mixed((high + 0x9E3779B9) & _MASK))
    high = _mixed(high ^ _mixed((low + 0x7F4A7C15) & _MASK))
    first = _mixed((low + positions * 0x9E3779B9) & _MASK)
    second = _mixed(high ^ first)
    hashed = _mixed((tokens * 0x85EBCA6B & _MASK)[None] ^ first[:, None])
    return _mixed((hashed + second[:, None]) & _MASK)


def noise(hashed: torch.Tensor) -> torch.Tensor:
    """-log(-log u) where u is the middle of the hash's share of (0, 1); finite for every hash.

    u is never made: float32 has 24 bits for a number near 1, which would be too few, and the largest would round to 1.
    It is taken by its distance from the nearer end, which float32 holds with all its bits.
    """
    is_low = hashed < 1 << 31
    distance = (torch.where(is_low, hashed, _MASK - hashed).float() + 0.5) * 2.0**-32
    return -(-torch.where(is_low, distance.log(), (-distance).log1p())).log()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of 32 bits, in int64, that can be undone."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
