"""The noise that draws are made of: finite for every hash, Gumbel's distribution, independent of everything near it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phonograph.engine.ops.native.library import library
from phonograph.engine.sampling.sampler import gumbel, hashes, noise
from phonograph.errors import DeviceError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNT = 1 << 22
ENDS = {
    "lowest": torch.arange(COUNT),
    "highest": torch.arange((1 << 32) - COUNT, 1 << 32),
    "middle": torch.arange((1 << 31) - COUNT // 2, (1 << 31) + COUNT // 2),
    "all over": torch.arange(0, 1 << 32, 1021),
}
MANY = 10**6


def exact(hashed: torch.Tensor) -> torch.Tensor:
    """In float64, whose 53 bits hold every place in (0, 1) and its distance from 1."""
    place, rest = (hashed.double() + 0.5) / 2**32, ((2**32 - 1 - hashed).double() + 0.5) / 2**32
    assert 0 < place.min() <= place.max() < 1
    return -torch.where(place < 0.5, -place.log(), -(-rest).log1p()).log()


def in_cpp(hashed: torch.Tensor) -> torch.Tensor:
    try:
        native = library()
    except DeviceError as error:
        pytest.skip(str(error))
    words = torch.from_numpy(np.resize(hashed.numpy().astype(np.uint32), -(-len(hashed) // 64) * 64))
    out = torch.empty(len(words))
    native.noises(words.data_ptr(), len(words), out.data_ptr())
    return out[: len(hashed)]


@pytest.mark.parametrize("where", list(ENDS))
@pytest.mark.parametrize("made", [noise, in_cpp], ids=["torch", "cpp"])
def test_noise_is_finite_and_exact_at_the_ends_of_the_hash_and_between(made: object, where: str) -> None:
    found, wanted = made(ENDS[where]), exact(ENDS[where])  # type: ignore[operator]
    assert found.isfinite().all()
    assert (found[1:] >= found[:-1]).all()
    assert ((found.double() - wanted).abs() <= 4e-7 * wanted.abs().clamp_min(1)).all()
    assert -3.2 < found.min() <= found.max() < 22.9


def test_noise_has_gumbel_s_moments() -> None:
    found = noise(ENDS["all over"]).double()
    assert abs(found.mean().item() - 0.5772156649) < 1e-5
    assert abs(found.var().item() - np.pi**2 / 6) < 1e-4


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the GPU's own test looks at all of them")
def test_triton_makes_the_same_noise() -> None:
    triton = pytest.importorskip("triton")
    import kernels_of_noise

    seeds = torch.tensor([0, 1, 283, -1, 2**63 - 1, -(2**63), 0x2BCDEF0123456789])
    positions = torch.tensor([0, 1, 7, 2**31 - 1, 2**31 - 1, 5, 8191])
    bits, made = kernels_of_noise.of_rows(seeds, positions, 1000)
    assert torch.equal(bits, hashes(seeds, positions, torch.arange(1000)))
    torch.testing.assert_close(made, gumbel(seeds, positions, 1000), rtol=1e-6, atol=1e-6)
    ends = torch.cat([ends[:4096] for ends in ENDS.values()] + [ends[-4096:] for ends in ENDS.values()])
    found = kernels_of_noise.of_hashes(ends)
    assert found.isfinite().all()
    torch.testing.assert_close(found, noise(ends), rtol=1e-6, atol=1e-6)
    assert triton is not None


def test_no_two_tokens_of_a_row_and_no_two_seeds_have_the_same_hash() -> None:
    one = torch.tensor([283])
    assert len(hashes(one, one, torch.arange(151_936)).unique()) == 151_936
    tokens = torch.tensor([0, 1])
    pairs = hashes(torch.arange(MANY), torch.full((MANY,), 17), tokens)
    assert len((pairs[:, 0] << 31 ^ pairs[:, 1]).unique()) == MANY


LINES = {
    "seeds": lambda at: hashes(at, torch.full((MANY + 1,), 17), torch.tensor([5]))[:, 0],
    "high bits of seeds": lambda at: hashes(at << 32, torch.full((MANY + 1,), 17), torch.tensor([5]))[:, 0],
    "positions": lambda at: hashes(torch.full((MANY + 1,), 17), at, torch.tensor([5]))[:, 0],
    "late positions": lambda at: hashes(torch.full((MANY + 1,), 17), (1 << 31) - 1 - at, torch.tensor([5]))[:, 0],
    "tokens": lambda at: hashes(torch.tensor([17]), torch.tensor([5]), at)[0],
    "seeds and positions": lambda at: hashes(at, MANY - at, torch.tensor([5]))[:, 0],
}


@pytest.mark.parametrize("line", list(LINES))
def test_neighbours_are_independent(line: str) -> None:
    """A million along each line: even, uncorrelated, and pairs evenly over a grid, in high bits and in low ones."""
    hashed = LINES[line](torch.arange(MANY + 1))
    centred = hashed.double() / 2**32 - 0.5
    assert abs(centred.mean().item()) < 5.5 / (12 * MANY) ** 0.5
    for lag in (1, 2, 3, 16, 1000):
        correlation = (centred[lag:] * centred[:-lag]).mean().item() * 12
        assert abs(correlation) < 5.5 / (MANY - lag) ** 0.5
    for bits in (hashed >> 26, hashed & 63):
        grid = torch.bincount(bits[:-1] * 64 + bits[1:], minlength=4096).double()
        chi_square = ((grid - MANY / 4096).square() / (MANY / 4096)).sum()
        p_value = torch.special.gammaincc(torch.tensor(4095 / 2, dtype=torch.float64), chi_square / 2).item()
        assert 1e-7 < p_value < 1 - 1e-7
