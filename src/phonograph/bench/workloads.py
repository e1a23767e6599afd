"""Workloads: the requests that measurements send, the same every time: W1, a mix like chats, random prompts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
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

LEAST_ID = 10
MOST_ID = 150_000
"""Token ids are drawn below this, or below the vocabulary where that is smaller."""
PLAIN_IDS = 1_000
"""Ids below this are words, or parts of words, of every vocabulary that is worth a load test."""
SEED = 7

Ids = list[int]
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
    """Lengths of prompts and outputs, and the ids that prompts are drawn below."""

    prompt: Lengths
    output: Lengths
    ids: int = PLAIN_IDS
    is_w1: bool = False
    """Whether a prompt's length and then its tokens come from one source, as W1 prescribes."""

    def highest_id(self, vocab: int | None) -> int:
        """The highest token id that prompts may have."""
        size = vocab or self.ids
        if size <= LEAST_ID:
            raise PlanError(f"a vocabulary of {size}: prompts are drawn from ids of {LEAST_ID} and more.")
        return size - 1


W1 = Workload(Uniform(32, 511), Fixed(128), MOST_ID, is_w1=True)
MIX = Workload(LogNormal(220), LogNormal(190))
WORKLOADS = {"mix": MIX, "w1": W1}


@dataclass(frozen=True)
class Job:
    """One request: when it comes, in seconds from the start, its prompt, and its number of new tokens."""

    due: float
    prompt: Ids
    max_tokens: int

    @property
    def text(self) -> str:
        """The prompt in words, about one for each id."""
        return " ".join(WORDS[token % len(WORDS)] for token in self.prompt)


def jobs(workload: Workload, rate: float = math.inf, seed: int = SEED, vocab: int | None = None) -> Iterator[Job]:
    """Requests without end. Arrivals are Poisson; an infinite rate sends all at once.

    Lengths, arrivals and ids come from sources of their own, so that two rates send the same requests.
    """
    lengths, arrivals, contents = random.Random(seed), random.Random(seed + 1), random.Random(seed + 2)
    contents = lengths if workload.is_w1 else contents
    highest, due = workload.highest_id(vocab), 0.0
    while True:
        count = workload.prompt.draw(lengths)
        prompt = [contents.randint(LEAST_ID, highest) for _ in range(count)]
        yield Job(due, prompt, workload.output.draw(lengths))
        due += arrivals.expovariate(rate) if math.isfinite(rate) else 0.0


@dataclass(frozen=True)
class Batch:
    """Prompts that are submitted at once, with the same number of new tokens each."""

    prompts: tuple[Ids, ...]
    new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_new_tokens(self) -> int:
        return len(self.prompts) * self.new_tokens


def w1(count: int = 256, new_tokens: int = 128, low: int = 32, high: int = 512, ids: int = MOST_ID) -> Batch:
    """W1: lengths uniform in [low, high), ids in [10, ids), from one source: a prompt's length, then its tokens."""
    workload = Workload(Uniform(low, high - 1), Fixed(new_tokens), ids, is_w1=True)
    return Batch(tuple(job.prompt for job in itertools.islice(jobs(workload), count)), new_tokens)


def mix(rate: float, seconds: float, *, ids: int = MOST_ID, max_len: int = 8192, workload: Workload = MIX) -> list[Job]:
    """Log-normal lengths, 220 tokens in and 190 out on average, Poisson arrivals at `rate` requests a second."""
    within = max_len // 2
    found = itertools.takewhile(lambda job: job.due < seconds, jobs(workload, rate, vocab=ids))
    return [Job(job.due, job.prompt[:within], min(job.max_tokens, within)) for job in found]


class Prompts:
    """Random prompts of any length; no two are alike, so that no prefix is shared."""

    def __init__(self, vocab: int, seed: int = 3) -> None:
        self._numbers = random.Random(seed)
        self._ids = min(vocab, MOST_ID)

    def one(self, length: int) -> Ids:
        return [self._numbers.randrange(LEAST_ID, self._ids) for _ in range(length)]

    def many(self, count: int, total: int) -> list[Ids]:
        """`total` tokens as `count` prompts, as even as can be."""
        return [self.one(total // count + (index < total % count)) for index in range(count)]
