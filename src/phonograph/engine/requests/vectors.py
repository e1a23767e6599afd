"""Vectors of prompts: what steps have summed of their hidden states, over as many chunks as a prompt is computed in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from phonograph.engine.requests.pooling import Pooling
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Sampled, ScheduledStep
from phonograph.errors import RequestError

Vector = npt.NDArray[np.float32]

_NOT_FINITE = "the model's hidden states are not finite: NaN or infinity among weights or activations"


class PooledSum:
    """What the chunks of a prompt have summed so far; in float64, so that the number of chunks hardly shows."""

    def __init__(self, hidden: int) -> None:
        self._sum = np.zeros(hidden, dtype=np.float64)

    def add(self, part: npt.NDArray[Any]) -> None:
        """Take in the sum of a chunk."""
        self._sum += part

    def vector(self, pooling: Pooling, num_prompt: int) -> Vector:
        """What the request gets, once all chunks are in it."""
        return (self._sum / (num_prompt if pooling == "mean" else 1)).astype(np.float32)


def add_sums(step: ScheduledStep, sums: npt.NDArray[np.float32]) -> list[tuple[Sequence, str]]:
    """Add each chunk's sum to its sequence, and make the vectors of those that end; returns who fails, and why."""
    failed: list[tuple[Sequence, str]] = []
    for chunk, part in zip(step.pooling, sums, strict=True):
        sequence, pooling = chunk.sequence, chunk.sequence.request.pooling
        if sequence.finish is not None or pooling is None:
            continue
        if sequence.pooled is None or chunk.start == 0:  # computed anew, after a preemption too
            sequence.pooled = PooledSum(len(part))
        sequence.pooled.add(part)
        if chunk.is_end:
            sequence.embedding = sequence.pooled.vector(pooling, sequence.num_prompt)
            if not np.isfinite(sequence.embedding).all():
                sequence.embedding = None
                failed.append((sequence, _NOT_FINITE))
    return failed


def joined_sums(parts: list[Sampled | None]) -> npt.NDArray[np.float32] | None:
    """The sums of passes of one sequence each; that of one that failed means nothing."""
    found = [None if part is None else part.pooled for part in parts]
    known = [one for one in found if one is not None]
    return np.concatenate([known[0] * 0 if one is None else one for one in found]) if known else None


def embedding_of(sequence: Sequence) -> Vector:
    """What a sequence has ended with; RequestError, with the reason, where that is none."""
    if sequence.embedding is None:
        why = sequence.error or "it was cancelled"
        raise RequestError(f"embedding a prompt of {sequence.num_prompt} tokens: {why}.", field="prompt")
    return sequence.embedding


def normalized(vector: Vector) -> Vector:
    """The vector at length 1; one of zeros stays as it is."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector.astype(np.float64) / length).astype(np.float32) if length else vector
