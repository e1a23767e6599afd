"""ScheduledStep and Sampled: the scheduler's plan, the tokens that come back, and the updates of its commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.errors import PhonographError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NOT_FINITE = -1
"""In place of a token: the logits that it was to be picked from hold NaN or +inf."""
NOTHING_ALLOWED = -2
"""In place of a token: all logits are -inf, as under a mask that allows nothing."""
NO_TOKEN = -3
"""In place of a token, and of all that follow in its row: the step brought the row no more."""
NO_DRAFT = -4
"""The same, of a place for which nothing was drafted."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Prefill tokens of one sequence: they come from the host and are computed from position `start` on."""

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    samples: bool
    """Whether it reaches the end of what the host knows, so that the step samples the sequence's next token."""
    enters: bool
    """Whether the sequence got its row in this step, fresh or after a preemption."""
    targets: tuple[int, ...] = ()
    """What follows its first tokens, where the prompt is scored: the likelihood of each is read off the one before."""
    pooled: tuple[int, int] | None = None
    """Of a request that is pooled, which of the tokens are summed, from the first up to the second."""
    num_stated: int = 0
    """Of how many of its first tokens hidden states are wanted."""

    @classmethod
    def of(cls, sequence: Sequence, start: int, stop: int, *, samples: bool, enters: bool) -> Chunk:
        """The tokens from `start` up to `stop`, and all that is wanted of them."""
        known, targets = sequence.tokens(start, stop), sequence.targets(start, stop)
        part, num_stated = sequence.pooled_part(start, stop), sequence.num_stated(start, stop)
        return cls(sequence, start, known, samples, enters, targets, part, num_stated)

    @property
    def is_end(self) -> bool:
        """Whether the prompt ends with it, and nothing is sampled after that."""
        sequence = self.sequence
        return sequence.max_outputs == 0 and self.start + len(self.tokens) == len(sequence.request.prompt)

    @property
    def count(self) -> int:
        return len(self.tokens)


StepKind = Literal["round", "plain"]
"""Whether a step has places for drafts, or one token for each row that decodes."""


def kind_of(tokens_per_row: int) -> StepKind:
    """Of a step that computes so many tokens for each decode."""
    return "round" if tokens_per_row > 1 else "plain"


PageUpdate = tuple[int, int, int]
"""(row, index, page): a change of the device tables."""


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """One forward pass, planned by counts.

    A decode computes `tokens_per_row` tokens and samples what follows them; token and position are in the device
    tables, so it is named by its sequence alone. While nothing changes, consecutive steps carry the *same* tuple
    `decodes`, so what is derived from it can be kept.
    """

    number: int
    decodes: tuple[Sequence, ...]
    prefills: tuple[Chunk, ...]
    page_updates: tuple[PageUpdate, ...]
    """To be written to the device tables before the step runs; names no place twice."""
    tokens_per_row: int = 1
    """Tokens that it computes for each decode, and that it can bring each at most."""
    pass_name: str = field(kw_only=True)
    """The forward pass that runs it."""
    catches_up: bool = field(default=False, kw_only=True)
    """Whether, before that, the drafter reads what earlier steps left of the decodes; it drafts then for a round."""
    probes: bool = field(default=False, kw_only=True)
    """Whether it drafts then although the step is plain, and drafts come back with the tokens (`Sampled.probed`)."""
    sampling: tuple[Sequence, ...] = field(init=False)
    """Sequences that the step samples a token for, in batch order: decodes, then prefills that reach their end."""

    def __post_init__(self) -> None:
        sampled = tuple(chunk.sequence for chunk in self.prefills if chunk.samples)
        object.__setattr__(self, "sampling", self.decodes + sampled if sampled else self.decodes)

    @property
    def new_rows(self) -> tuple[Chunk, ...]:
        """First chunks in a new row: their `start` is the length that the device tables begin with."""
        return tuple(chunk for chunk in self.prefills if chunk.enters)

    @property
    def pooling(self) -> tuple[Chunk, ...]:
        """Chunks whose hidden states are summed, in the order of the batch."""
        return tuple(chunk for chunk in self.prefills if chunk.pooled is not None)

    @property
    def num_seqs(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) * self.tokens_per_row + sum(chunk.count for chunk in self.prefills)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that take part, in the order of the batch."""
        return self.decodes + tuple(chunk.sequence for chunk in self.prefills)


TokenDetails = tuple[float, list[int], list[float]]
"""(log-probability of the token, the likeliest tokens, their log-probabilities)"""
PromptDetails = tuple[float, list[int], list[float], int]
"""The same of a token of a prompt, and its rank."""


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, on the host: the tokens of each of `step.sampling`, one after the other."""

    tokens: list[int]
    """Below 0 where there is a problem instead (see above)."""
    counts: list[int] | None = None
    """How many of the tokens each has; None where all have one."""
    logprobs: list[TokenDetails] | None = None
    """For each token, where a request has logprobs."""
    scores: list[PromptDetails] | None = None
    """For each of the targets of all prefills, in their order, where there are some."""
    pooled: npt.NDArray[np.float32] | None = None
    """[num_pooled, hidden]: the sums of `step.pooling`, where there are some; None too where all of these failed."""
    states: npt.NDArray[np.float32] | None = None
    """[num_tokens, hidden]: what each token was picked from, where a request wants that."""
    prompt_states: npt.NDArray[np.float32] | None = None
    """[any, hidden]: of prompts, those that `Chunk.num_stated` tells of, in the order of prefills."""
    drafted: list[int] | None = None
    """For how many places of each row something was drafted; None where rows have one token each."""
    probed: npt.NDArray[np.int64] | None = None
    """[num_decodes, depth]: what may follow the last token that each row had before a plain step, by its drafter;
    below 0 is none."""

    def check(self, step: ScheduledStep) -> None:
        """Raise if this can't be what the step sampled."""
        if self.probed is not None and len(self.probed) != len(step.decodes):
            raise PhonographError(
                f"committing step {step.number}: found drafts of {len(self.probed)} rows, expected "
                f"{len(step.decodes)}. Give those of step.decodes, in its order."
            )
        if step.prefills:
            self._check_pooled(step)
        counts, expected = self.counts, len(step.sampling)
        if counts is not None:
            decodes, ends, most = counts[: len(step.decodes)], counts[len(step.decodes) :], step.tokens_per_row
            if len(counts) != expected or not all(0 <= n <= most for n in decodes) or any(n != 1 for n in ends):
                raise PhonographError(
                    f"committing step {step.number}: found the counts {counts}, expected {expected}. Give 0 to {most} "
                    f"for each of {len(step.decodes)} decodes, then 1 for every prompt that ends."
                )
            expected = sum(counts)
        if len(self.tokens) != expected:
            raise PhonographError(
                f"committing step {step.number}: found {len(self.tokens)} tokens, expected {expected}. "
                f"Give those of each of step.sampling, in its order."
            )
        if self.scores is None:
            return
        num_scored = sum(len(chunk.targets) for chunk in step.prefills)
        if len(self.scores) != num_scored:
            raise PhonographError(
                f"committing step {step.number}: found {len(self.scores)} scores of prompts, expected {num_scored}. "
                "Give those of the targets of step.prefills, in their order."
            )

    def _check_pooled(self, step: ScheduledStep) -> None:
        chunks, found = step.pooling, 0 if self.pooled is None else len(self.pooled)
        if found != len(chunks) and (found or any(chunk.sequence.finish is None for chunk in chunks)):
            raise PhonographError(
                f"committing step {step.number}: found {found} sums of hidden states, expected {len(chunks)}. "
                "Give one for each of step.pooling, in its order."
            )

    def outside(self, step: ScheduledStep, vocab: int) -> list[tuple[Sequence, str]]:
        """Whose tokens are not in the vocabulary, and what is wrong: they are no rows of the embedding table."""
        found: list[tuple[Sequence, str]] = []
        for sequence, part in zip(step.sampling, self.by_row(), strict=False):
            highest = max(self.tokens[part], default=0)
            if highest >= vocab:
                found.append((sequence, _no_token(highest, sequence, vocab)))
        return found

    def by_row(self) -> list[slice]:
        """Where the tokens of each of `step.sampling` are."""
        ends = list(accumulate(self.counts)) if self.counts is not None else range(1, len(self.tokens) + 1)
        return [slice(first, end) for first, end in pairwise([0, *ends])]


Update = tuple[Sequence, tuple[int, ...], FinishReason | None]
"""(sequence, new tokens, why it ended if it did); a plain tuple, since a commit makes one for every sequence."""


def problem_at(code: int, sequence: Sequence) -> tuple[str, str]:
    """What was wrong with the logits that the sequence's next token was to be picked from, and the request's field that
    is at fault, if one is."""
    position = sequence.num_prompt + len(sequence.outputs)
    if code == NOTHING_ALLOWED:
        by = "the grammar, the request's tokens that may or may not come, or the model itself"
        return f"no token is allowed at position {position}: {by} forbids all of them", _forbidding(sequence)
    if code == NOT_FINITE:
        said = f"the model's logits are not finite at position {position}: NaN or infinity among weights or activations"
        return said, ""
    return _no_token(code, sequence), ""


def _forbidding(sequence: Sequence) -> str:
    """The field of a request that says which tokens may come."""
    params = sequence.request.params
    if params.allowed_token_ids is not None:
        return "allowed_token_ids"
    if params.bad_token_ids:
        return "bad_words" if params.bad_words else "bad_token_ids"
    return "min_tokens" if params.min_tokens else ""


def _no_token(found: int, sequence: Sequence, vocab: int | None = None) -> str:
    position = sequence.num_prompt + len(sequence.outputs)
    among = f"in the vocabulary of {vocab}" if vocab is not None else "a token, nor a problem that is known"
    return (
        f"at position {position} the step returned {found}, which is not {among}. Check what picks tokens "
        "(Sampler.pick, Rounds.accept) and what brings them to the host (StepExecutor.collect)"
    )
