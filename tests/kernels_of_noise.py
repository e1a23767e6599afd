"""Triton kernels that write out the noise which the sampler's own kernels use up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.engine.sampling.triton.noise import hashed, noise_of, row_hash_of


@triton.jit
def _of_rows(seeds_ptr, positions_ptr, bits_ptr, noise_ptr, count, block: tl.constexpr, precise: tl.constexpr):
    row, token = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    first, second = row_hash_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    bits = hashed(first, second, token)
    tl.store(bits_ptr + row * count + token, bits.to(tl.int64), mask=token < count)
    tl.store(noise_ptr + row * count + token, noise_of(bits, precise), mask=token < count)


@triton.jit
def _of_hashes(bits_ptr, noise_ptr, count, block: tl.constexpr, precise: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    bits = tl.load(bits_ptr + at, mask=at < count, other=0).to(tl.uint32)
    tl.store(noise_ptr + at, noise_of(bits, precise), mask=at < count)


def of_rows(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hashes, noise) of the tokens of these rows."""
    bits = torch.empty((len(seeds), vocab), dtype=torch.int64, device=seeds.device)
    noise = torch.empty((len(seeds), vocab), device=seeds.device)
    grid, precise = (len(seeds), triton.cdiv(vocab, 1024)), seeds.device.type != "cpu"
    _of_rows[grid](seeds, positions, bits, noise, vocab, block=1024, precise=precise)
    return bits, noise


def of_hashes(bits: torch.Tensor) -> torch.Tensor:
    """The noise of these hashes."""
    noise = torch.empty(bits.shape, device=bits.device)
    count = bits.numel()
    _of_hashes[(triton.cdiv(count, 1024),)](bits, noise, count, block=1024, precise=bits.device.type != "cpu")
    return noise
