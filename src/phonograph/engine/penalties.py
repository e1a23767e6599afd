"""What sequences have said so far, on the device: for penalties and logit bias."""

from __future__ import annotations

import torch

from phonograph.engine.request import MAX_BIASED, SamplingParams
from phonograph.engine.sampler import Penalties
from phonograph.engine.sequence import Sequence

_MOST = torch.iinfo(torch.int16).max


class PenaltyTables:
    """A row per sequence like the request tables, as wide as the vocabulary.

    A row whose sequence asks for nothing is neutral by its factors; what was counted in it does not matter.
    """

    def __init__(self, max_seqs: int, vocab: int, device: torch.device) -> None:
        size = max_seqs + 1
        self.counts = torch.zeros(size, vocab, dtype=torch.int16, device=device)
        self.prompted = torch.zeros(size, vocab, dtype=torch.bool, device=device)
        self.bias_ids = torch.zeros(size, MAX_BIASED, dtype=torch.int64, device=device)
        self.bias = torch.zeros(size, MAX_BIASED, dtype=torch.float32, device=device)
        self.repetition = torch.ones(size, dtype=torch.float32, device=device)
        self.presence = torch.zeros(size, dtype=torch.float32, device=device)
        self.frequency = torch.zeros(size, dtype=torch.float32, device=device)
        self._in_force: set[int] = set()
        """Rows whose factors are not neutral."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of it, for those who save and restore rows."""
        return (
            self.counts,
            self.prompted,
            self.bias_ids,
            self.bias,
            self.repetition,
            self.presence,
            self.frequency,
        )

    def enter(self, sequence: Sequence) -> None:
        """A sequence takes its row; after a preemption what it has said counts again."""
        row, params = sequence.row, sequence.request.params
        if is_penalised(params):
            self._in_force.add(row)
            self._set(row, sequence, params)
        elif row in self._in_force:
            self._clear(row)
            self._in_force.discard(row)

    def _clear(self, row: int) -> None:
        self.bias_ids[row] = 0
        self.bias[row] = 0
        self.repetition[row] = 1
        self.presence[row] = 0
        self.frequency[row] = 0

    def _set(self, row: int, sequence: Sequence, params: SamplingParams) -> None:
        device = self.counts.device
        self._clear(row)
        self.counts[row] = 0
        self.prompted[row] = False
        self.repetition[row] = params.repetition_penalty or 1.0
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.prompted[row, torch.tensor(sequence.request.prompt, device=device)] = True
        if sequence.outputs:
            said = torch.tensor(sequence.outputs, device=device)
            counts = torch.bincount(said, minlength=self.counts.shape[1])
            self.counts[row] = counts.clamp_max(_MOST).to(torch.int16)
        if params.logit_bias:
            count = len(params.logit_bias)
            self.bias_ids[row, :count] = torch.tensor(list(params.logit_bias), device=device)
            self.bias[row, :count] = torch.tensor(list(params.logit_bias.values()), device=device)

    def rows(self, rows: torch.Tensor) -> Penalties:
        """The penalties of these rows."""
        return Penalties(
            self.counts[rows],
            self.prompted[rows],
            self.bias_ids[rows],
            self.bias[rows],
            self.repetition[rows],
            self.presence[rows],
            self.frequency[rows],
        )

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the tokens that these rows put out; only the null row may be there twice.

        For a row that has no token but a problem, and so ends, it does not matter what is counted.
        """
        tokens = tokens.clamp_min(0)
        said = self.counts[rows, tokens]
        self.counts.index_put_((rows, tokens), torch.where(said < _MOST, said + 1, said))


def is_penalised(params: SamplingParams) -> bool:
    """Whether a request needs these tables."""
    changes = (params.presence_penalty != 0.0, params.frequency_penalty != 0.0, bool(params.logit_bias))
    return any(changes) or params.repetition_penalty not in (None, 1.0)
