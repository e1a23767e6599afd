"""Sequence: one choice of a request, followed by counts while its steps are in flight."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from phonograph.engine.requests.request import FinishReason, Request

if TYPE_CHECKING:
    from phonograph.engine.requests.constraints import Constraint
    from phonograph.engine.requests.hidden_states import States
    from phonograph.engine.requests.parameter import Sampling
    from phonograph.engine.requests.token_masks import TokenMasks
    from phonograph.engine.requests.vectors import PooledSum, Vector


class State(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    """For a row and pages; also after a preemption."""
    RUNNING = "running"
    FINISHED = "finished"


Rank = tuple[int, int, float, int]
"""(0 once it is older than the scheduler's patience, -priority, arrival, serial): the lower goes first."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was to the model, before temperature and penalties, and its likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, logprob), the likeliest first; as many as the request has set."""


@dataclass(frozen=True, slots=True)
class PromptLogprob(TokenLogprob):
    """How likely a token of a prompt was to the model after those before it."""

    rank: int
    """How many tokens were at least as likely, itself among them."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One generation of a request; a request with n > 1 makes n of them.

    Counts run ahead of values: launching a step advances `num_computed` and `num_launched_outputs` at once; the tokens
    themselves are appended to `outputs` when that step is committed, up to `max_ahead` steps later. Where a step may
    bring several tokens or none, its commit corrects the counts.
    """

    request: Request
    index: int
    """Which of the request's n sequences it is."""
    max_outputs: int
    """`max_tokens`, clipped to the context."""
    stop_ids: frozenset[int]
    rank: Rank
    state: State = State.WAITING
    row: int = 0
    """Its row in the device tables, from 1; 0 is the null row: it has none."""
    pages: list[int] = field(default_factory=list)
    num_tabled: int = 0
    """How many of its pages the device tables know."""
    capacity: int = 0
    """Tokens that its pages hold."""
    num_computed: int = 0
    """Tokens whose KV is written by launched steps, or was found in the prefix cache; the most that can be, while a
    step is in flight."""
    num_launched_outputs: int = 0
    """Outputs that launched steps sample; the fewest that can be, while a step is in flight."""
    prefill_end: int = 0
    """Up to here tokens come from the host: the prompt, and after a preemption the outputs so far too."""
    num_cached: int = 0
    """Prompt tokens that the prefix cache had when it was first admitted."""
    num_drafted: int = 0
    """Tokens that were drafted for it."""
    num_accepted: int = 0
    """Those of them that it took."""
    last_step: int = 0
    """The latest step that was launched with it; its row and pages stay until that one is committed."""
    outputs: list[int] = field(default_factory=list)
    """Committed tokens."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each output, where the request has logprobs."""
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as committed steps have scored them."""
    states: list[States] = field(default_factory=list)
    """Hidden states that its outputs were picked from, where the request wants them."""
    prompt_states: list[States] = field(default_factory=list)
    """Those of the prompt, as far as committed steps have brought them. Of n sequences the first has those of all."""
    num_prompt_states: int = 0
    """How many these are."""
    pooled: PooledSum | None = None
    """Of a request that is pooled, what its committed chunks have summed."""
    embedding: Vector | None = None
    """What became of that, once it has ended well."""
    constraint: Constraint | None = None
    """Which tokens may come next, where that depends on those before: where it is in its grammar."""
    masks: TokenMasks | None = None
    """Which tokens may come at all, or after a number of others."""
    level: Sampling | None = None
    """How much it needs of the sampler; None until a step is made for it."""
    finish: FinishReason | None = None
    error: str = ""
    """What went wrong, for FinishReason.ERROR."""
    error_field: str = ""
    """The field of the request that is at fault, where one is."""
    max_computed: int = field(init=False)
    """Tokens whose keys and values it can ever need: those of the last output are never read."""

    def __post_init__(self) -> None:
        self.max_computed = len(self.request.prompt) + max(self.max_outputs, 1) - 1

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_in_flight(self) -> int:
        """Of a row that decodes, tokens that launched steps compute and no commit has told of: more than they bring,
        where rounds are among them."""
        return self.num_computed + 1 - len(self.request.prompt) - len(self.outputs)

    @property
    def is_scored(self) -> bool:
        """Whether nothing of its prompt is left to be scored. Of n sequences the first has the scores of all."""
        params, scored = self.request.params, len(self.prompt_logprobs)
        return params.prompt_logprobs is None or self.index > 0 or scored >= len(self.request.prompt) - 1

    @property
    def is_stated(self) -> bool:
        """Whether no hidden state of its prompt is left to be brought."""
        asked = self.request.params.return_hidden_states
        return asked != "all" or self.index > 0 or self.num_prompt_states >= len(self.request.prompt)

    @property
    def places_per_token(self) -> int:
        """Places of a step that a token of its prompt takes: for its score, and for its hidden state."""
        return (not self.is_scored) + (not self.is_stated)

    def num_stated(self, start: int, stop: int) -> int:
        """Of how many tokens from `start` on, up to `stop`, hidden states are wanted: those of the prompt."""
        return 0 if self.is_stated else max(0, min(stop, len(self.request.prompt)) - start)

    @property
    def num_shareable(self) -> int:
        """Tokens whose pages may be found in the prefix cache: pages don't hold what else is wanted of a prompt.

        Of one that is pooled that is every hidden state. The likelihood of a token is read off while the one before it
        is computed: what is not scored is computed. So are hidden states that are wanted.
        """
        if self.request.pooling is not None:
            return 0
        known = len(self.request.prompt) + len(self.outputs)
        scored = known if self.is_scored else len(self.prompt_logprobs) + 1
        return min(scored, known if self.is_stated else self.num_prompt_states)

    def targets(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens whose likelihood is read off after those from `start` up to `stop`: the prompt, one further."""
        return () if self.is_scored else self.request.prompt[start + 1 : stop + 1]

    @property
    def is_draft_bounded(self) -> bool:
        """Whether fewer tokens may be drafted for it than an engine drafts, or none."""
        asked = self.request.params.speculate
        return self.constraint is not None or not (asked is None or asked is True)

    def draft_depth(self, most: int) -> int:
        """Tokens that may be drafted for it in a round, of so many; none where the next step depends on its text."""
        if not self.is_draft_bounded:
            return most
        return 0 if self.constraint is not None else min(self.request.params.speculate or 0, most)

    def has_room(self, count: int) -> bool:
        """Whether its pages hold so many more tokens, or all that it can ever need: what is beyond is not kept."""
        return self.capacity - self.num_computed >= count or self.capacity >= self.max_computed

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def noise_seed(self) -> int:
        """What its noise is made from, in 64 bits: the request's seed for the first of n.

        Seeds of the others, and of requests without one, are negative, and a request's own negative seed is mapped to a
        non-negative one: so no request can ask for the draws of another's second sequence.
        """
        given = self.request.params.seed
        if given is None:
            bits = hash((self.request.id, self.request.arrival, self.index))
        elif self.index == 0:
            return given if given >= 0 else _hashed(b"%d" % given) % (1 << 63)
        else:
            bits = _hashed(b"%d/%d" % (given, self.index))
        return bits % (1 << 63) - (1 << 63)

    def take(self, tokens: list[int]) -> tuple[list[int], FinishReason | None, int]:
        """Append what a step brought, up to the sequence's end; what comes after that is dropped.

        Returns what was appended, why the sequence ends with it, if it does, and the problem that came in place of
        the next token, or 0.
        """
        outputs, first = self.outputs, len(self.outputs)
        for token in tokens:
            if token < 0:
                return outputs[first:], None, token
            outputs.append(token)
            if token in self.stop_ids:
                return outputs[first:], FinishReason.STOP, 0
            if len(outputs) >= self.max_outputs:
                return outputs[first:], FinishReason.LENGTH, 0
        return outputs[first:], None, 0

    def pooled_part(self, start: int, stop: int) -> tuple[int, int] | None:
        """Which tokens of the chunk from `start` to `stop` are summed, counted from `start`; at its end there are some,
        unless it is not pooled."""
        pooling = self.request.pooling
        if pooling is None or (pooling == "last" and stop < self.num_prompt):
            return None
        return (0 if pooling == "mean" else stop - start - 1), stop - start

    def known(self) -> tuple[int, ...]:
        """The prompt and the committed outputs."""
        return (*self.request.prompt, *self.outputs) if self.outputs else self.request.prompt

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens from `start` up to `stop`."""
        num_prompt = len(self.request.prompt)
        if stop <= num_prompt:
            return self.request.prompt[start:stop]
        return (*self.request.prompt[start:], *self.outputs[max(0, start - num_prompt) : stop - num_prompt])

    def __repr__(self) -> str:
        where = f"row {self.row}" if self.row else self.state.value
        return f"<Sequence {self.request.id}[{self.index}] {where}, {self.num_prompt}+{len(self.outputs)} tokens>"


def _hashed(text: bytes) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
