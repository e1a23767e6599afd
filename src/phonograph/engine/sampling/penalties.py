"""Penalties: logits after bias and the penalties for tokens so far, and the counts of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FINITE = torch.finfo(torch.float32).max
_MOST = torch.iinfo(torch.int16).max


@dataclass(frozen=True)
class Penalties:
    """What changes the logits of some rows, gathered from the columns of the same names."""

    counts: torch.Tensor  # [num_rows, vocab]: how often each token was put out
    prompted: torch.Tensor  # [num_rows, vocab]: whether the prompt has it
    bias_ids: torch.Tensor  # [num_rows, MAX_BIASED]; unused places add 0 to token 0
    bias: torch.Tensor
    repetition: torch.Tensor  # [num_rows]
    presence: torch.Tensor
    frequency: torch.Tensor


def penalise(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Logits after bias and penalties, in the order and with the meaning that the OpenAI API gives them.

    What would be beyond float32 is the largest number there is: no penalty makes logits that are not finite.
    """
    biased = logits.scatter_add(1, penalties.bias_ids, penalties.bias)
    said = penalties.counts > 0
    repeated = said | penalties.prompted
    factor = torch.where(repeated, penalties.repetition[:, None], 1.0)
    changed = torch.where(biased > 0, biased / factor, biased * factor)
    changed = changed - penalties.frequency[:, None] * penalties.counts - penalties.presence[:, None] * said
    return torch.where(logits.isfinite(), changed.clamp(-_FINITE, _FINITE), logits)


def with_said(counts: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """Counts ([num_rows, vocab]) after the tokens that each row puts out besides ([num_rows, any]); below 0 is none."""
    for tokens in said.unbind(1):
        places = tokens.clamp_min(0)[:, None]
        held = counts.gather(1, places)
        counts = counts.scatter(1, places, torch.where((tokens[:, None] >= 0) & (held < _MOST), held + 1, held))
    return counts


def count_tokens(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Note in the column `counts` the tokens that these rows put out; only the null row may be there twice.

    For a row that has no token but a problem, and so ends, it does not matter what is counted.
    """
    tokens = tokens.clamp_min(0)
    said = counts[rows, tokens]
    counts.index_put_((rows, tokens), torch.where(said < _MOST, said + 1, said))
