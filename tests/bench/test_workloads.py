"""Workloads are the same on every machine and in every version."""

from __future__ import annotations

import random
from itertools import pairwise

from phonograph.bench.workloads import Prompts, mix, w1


def test_w1_is_what_it_always_was() -> None:
    batch = w1()
    assert len(batch.prompts) == 256
    assert batch.new_tokens == 128
    assert len(batch.prompts[0]) == 197
    assert batch.prompts[0][:4] == [39554, 103510, 12667, 18998]
    assert batch.num_prompt_tokens == sum(len(prompt) for prompt in batch.prompts)
    assert batch.num_new_tokens == 32_768


def test_w1_draws_a_length_and_then_its_tokens_from_one_source() -> None:
    numbers = random.Random(7)
    for prompt in w1().prompts:
        length = numbers.randrange(32, 512)
        assert prompt == [numbers.randrange(10, 150_000) for _ in range(length)]


def test_the_mix_has_the_lengths_and_arrivals_that_it_promises() -> None:
    arrivals = mix(32.0, 100.0)
    assert 2_900 < len(arrivals) < 3_500
    assert all(before.due <= after.due for before, after in pairwise(arrivals))
    prompts = [len(arrival.prompt) for arrival in arrivals]
    outputs = [arrival.max_tokens for arrival in arrivals]
    assert 200 < sum(prompts) / len(prompts) < 240
    assert 173 < sum(outputs) / len(outputs) < 207
    assert min(prompts) >= 1
    assert min(outputs) >= 1


def test_two_rates_send_the_same_requests_at_other_times() -> None:
    slow, fast = mix(4.0, 10.0), mix(32.0, 10.0)
    assert slow[0].due == fast[0].due == 0.0
    assert all(a.prompt == b.prompt and a.max_tokens == b.max_tokens for a, b in zip(slow, fast, strict=False))
    assert slow[1].due == 8 * fast[1].due


def test_the_mix_fits_in_the_context() -> None:
    assert all(len(a.prompt) + a.max_tokens <= 256 for a in mix(100.0, 5.0, max_len=256, ids=64))
    assert all(10 <= token < 64 for a in mix(100.0, 1.0, ids=64) for token in a.prompt)


def test_prompts_share_no_prefix_and_are_as_even_as_can_be() -> None:
    prompts = Prompts(vocab=150_000)
    group = prompts.many(8, 100)
    assert [len(prompt) for prompt in group] == [13] * 4 + [12] * 4
    assert len({tuple(prompt[:4]) for prompt in [*group, *prompts.many(8, 100)]}) == 16
    assert Prompts(vocab=150_000).one(5) == Prompts(vocab=200_000).one(5)
