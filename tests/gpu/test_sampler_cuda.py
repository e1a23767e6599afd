"""The sampler as a GPU runs it: noise over the whole domain of the hash, a million draws over a whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from sampler import CASES, Case, draws, fit, logits_of, probabilities, rows_of

from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.sampling.sampler import TorchSampler, gumbel, hashes, noise

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

CHUNK = 1 << 26


def test_noise_is_finite_and_exact_for_every_hash() -> None:
    """All 2³² of them, in torch and in Triton: never below the one before, and as float64 has them."""
    import kernels_of_noise

    lowest = torch.tensor(-4.0, device="cuda")
    for start in range(0, 1 << 32, CHUNK):
        hashed = torch.arange(start, start + CHUNK, device="cuda")
        place, rest = (hashed.double() + 0.5) / 2**32, ((2**32 - 1 - hashed).double() + 0.5) / 2**32
        wanted = -torch.where(place < 0.5, -place.log(), -(-rest).log1p()).log()
        for made in (noise, kernels_of_noise.of_hashes):
            found = made(hashed)
            assert found.isfinite().all()
            assert ((found.double() - wanted).abs() <= 4e-7 * wanted.abs().clamp_min(1)).all()
        assert found[0] >= lowest - 1e-6
        assert (found[1:] >= found[:-1] - 1e-6).all()
        lowest = found[-1]


def test_triton_s_hashes_are_torch_s() -> None:
    import kernels_of_noise

    seeds = torch.tensor([0, 1, 283, -1, 2**63 - 1, -(2**63), 0x2BCDEF0123456789], device="cuda")
    positions = torch.tensor([0, 1, 7, 2**31 - 1, 2**31 - 1, 5, 8191], device="cuda")
    bits, made = kernels_of_noise.of_rows(seeds, positions, 30_000)
    assert torch.equal(bits, hashes(seeds, positions, torch.arange(30_000, device="cuda")))
    torch.testing.assert_close(made, gumbel(seeds, positions, 30_000), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", list(CASES))
def test_a_million_draws_over_a_whole_vocabulary_fit_their_probabilities(name: str) -> None:
    from phonograph.engine.sampling.triton.sampler import TritonSampler

    logits = logits_of(151_936).cuda()
    counts = torch.zeros(151_936, dtype=torch.int64, device="cuda")
    for drawn in draws(TritonSampler(), logits, CASES[name], 10**6):
        counts += torch.bincount(drawn, minlength=151_936)
    found = fit(counts, probabilities(logits.cpu(), CASES[name]))
    assert found.is_good, found


def test_flat_logits_favour_no_token() -> None:
    """Where every token is as likely, neither ties nor the tail of the noise may prefer low numbers."""
    from phonograph.engine.sampling.triton.sampler import TritonSampler

    count = 10**6
    logits = torch.zeros(151_936, device="cuda")
    total = sum(drawn.double().sum().item() for drawn in draws(TritonSampler(), logits, Case(), count))
    deviation = 151_936 / (12 * count) ** 0.5
    assert abs(total / count - (151_936 - 1) / 2) < 5.5 * deviation


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    from phonograph.engine.sampling.triton.sampler import TritonSampler

    vocab, sampler = 151_936, TritonSampler()
    logits = torch.randn(8, vocab, device="cuda", dtype=torch.bfloat16) * 3
    rows = rows_of(CASES["together"], torch.arange(8, device="cuda"), torch.arange(8, device="cuda") * 100)
    together = sampler.pick(logits, rows, Sampling.TRUNCATED)
    for i in range(8):
        one = rows_of(CASES["together"], rows.seed[i : i + 1], rows.positions[i : i + 1])
        assert sampler.pick(logits[i : i + 1], one, Sampling.TRUNCATED)[0] == together[i]


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0])
def test_top_k_and_top_p_together_pick_what_torch_picks(scale: float) -> None:
    """Flat, nearly flat and spread out: where top-k's own sum decides, and where thousands stand before a draw."""
    from phonograph.engine.sampling.triton.sampler import TritonSampler

    count, vocab = 128, 151_936
    torch.manual_seed(1)
    logits = torch.randn(count, vocab, device="cuda") * scale
    for case in (Case(1.0, 40, 0.5), Case(1.0, 5000, 0.7), Case(2.0, 50_000, 0.9, 0.01), Case(1.0, 1, 0.5)):
        rows = rows_of(case, torch.arange(count, device="cuda"), torch.arange(count, device="cuda"))
        found, wanted = (s.pick(logits, rows, Sampling.TRUNCATED) for s in (TritonSampler(), TorchSampler()))
        # A cut may fall between two sums that round differently.
        assert (found == wanted).float().mean().item() >= 0.97, case
