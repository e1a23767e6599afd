"""The samplers: right distributions, right cuts, and noise that depends on seed, position and token alone.

Triton's is interpreted where there is no GPU: too slow to draw often, so there it is held against torch's.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from phonograph.engine.sampler import (
    Penalties,
    Sampler,
    Sampling,
    SamplingRows,
    TorchSampler,
    gumbel,
    penalise,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], device=DEVICE)


def implementations() -> dict[str, Sampler]:
    found: dict[str, Sampler] = {"torch": TorchSampler()}
    try:
        from phonograph.engine.kernels.triton.sampler import TritonSampler
    except ImportError:
        return found
    return {**found, "triton": TritonSampler()}


SAMPLERS = implementations()
FAST = [name for name in SAMPLERS if name == "torch" or DEVICE.type == "cuda"]


def rows(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingRows:
    """One seed, every row at another position."""
    return SamplingRows(
        torch.full((count,), temperature, device=DEVICE),
        torch.full((count,), top_k, dtype=torch.int32, device=DEVICE),
        torch.full((count,), top_p, device=DEVICE),
        torch.full((count,), min_p, device=DEVICE),
        torch.full((count,), 11, dtype=torch.int64, device=DEVICE),
        torch.arange(count, device=DEVICE),
    )


def frequencies(sampler: Sampler, level: Sampling, **params: float) -> torch.Tensor:
    drawn = sampler.pick(LOGITS.expand(DRAWS, -1), rows(DRAWS, **params), level)  # type: ignore[arg-type]
    return torch.bincount(drawn, minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize("name", FAST)
def test_tokens_are_drawn_with_their_probabilities(name: str) -> None:
    for temperature in (0.7, 1.0, 2.0):
        wanted = (LOGITS / temperature).softmax(-1)
        for level in (Sampling.SAMPLED, Sampling.TRUNCATED):
            found = frequencies(SAMPLERS[name], level, temperature=temperature)
            torch.testing.assert_close(found, wanted, atol=0.015, rtol=0)


@pytest.mark.parametrize("name", FAST)
def test_top_k_top_p_and_min_p_cut_where_they_should(name: str) -> None:
    probs = LOGITS.softmax(-1)  # 0.58, 0.21, 0.13, 0.08, 0.03, 0.004
    for params, kept in (
        ({"top_k": 2}, 2),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.85}, 3),
        ({"min_p": 0.2}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-9}, 1),
    ):
        wanted = torch.where(torch.arange(len(probs), device=DEVICE) < kept, probs, 0.0)
        found = frequencies(SAMPLERS[name], Sampling.TRUNCATED, **params)
        torch.testing.assert_close(found, wanted / wanted.sum(), atol=0.015, rtol=0)


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_temperature_zero_is_greedy_at_every_level(name: str) -> None:
    logits = torch.randn(5, 300, device=DEVICE)
    for level in (Sampling.GREEDY, Sampling.SAMPLED, Sampling.TRUNCATED):
        assert torch.equal(SAMPLERS[name].pick(logits, rows(5, temperature=0.0), level), logits.argmax(-1))


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_plain_and_truncated_recordings_draw_the_same_tokens(name: str) -> None:
    logits = torch.randn(8, 500, device=DEVICE)
    one, other = (SAMPLERS[name].pick(logits, rows(8), level) for level in (Sampling.SAMPLED, Sampling.TRUNCATED))
    assert torch.equal(one, other)


CUTS = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-k, flat": {"top_k": 30, "temperature": 20.0},
    "top-p": {"top_p": 0.8, "temperature": 0.7},
    "min-p": {"min_p": 0.1, "temperature": 1.5},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0},
    "one token": {"top_k": 1},
}


@pytest.mark.skipif("triton" not in SAMPLERS, reason="Triton is not installed")
@pytest.mark.parametrize(("cut", "dtype"), [*((cut, torch.float32) for cut in CUTS), ("all", torch.bfloat16)])
def test_triton_picks_the_tokens_that_torch_picks(cut: str, dtype: torch.dtype) -> None:
    """Over several chunks; one row has ties, one forbidden tokens, and one seed fills 62 bits."""
    torch.manual_seed(3)
    logits = torch.randn(5, 5000, device=DEVICE) * 3
    logits[1] = logits[1].round()
    logits[2, 1000:4500] = float("-inf")
    asked = rows(5, **CUTS[cut])  # type: ignore[arg-type]
    asked.seeds[3:] = 0x2BCDEF0123456789
    for level in (Sampling.SAMPLED, Sampling.TRUNCATED)[cut != "none" :]:
        found, wanted = (sampler.pick(logits.to(dtype), asked, level) for sampler in SAMPLERS.values())
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize(("vocab", "count"), [(5000, 20), (7, 20), (300, 1)])
def test_logprobs(name: str, vocab: int, count: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, vocab, device=DEVICE) * 4
    tokens = torch.tensor([0, vocab - 1, 3], device=DEVICE)
    exact = logits.double().log_softmax(-1)
    found = SAMPLERS[name].logprobs(logits, tokens, count)
    top = exact.sort(dim=-1, descending=True)
    torch.testing.assert_close(found.token_logprob.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.top_logprobs.double(), top.values[:, :count], rtol=0, atol=1e-5)
    assert torch.equal(found.top_ids, top.indices[:, :count])


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_nobody_gets_nothing(name: str) -> None:
    logits = torch.randn(0, 30, device=DEVICE)
    assert SAMPLERS[name].pick(logits, rows(0), Sampling.TRUNCATED).shape == (0,)
    assert SAMPLERS[name].logprobs(logits, torch.zeros(0, dtype=torch.int64, device=DEVICE), 3).top_ids.shape == (0, 3)


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
