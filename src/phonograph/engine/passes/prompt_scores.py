"""PromptScores: how likely the tokens of prompts are to the model, read off in the pass that computes them anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from phonograph.engine.requests.request import MAX_LOGPROBS
from phonograph.engine.sampling.sampler import Sampler, TopLogprobs

PIECE = 32
"""Tokens whose logits are there at a time: they are as wide as the vocabulary, and a prompt may fill a step."""


class PromptScores(NamedTuple):
    """Of each scored token, on the device."""

    logprobs: TopLogprobs
    ranks: torch.Tensor  # [num_scored]: how many tokens are at least as likely, itself among them


def score_prompts(
    hidden: torch.Tensor, targets: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], sampler: Sampler
) -> PromptScores:
    """The scores of tokens that follow these hidden states, some of them at a time."""
    found = [
        _scored(logits(hidden[start : start + PIECE]), targets[start : start + PIECE], sampler)
        for start in range(0, targets.shape[0], PIECE)
    ]
    several = [one.logprobs for one in found]
    logprobs = TopLogprobs(
        torch.cat([one.token_logprob for one in several]),
        torch.cat([one.top_ids for one in several]),
        torch.cat([one.top_logprobs for one in several]),
    )
    return PromptScores(logprobs, torch.cat([one.ranks for one in found]))


def _scored(logits: torch.Tensor, targets: torch.Tensor, sampler: Sampler) -> PromptScores:
    own = logits.gather(1, targets[:, None])
    return PromptScores(sampler.logprobs(logits, targets, MAX_LOGPROBS), (logits >= own).sum(-1))


def scoring_bytes(vocab: int, itemsize: int) -> int:
    """Memory that scoring takes at a time: logits as they are, in float32, and what is compared or sorted of them."""
    return PIECE * vocab * (itemsize + 3 * torch.float32.itemsize)
