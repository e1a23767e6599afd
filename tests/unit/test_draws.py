"""Draws have the probabilities they should have, over small and whole vocabularies, whatever the batch."""

from __future__ import annotations

import pytest
import sampler as bench
import torch
from sampler import CASES, Case, draws, fit, logits_of, probabilities, rows_of

from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.sampling.sampler import SamplingRows, TorchSampler

SAMPLER = bench.fastest("cpu")


def counted(vocab: int, case: Case, count: int) -> torch.Tensor:
    found = torch.zeros(vocab, dtype=torch.int64)
    for drawn in draws(SAMPLER, logits_of(vocab), case, count):
        found += torch.bincount(drawn, minlength=vocab)
    return found


@pytest.mark.parametrize("name", ["temperature", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[1:])])
def test_a_million_draws_fit_their_probabilities(name: str) -> None:
    found = fit(counted(1000, CASES[name], 10**6), probabilities(logits_of(1000), CASES[name]))
    assert found.is_good, found


@pytest.mark.parametrize("name", list(CASES))
def test_draws_over_a_whole_vocabulary_fit_their_probabilities(name: str) -> None:
    """Tokens of a probability below 1e-14 never come: there are 151,536 of them."""
    found = fit(counted(151_936, CASES[name], 2000), probabilities(logits_of(151_936), CASES[name]))
    assert found.is_good, found


def test_a_fit_notices_one_draw_in_a_thousand_that_is_random() -> None:
    probs = probabilities(logits_of(1000), CASES["temperature"])
    counts = (probs * 999_000).round() + 1
    assert not fit(counts, probs).is_good
    assert fit((probs * 10**6).round(), probs).is_good


def test_what_is_nearly_certain_comes_nearly_always() -> None:
    """The token at 60 and all others at 0: a true sampler fails once in 10²⁰ draws."""
    logits = torch.zeros(151_936)
    logits[777] = 60.0
    drawn = torch.cat(list(draws(SAMPLER, logits, Case(), 3000)))
    assert (drawn == 777).all()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    vocab, count = 5003, 24
    logits, where = torch.randn(count, vocab) * 3, torch.randperm(count)
    cases = [*CASES.values(), Case(0.0)]
    rows = [rows_of(cases[i % len(cases)], torch.tensor([i // 2]), torch.tensor([i % 7])) for i in range(count)]
    for sampler in (SAMPLER, TorchSampler()):
        alone = [sampler.pick(logits[i : i + 1], rows[i], Sampling.TRUNCATED).item() for i in range(count)]
        columns = zip(*(vars(rows[i]).values() for i in where), strict=True)
        together = sampler.pick(logits[where], SamplingRows(*map(torch.cat, columns)), Sampling.TRUNCATED)
        assert together.tolist() == [alone[i] for i in where]


def test_a_low_temperature_leaves_room_for_the_noise() -> None:
    """Logits one unit in the last place apart, at a temperature of that size: both come, as often as they should."""
    logits = torch.tensor([20.0, 20.0 - 2.0**-19, 3.0])
    probs = probabilities(logits, Case(1e-6))
    counts = sum(torch.bincount(drawn, minlength=3) for drawn in draws(SAMPLER, logits, Case(1e-6), 10**5))
    assert isinstance(counts, torch.Tensor)
    assert fit(counts, probs).is_good
