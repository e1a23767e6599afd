"""Picks the next token of every sequence, on the device and inside the graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

_MASK = 0xFFFFFFFF


class Sampling(IntEnum):
    """How much a batch asks of the sampler; each level has recordings of its own and can do all below it."""

    GREEDY = 0
    SAMPLED = 1
    """Temperature."""
    TRUNCATED = 2
    """Top-k, top-p, min-p."""
    PENALISED = 3
    """Repetition, presence and frequency penalties, logit bias."""


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of the rows of a step, gathered from the request tables."""

    temperature: torch.Tensor  # [num_rows], 0 for greedy
    top_k: torch.Tensor  # 0 for all
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # of the token that is picked


@dataclass(frozen=True)
class Penalties:
    """What changes logits by what was said so far."""

    counts: torch.Tensor  # [num_rows, vocab]: how often each token was put out
    prompted: torch.Tensor  # [num_rows, vocab]: whether the prompt has it
    bias_ids: torch.Tensor  # [num_rows, MAX_BIASED]; unused places add 0 to token 0
    bias: torch.Tensor
    repetition: torch.Tensor  # [num_rows]
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True)
class TopLogprobs:
    """How likely the model thought the picked tokens, and its favourites, before temperature and penalties."""

    token_logprob: torch.Tensor  # [num_rows]
    top_ids: torch.Tensor  # [num_rows, MAX_LOGPROBS]
    top_logprobs: torch.Tensor


class Sampler(Protocol):
    """One implementation; stateless, so that graphs of all shapes share it. Logits may be of any float type."""

    @property
    def name(self) -> str: ...

    def pick(self, logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
        """The next token of every row, from logits after penalties; at a level, what it and those below it offer.

        Only a greedy batch may come without rows.
        """
        ...

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
        """Log-probabilities of these tokens and of the `count` likeliest, from raw logits."""
        ...


class TorchSampler:
    """In torch ops, for any device; truncation sorts."""

    name = "torch"

    def pick(self, logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
        return pick(logits.float(), rows, level)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
        return top_logprobs(logits.float(), tokens, count)


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
    """Log-probabilities of these tokens and of the `count` likeliest, from raw logits."""
    total = logits.logsumexp(-1, keepdim=True)
    top, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return TopLogprobs((logits.gather(1, tokens[:, None]) - total)[:, 0], ids, top - total)


def penalise(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Logits after bias and penalties, in the order and with the meaning that the OpenAI API gives them."""
    logits = logits.scatter_add(1, penalties.bias_ids, penalties.bias)
    said = penalties.counts > 0
    repeated = said | penalties.prompted
    factor = torch.where(repeated, penalties.repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - penalties.frequency[:, None] * penalties.counts
    return logits - penalties.presence[:, None] * said


def pick(logits: torch.Tensor, rows: SamplingRows | None, level: Sampling) -> torch.Tensor:
    """The next token of every row. Noise depends on seed, position and token alone, never on the batch."""
    best = logits.argmax(-1)
    if level is Sampling.GREEDY or rows is None:
        return best
    scaled = logits / rows.temperature.clamp_min(1e-6)[:, None]
    noise = gumbel(rows.seeds, rows.positions, logits.shape[-1])
    if level is Sampling.SAMPLED:
        drawn = (scaled + noise).argmax(-1)
    else:
        ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        allowed = _allowed(ordered, rows)
        place = torch.where(allowed, ordered + noise.gather(1, tokens), float("-inf")).argmax(-1)
        drawn = tokens.gather(1, place[:, None])[:, 0]
    return torch.where(rows.temperature > 0, drawn, best)


def _allowed(ordered: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Which of the tokens, most likely first, top-k, top-p and min-p leave; always the first."""
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    rank = torch.arange(ordered.shape[-1], device=ordered.device)[None]
    allowed = before < rows.top_p[:, None]
    allowed &= (rows.top_k[:, None] == 0) | (rank < rows.top_k[:, None])
    allowed &= probs >= rows.min_p[:, None] * probs[:, :1]
    return allowed | (rank == 0)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Gumbel noise for every token, from a hash of (seed, position, token)."""
    row = _mixed((seeds & _MASK) ^ _mixed((seeds >> 32) & _MASK))
    row = _mixed((row + positions * 0x9E3779B9) & _MASK)
    tokens = torch.arange(vocab, device=seeds.device)
    hashed = _mixed((row[:, None] ^ (tokens * 0x85EBCA6B)[None]) & _MASK)
    uniform = ((hashed >> 8).float() + 0.5) * 2.0**-24
    return -(-uniform.log()).log()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash, in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
