"""The requests that measurements send, the same every time: W1, a mix like people's chats, and random prompts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Prompt = list[int]

LEAST_ID = 10
MOST_ID = 150_000
"""Token ids are drawn below this, or below the vocabulary where that is smaller."""
MIX_MEANS = (220, 190)
"""Tokens of a prompt and of an output."""
_MIX_SPREAD = 1.0
"""Standard deviation of the logarithm of a length."""
_MIX_SEED = 7


@dataclass(frozen=True)
class Batch:
    """Prompts that are submitted at once, with so many new tokens each."""

    prompts: tuple[Prompt, ...]
    new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_new_tokens(self) -> int:
        return len(self.prompts) * self.new_tokens


def w1(count: int = 256, new_tokens: int = 128, low: int = 32, high: int = 512, ids: int = MOST_ID) -> Batch:
    """W1: lengths uniform in [low, high), ids in [10, ids), from one source: a prompt's length, then its tokens."""
    numbers = random.Random(7)
    prompts = tuple(
        [numbers.randrange(LEAST_ID, ids) for _ in range(numbers.randrange(low, high))] for _ in range(count)
    )
    return Batch(prompts, new_tokens)


@dataclass(frozen=True)
class Arrival:
    """A request that comes `due` seconds after the start."""

    due: float
    prompt: Prompt
    new_tokens: int


def mix(
    rate: float, seconds: float, *, ids: int = MOST_ID, max_len: int = 8192, means: tuple[int, int] = MIX_MEANS
) -> list[Arrival]:
    """Log-normal lengths, 220 tokens in and 190 out on average, Poisson arrivals at so many requests a second.

    Lengths, arrivals and ids come from sources of their own, so that two rates send the same requests.
    """
    lengths, gaps, contents = (random.Random(_MIX_SEED + offset) for offset in range(3))
    arrivals: list[Arrival] = []
    due = 0.0
    while due < seconds:
        count, new_tokens = (min(_length(lengths, mean), max_len // 2) for mean in means)
        arrivals.append(Arrival(due, [contents.randrange(LEAST_ID, ids) for _ in range(count)], new_tokens))
        due += gaps.expovariate(rate)
    return arrivals


def _length(numbers: random.Random, mean: float) -> int:
    middle = math.log(mean) - _MIX_SPREAD**2 / 2
    return max(1, round(numbers.lognormvariate(middle, _MIX_SPREAD)))


class Prompts:
    """Random prompts of any length; no two are alike, so that no prefix is shared."""

    def __init__(self, vocab: int, seed: int = 3) -> None:
        self._numbers = random.Random(seed)
        self._ids = min(vocab, MOST_ID)

    def one(self, length: int) -> Prompt:
        return [self._numbers.randrange(LEAST_ID, self._ids) for _ in range(length)]

    def many(self, count: int, total: int) -> list[Prompt]:
        """`total` tokens as `count` prompts, as even as can be."""
        return [self.one(total // count + (index < total % count)) for index in range(count)]
