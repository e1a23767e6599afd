"""Prompt scoring: what steps read off of the tokens of prompts, kept with their sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from itertools import accumulate, pairwise

from phonograph.engine.requests.sequence import PromptLogprob, Sequence
from phonograph.engine.requests.step import Chunk, PromptDetails, Sampled, ScheduledStep


def take_scores(step: ScheduledStep, sampled: Sampled) -> tuple[list[Sequence], list[tuple[Sequence, str]]]:
    """Keep the scores of a step; to be called before it is committed.

    Returns whose they are, and those that can't go on, with the reason: no score is missing in silence.
    """
    chunks = [chunk for chunk in step.prefills if chunk.targets]
    parts = _parts(chunks, sampled.scores)
    found, failed = list[Sequence](), list[tuple[Sequence, str]]()
    for chunk, scores in zip(chunks, parts, strict=True):
        sequence = chunk.sequence
        if sequence.finish is not None:
            continue
        problem = _keep(chunk, scores)
        if problem:
            failed.append((sequence, problem))
        else:
            found.append(sequence)
    return found, failed


def joined_scores(step: ScheduledStep, found: Many[Sampled | None]) -> list[PromptDetails] | None:
    """The scores of a step whose prefills were run one by one; those of one that failed mean nothing."""
    nothing: PromptDetails = (0.0, [], [], 0)
    scores = list[PromptDetails]()
    for chunk, sampled in zip(step.prefills, found, strict=True):
        own = None if sampled is None else sampled.scores
        scores += [nothing] * len(chunk.targets) if own is None else own
    return scores or None


def _parts(chunks: Many[Chunk], scores: list[PromptDetails] | None) -> list[list[PromptDetails]]:
    """The scores of each chunk; none where the step has none at all."""
    if scores is None:
        return [[] for _ in chunks]
    ends = accumulate(len(chunk.targets) for chunk in chunks)
    return [scores[first:end] for first, end in pairwise([0, *ends])]


def _keep(chunk: Chunk, scores: list[PromptDetails]) -> str:
    """Add what is new of a chunk's scores: after a preemption some are computed again. Returns what is wrong."""
    sequence, first = chunk.sequence, chunk.start
    if len(scores) != len(chunk.targets):
        return f"the prompt's tokens from position {first + 1} on were not scored"
    num_top = sequence.request.params.prompt_logprobs
    kept = sequence.prompt_logprobs
    skipped = max(0, len(kept) - first)
    for token, (own, ids, values, rank) in zip(chunk.targets[skipped:], scores[skipped:], strict=True):
        if math.isnan(own) or (values and math.isnan(values[0])):
            position = len(kept) + 1
            return (
                f"the model's logits are not finite at position {position}: NaN or infinity among weights or "
                "activations"
            )
        kept.append(PromptLogprob(token, own, _likeliest(ids, values)[:num_top], rank))
    return ""


def _likeliest(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """In order, of equals the lowest token first: it is what greedy sampling takes."""
    found = tuple(zip(ids, values, strict=True))
    if any(one == next_one for one, next_one in pairwise(values)):
        return tuple(sorted(found, key=lambda entry: (-entry[1], entry[0])))
    return found
