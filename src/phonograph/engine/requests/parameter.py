"""SamplingParameter: a field of SamplingParams, as the columns that carry it declare it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import DeclarationError


class Sampling(IntEnum):
    """How much a batch needs of the sampler; each level has recordings of its own and can do all below it."""

    GREEDY = 0
    SAMPLED = 1
    """Temperature."""
    TRUNCATED = 2
    """Top-k, top-p, min-p."""
    PENALISED = 3
    """Repetition, presence and frequency penalties, logit bias."""


@dataclass(frozen=True)
class SamplingParameter:
    """Which level of sampling applies a parameter, and when a request does not set it."""

    name: str
    """The field of the parameters."""
    level: Sampling
    """The lowest that applies it: recordings of the levels below it leave it out."""
    off: object = field(default=None, hash=False)
    """The value that changes nothing; None never does."""
    of_draws: bool = False
    """Whether it changes nothing at temperature 0, where no token is drawn."""
    of: type[SamplingParams] = SamplingParams
    """Whose field it is."""

    def __post_init__(self) -> None:
        if self.name not in self.of.__dataclass_fields__:
            raise DeclarationError(f"{self.of.__name__} has no field {self.name!r} for a parameter. Add it, or rename.")
        if self.level is Sampling.GREEDY:
            raise DeclarationError(
                f"the parameter {self.name!r} is for greedy sampling, which reads none. Take a higher level."
            )

    def is_set(self, params: SamplingParams) -> bool:
        """Whether these parameters set it to something that can change tokens."""
        value = getattr(params, self.name, None)  # parameters of another class don't have it
        return value is not None and value != self.off

    def needs(self, params: SamplingParams) -> Sampling:
        """The level that these parameters need because of it."""
        idle = not self.is_set(params) or (self.of_draws and params.temperature == 0)
        return Sampling.GREEDY if idle else self.level
