"""What sequences have said so far, on the device: for penalties and logit bias. Made when first asked for."""

from __future__ import annotations

import torch

from phonograph.engine.request import SamplingParams
from phonograph.engine.sampler import Penalties
from phonograph.engine.sequence import Sequence


class PenaltyTables:
    """A row per sequence like the request tables, as wide as the vocabulary. Rows without penalties are neutral."""

    def __init__(self, max_seqs: int, vocab: int, device: torch.device) -> None:
        size = max_seqs + 1
        self.counts = torch.zeros(size, vocab, dtype=torch.int32, device=device)
        self.prompted = torch.zeros(size, vocab, dtype=torch.bool, device=device)
        self.bias = torch.zeros(size, vocab, dtype=torch.float32, device=device)
        self.repetition = torch.ones(size, dtype=torch.float32, device=device)
        self.presence = torch.zeros(size, dtype=torch.float32, device=device)
        self.frequency = torch.zeros(size, dtype=torch.float32, device=device)

    def enter(self, sequence: Sequence) -> None:
        """A sequence takes its row; after a preemption what it has said counts again."""
        row, params, device = sequence.row, sequence.request.params, self.counts.device
        self.counts[row] = 0
        self.prompted[row] = False
        self.bias[row] = 0
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        if not is_penalised(params):
            return
        self.prompted[row, torch.tensor(sequence.request.prompt, device=device)] = True
        if sequence.outputs:
            said = torch.tensor(sequence.outputs, device=device)
            self.counts[row] = torch.bincount(said, minlength=self.counts.shape[1]).int()
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=device)
            self.bias[row, tokens] = torch.tensor(list(params.logit_bias.values()), device=device)

    def rows(self, rows: torch.Tensor) -> Penalties:
        """The penalties of these rows."""
        return Penalties(
            self.counts[rows],
            self.prompted[rows],
            self.bias[rows],
            self.repetition[rows],
            self.presence[rows],
            self.frequency[rows],
        )

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the tokens that these rows put out."""
        self.counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


def is_penalised(params: SamplingParams) -> bool:
    """Whether a request needs these tables."""
    changes = (params.repetition_penalty != 1.0, params.presence_penalty != 0.0, params.frequency_penalty != 0.0)
    return any(changes) or bool(params.logit_bias)
