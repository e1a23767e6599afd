"""The sampler: right distributions, right cuts, and noise that depends on seed, position and token alone."""

from __future__ import annotations

import torch

from phonograph.engine.sampler import Penalties, Sampling, SamplingRows, gumbel, penalise, pick

DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def rows(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingRows:
    """One seed, every row at another position."""
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.full((count,), 11, dtype=torch.int64),
        torch.arange(count),
    )


def frequencies(level: Sampling, **params: float) -> torch.Tensor:
    drawn = pick(LOGITS.expand(DRAWS, -1), rows(DRAWS, **params), level)  # type: ignore[arg-type]
    return torch.bincount(drawn, minlength=len(LOGITS)) / DRAWS


def test_tokens_are_drawn_with_their_probabilities() -> None:
    for temperature in (0.7, 1.0, 2.0):
        wanted = (LOGITS / temperature).softmax(-1)
        for level in (Sampling.SAMPLED, Sampling.TRUNCATED):
            torch.testing.assert_close(frequencies(level, temperature=temperature), wanted, atol=0.015, rtol=0)


def test_top_k_top_p_and_min_p_cut_where_they_should() -> None:
    probs = LOGITS.softmax(-1)  # 0.58, 0.21, 0.13, 0.08, 0.03, 0.004
    for params, kept in (
        ({"top_k": 2}, 2),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.85}, 3),
        ({"min_p": 0.2}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-9}, 1),
    ):
        wanted = torch.where(torch.arange(len(probs)) < kept, probs, 0.0)
        torch.testing.assert_close(frequencies(Sampling.TRUNCATED, **params), wanted / wanted.sum(), atol=0.015, rtol=0)


def test_temperature_zero_is_greedy_at_every_level() -> None:
    logits = torch.randn(50, 300)
    for level in (Sampling.GREEDY, Sampling.SAMPLED, Sampling.TRUNCATED):
        assert torch.equal(pick(logits, rows(50, temperature=0.0), level), logits.argmax(-1))


def test_plain_and_truncated_recordings_draw_the_same_tokens() -> None:
    logits = torch.randn(200, 500)
    one, other = (pick(logits, rows(200), level) for level in (Sampling.SAMPLED, Sampling.TRUNCATED))
    assert torch.equal(one, other)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([3, 3, 4, 3]), torch.tensor([7, 8, 7, 7])
    noise = gumbel(seeds, positions, 1000)
    assert torch.equal(noise[0], noise[3])
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert torch.equal(gumbel(seeds[1:2], positions[1:2], 1000)[0], noise[1])
    assert torch.equal(gumbel(seeds[:1], positions[:1], 400)[0], noise[0, :400])
    assert abs(noise.mean().item() - 0.5772) < 0.1
    assert noise.isfinite().all()


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    penalties = Penalties(
        counts=torch.tensor([[3, 0, 0, 1]], dtype=torch.int32),
        prompted=torch.tensor([[False, True, False, False]]),
        bias_ids=torch.tensor([[2, 0]]),
        bias=torch.tensor([[5.0, 0.0]]),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.25]),
        frequency=torch.tensor([0.5]),
    )
    # said: halved, less 0.5 a time, less 0.25; prompted and negative: doubled; biased; said once
    wanted = torch.tensor([[2 / 2 - 1.5 - 0.25, -4.0, 6.0, 0.25 - 0.5 - 0.25]])
    torch.testing.assert_close(penalise(logits, penalties), wanted)
