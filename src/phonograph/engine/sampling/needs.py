"""SamplingNeeds: what the requests of a batch need of the sampler, taken together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.sampling.honoured import HonouredParameters


@dataclass(frozen=True)
class SamplingNeeds:
    """The highest level, and whether a request needs more than tokens."""

    level: Sampling = Sampling.GREEDY
    logprobs: bool = False
    constrained: bool = False
    """What may come next depends on a request's tokens so far: it follows a grammar."""
    masked: bool = False
    """A request has tokens that may not come, or not yet."""
    states: bool = False
    """A request wants hidden states."""

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        """Those of both."""
        return SamplingNeeds(
            max(self.level, other.level),
            self.logprobs or other.logprobs,
            self.constrained or other.constrained,
            self.masked or other.masked,
            self.states or other.states,
        )

    @property
    def is_detailed(self) -> bool:
        """Whether it needs tables as wide as the vocabulary, or tells more than tokens."""
        return self.logprobs or self.constrained or self.masked or self.level is Sampling.PENALISED


def needs_of(sequences: Iterable[Sequence], honoured: HonouredParameters) -> SamplingNeeds:
    """What these sequences need together; the level of each is looked for once."""
    level, logprobs, constrained, masked, states = Sampling.GREEDY, False, False, False, False
    for sequence in sequences:
        params = sequence.request.params
        if sequence.level is None:
            sequence.level = honoured.level_of(params)
        level = max(level, sequence.level)
        logprobs |= params.logprobs is not None
        constrained |= sequence.constraint is not None
        masked |= sequence.masks is not None
        states |= params.return_hidden_states is not None
    return SamplingNeeds(level, logprobs, constrained, masked, states)
