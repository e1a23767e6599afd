"""Which tokens a grammar allows next: protocols, and the table that holds the answer on the device."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any, Protocol

import numpy as np
import torch

from phonograph.engine.request import GrammarSpec
from phonograph.engine.sequence import Sequence

_ALL = -1
"""Thirty-two tokens, all of them allowed."""


class Constraint(Protocol):
    """How far one sequence is in its grammar."""

    def mask(self) -> Any:
        """A bit for every token, packed into an int32 array; set where the token may come next."""
        ...

    def accept(self, token: int) -> None:
        """Go on with a token that was picked."""
        ...


class GrammarCompiler(Protocol):
    """Makes constraints; one that can't be made is a RequestError."""

    def prepare(self) -> None:
        """Make now what the first constraint would make."""
        ...

    def start(self, spec: GrammarSpec, count: int = 1) -> Many[Constraint]:
        """For so many sequences, each at its beginning."""
        ...


class MaskTable:
    """A row of allowed tokens per sequence, like the request tables; a row without a grammar allows everything."""

    def __init__(self, max_seqs: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self.words = torch.full((max_seqs + 1, -(-vocab // 32)), _ALL, dtype=torch.int32, device=device)
        self._in_force: set[int] = set()

    def free(self, row: int) -> None:
        """Somebody new takes the row: everything is allowed again."""
        if row in self._in_force:
            self.words[row] = _ALL
            self._in_force.discard(row)

    def load(self, sequences: Iterable[Sequence]) -> None:
        """Write what is allowed to those of these sequences that have a grammar."""
        masks = {seq.row: self._fitted(seq.constraint.mask()) for seq in sequences if seq.constraint is not None}
        if masks:
            device = self.words.device
            self._in_force.update(masks)
            rows = torch.tensor(list(masks), device=device)
            self.words[rows] = torch.from_numpy(np.stack(list(masks.values()))).to(device)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits with what is not allowed at minus infinity; what is no logit stays, for the sampler to see."""
        bits = torch.arange(32, device=logits.device, dtype=torch.int32)
        allowed = ((self.words[rows][:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
        return torch.where(allowed.bool() | ~(logits < float("inf")), logits, float("-inf"))

    def _fitted(self, mask: Any) -> Any:
        """The mask in the width of the model; rows behind the vocabulary are never allowed."""
        fitted = np.zeros(self.words.shape[1], dtype=np.int32)
        count = min(len(mask), len(fitted))
        fitted[:count] = mask[:count]
        return fitted
