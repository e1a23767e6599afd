"""Gumbel noise: a function of (seed, position, token), by the rule of `engine.sampling.sampler`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _log(x, precise: tl.constexpr):
    """The logarithm; on a GPU the precise one, since near 1 the fast one has the wrong sign."""
    return libdevice.log(x) if precise else tl.log(x)


@triton.jit
def _log1p(x, precise: tl.constexpr):
    """log(1 + x) with all bits where x is small; without a library by what 1 + x was rounded to."""
    if precise:
        return libdevice.log1p(x)
    rounded = 1.0 + x
    return tl.where(rounded == 1.0, x, tl.log(rounded) * (x / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))


@triton.jit
def _mixed(x):
    """A hash of 32 bits that can be undone."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_hash_of(seed, position):
    """The 64 bits of the hash that the tokens of a row share."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low = _mixed(low ^ _mixed(high + 0x9E3779B9))
    high = _mixed(high ^ _mixed(low + 0x7F4A7C15))
    first = _mixed(low + (position & 0xFFFFFFFF).to(tl.uint32) * 0x9E3779B9)
    return first, _mixed(high ^ first)


@triton.jit
def hashed(first, second, token):
    """32 bits of (seed, position, token)."""
    return _mixed(_mixed((token.to(tl.uint32) * 0x85EBCA6B) ^ first) + second)


@triton.jit
def noise_of(bits, precise: tl.constexpr):
    """Gumbel noise of a hash, by the distance of its place in (0, 1) from the nearer end: finite for every hash."""
    is_low = bits < 0x80000000
    distance = (tl.where(is_low, bits, bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -_log(-tl.where(is_low, _log(distance, precise), _log1p(-distance, precise)), precise)


@triton.jit
def noise(row_hash, token, precise: tl.constexpr):
    """Gumbel noise of (seed, position, token)."""
    return noise_of(hashed(row_hash[0], row_hash[1], token), precise)
