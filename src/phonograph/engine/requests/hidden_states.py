"""Hidden states that requests ask for: kept with their sequences, as steps bring them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Many

    from phonograph.engine.requests.sequence import Sequence
    from phonograph.engine.requests.step import Sampled, ScheduledStep

States = npt.NDArray[np.float32]

_NOT_FINITE = "the model's hidden states of the prompt are not finite: NaN or infinity among weights or activations"


def take_prompt_states(step: ScheduledStep, sampled: Sampled) -> list[tuple[Sequence, str]]:
    """Keep those of prompts; to be called before the step is committed. Returns who can't go on, and why."""
    failed: list[tuple[Sequence, str]] = []
    first = 0
    for chunk in step.prefills:
        if not chunk.num_stated:
            continue
        found = None if sampled.prompt_states is None else sampled.prompt_states[first : first + chunk.num_stated]
        first, sequence = first + chunk.num_stated, chunk.sequence
        if sequence.finish is not None:
            continue
        if found is None or len(found) != chunk.num_stated:
            failed.append((sequence, f"hidden states of the prompt from position {chunk.start} on did not come"))
        elif not np.isfinite(found).all():
            failed.append((sequence, _NOT_FINITE))
        else:  # after a preemption some are computed again
            new = found[max(0, sequence.num_prompt_states - chunk.start) :]
            sequence.prompt_states.append(new)
            sequence.num_prompt_states += len(new)
    return failed


def note_states(step: ScheduledStep, sampled: Sampled, committed: Mapping[Sequence, int]) -> None:
    """Keep those that tokens were picked from, of as many tokens as each sequence took."""
    assert sampled.states is not None
    for sequence, part in zip(step.sampling, sampled.by_row(), strict=True):
        taken = committed.get(sequence, 0)
        if taken and sequence.request.params.return_hidden_states is not None:
            sequence.states.append(sampled.states[part.start : part.start + taken])


def joined_states(parts: Many[tuple[int, States | None]]) -> States | None:
    """Those of passes of one sequence each, that have so many; of one that failed they are zeros."""
    known = [found for _, found in parts if found is not None]
    if not known:
        return None
    return np.concatenate(
        [np.zeros((count, known[0].shape[1]), np.float32) if found is None else found for count, found in parts]
    )


def states_of(sequence: Sequence, prompt: Many[States], num_tokens: int) -> States | None:
    """What a request gets for so many tokens of a sequence: [any, hidden]; None where it did not ask.

    `prompt` are those of the request's prompt, which its first sequence has for all. The first output was picked from
    the last of these.
    """
    asked = sequence.request.params.return_hidden_states
    if asked is None:
        return None
    parts: list[Any] = [*prompt, *sequence.states] if asked == "all" else [*sequence.states]
    if not parts:
        return np.zeros((0, 0), np.float32)
    outputs = np.concatenate(sequence.states)[:num_tokens] if sequence.states else parts[0][:0]
    return np.concatenate([*prompt, outputs[1:]]) if asked == "all" else outputs
