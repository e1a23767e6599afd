"""What a load test sends: lengths, prompts and times of arrival, all from one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, Protocol

from phonograph.errors import PlanError

_TEXT = (
    "the of and to in is was for on that with as by at from it an be are this which or had not but "
    "one have all two were first can more time other people may over some into only most new years "
    "after work about city year day world life water house school line part side head hand long right"
)
WORDS = tuple(_TEXT.split())
"""Each is one token to most tokenizers, the space before it included."""

_LEAST_ID = 10
_W1_IDS = 150_000
_PLAIN_IDS = 1_000
"""Ids below this are words, or parts of words, of every vocabulary that is worth a load test."""

Prompt = str | list[int]
PromptKind = Literal["ids", "text"]


class Lengths(Protocol):
    """A distribution of numbers of tokens."""

    def draw(self, source: random.Random) -> int:
        """At least 1."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    value: int

    def draw(self, source: random.Random) -> int:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Uniform:
    """From `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"uniform {self.low} to {self.high}"


@dataclass(frozen=True)
class LogNormal:
    """Many short, few long ones, like what people write to a chat."""

    mean: float
    spread: float = 1.0
    """Standard deviation of the logarithm."""
    most: int = 4096

    def draw(self, source: random.Random) -> int:
        middle = math.log(self.mean) - self.spread**2 / 2
        return min(self.most, max(1, round(source.lognormvariate(middle, self.spread))))

    def __str__(self) -> str:
        return f"log-normal, mean {self.mean:g}"


def lengths_from(text: str) -> Lengths:
    """`256`, `32-512` or `lognormal:220`."""
    head, _, tail = text.partition(":")
    low, dash, high = text.partition("-")
    try:
        if head == "lognormal":
            mean = float(tail)
            if not 1 <= mean < 1e6:
                raise ValueError
            return LogNormal(mean)
        found: Lengths = Uniform(int(low), int(high)) if dash else Fixed(int(text))
    except ValueError:
        raise PlanError(f"length {text!r}: expected a number (256), a range (32-512) or lognormal:MEAN.") from None
    if isinstance(found, Fixed) and found.value < 1:
        raise PlanError(f"length {text!r}: at least one token is needed.")
    if isinstance(found, Uniform) and not 1 <= found.low <= found.high:
        raise PlanError(f"length {text!r}: a range goes from at least 1 up, as 32-512.")
    return found


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and outputs; `w1` draws them as the workload W1 prescribes."""

    prompt: Lengths
    output: Lengths
    is_w1: bool = False

    def highest_id(self, vocab: int | None) -> int:
        """The highest token id that prompts may have."""
        size = vocab or (_W1_IDS if self.is_w1 else _PLAIN_IDS)
        if size <= _LEAST_ID:
            raise PlanError(f"a vocabulary of {size}: prompts are drawn from ids of {_LEAST_ID} and more.")
        return size - 1


WORKLOADS = {
    "mix": Workload(LogNormal(220), LogNormal(190)),
    "w1": Workload(Uniform(32, 511), Fixed(128), is_w1=True),
}


@dataclass(frozen=True)
class Job:
    """One request: what to send, and when, in seconds from the start."""

    due: float
    prompt: Prompt
    max_tokens: int


def make_jobs(
    workload: Workload, num_requests: int, rate: float, seed: int, kind: PromptKind, vocab: int | None = None
) -> list[Job]:
    """The requests of a test. Arrivals are Poisson; an infinite rate sends all at once.

    Lengths and arrivals come from sources of their own, so that two rates send the same prompts.
    """
    lengths, arrivals, contents = random.Random(seed), random.Random(seed + 1), random.Random(seed + 2)
    # W1 draws a prompt's length and then its tokens, from one source.
    contents = lengths if workload.is_w1 else contents
    highest = workload.highest_id(vocab)
    due, jobs = 0.0, []
    for _ in range(num_requests):
        count = workload.prompt.draw(lengths)
        ids = [contents.randint(_LEAST_ID, highest) for _ in range(count)]
        prompt: Prompt = ids if kind == "ids" else " ".join(WORDS[token % len(WORDS)] for token in ids)
        jobs.append(Job(due, prompt, workload.output.draw(lengths)))
        due += arrivals.expovariate(rate) if math.isfinite(rate) else 0.0
    return jobs
