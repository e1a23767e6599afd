"""Kernels that pick tokens without a sort.

The best token after Gumbel noise is a draw. Top-k, top-p and min-p each keep the tokens up to some place in the order
of the logits, so a draw over all tokens is the draw over the kept ones if it is kept itself. If it is not, neither is
anything behind it, and the next draw is among those ahead of it: a draw is accepted at once with the probability that
truncation keeps, and what is left shrinks each time. Tokens with equal logits stand in the order of their numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from phonograph.engine.kernels.triton.kernel import kernel

CHUNK = 2048
"""Tokens that a program surveys; a constant, so that sums do not depend on the batch."""
KEPT = 1024
"""Tokens ahead of a refused draw that are written down and settled without looking at the row again."""
_TILE = tl.constexpr(4096)
_LOWEST = tl.constexpr(-3.0e38)
"""Below every logit but that of a forbidden token, whose exponential relative to it is 0."""


@triton.jit
def _log(x, precise: tl.constexpr):
    """The logarithm; on a GPU the precise one, since near 1 the fast one has the wrong sign."""
    return libdevice.log(x) if precise else tl.log(x)


@triton.jit
def _mixed(x):
    """A hash of 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _row_hash(seed, position):
    """The part of the hash that the tokens of a row share."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    row = _mixed(low ^ _mixed(high))
    return _mixed(row + (position & 0xFFFFFFFF).to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _noise(row_hash, token, precise: tl.constexpr):
    """Gumbel noise of (seed, position, token)."""
    hashed = _mixed(row_hash ^ (token.to(tl.uint32) * 0x85EBCA6B))
    uniform = ((hashed >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return -_log(-_log(uniform, precise), precise)


@triton.jit
def _scaled(logits_ptr, token, inside, temperature):
    """Logits over temperature; -inf outside."""
    logits = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits, temperature)


@triton.jit
def _is_ahead(scaled, token, pivot_scaled, pivot):
    """Whether tokens stand before the pivot."""
    return (scaled > pivot_scaled) | ((scaled == pivot_scaled) & (token < pivot))


@triton.jit
def _first_best(score, token, vocab):
    """The token with the highest score, of several the first."""
    best = tl.max(score, 0)
    return tl.minimum(tl.min(tl.where(score == best, token, vocab), 0), vocab - 1)


@kernel()
def survey(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, scores_ptr, tokens_ptr, tops_ptr, masses_ptr,
    logits_row, vocab, num_chunks,
    chunk: tl.constexpr, is_greedy: tl.constexpr, with_mass: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """Of a chunk of a row: the best token and its score; the highest scaled logit and the exponentials' sum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * chunk + tl.arange(0, chunk)
    inside = token < vocab
    temperature = 1.0
    if not is_greedy:
        temperature = tl.load(temperature_ptr + row)
    divisor = 1.0
    if not is_greedy:
        divisor = tl.where(temperature > 0, tl.maximum(temperature, 1e-6), 1.0)
    scaled = _scaled(logits_ptr + row * logits_row, token, inside, divisor)
    score = scaled
    if not is_greedy:
        noise = _noise(_row_hash(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)), token, precise)
        score = scaled + tl.where(temperature > 0, noise, 0.0)
    at = row * num_chunks + part
    tl.store(scores_ptr + at, tl.max(score, 0))
    tl.store(tokens_ptr + at, _first_best(score, token, vocab))
    if with_mass:
        top = tl.maximum(tl.max(scaled, 0), _LOWEST)
        tl.store(tops_ptr + at, top)
        tl.store(masses_ptr + at, tl.sum(tl.exp(scaled - top), 0))


@triton.jit
def _whole_mass(tops_ptr, masses_ptr, first, num_chunks, chunks: tl.constexpr):
    """(the highest scaled logit of a row, the sum of exponentials relative to it)."""
    chunk = tl.arange(0, chunks)
    tops = tl.load(tops_ptr + first + chunk, mask=chunk < num_chunks, other=_LOWEST)
    masses = tl.load(masses_ptr + first + chunk, mask=chunk < num_chunks, other=0.0)
    top = tl.max(tops, 0)
    return top, tl.sum(masses * tl.exp(tops - top), 0)


@triton.jit
def _tally(logits_ptr, divisor, top, pivot_scaled, pivot, vocab):
    """(how many tokens stand before the pivot, the sum of their exponentials)."""
    count = tl.zeros([_TILE], tl.int32)
    mass = tl.zeros([_TILE], tl.float32)
    for start in range(0, vocab, _TILE):
        token = start + tl.arange(0, _TILE)
        scaled = _scaled(logits_ptr, token, token < vocab, divisor)
        ahead = _is_ahead(scaled, token, pivot_scaled, pivot)
        count += ahead.to(tl.int32)
        mass += tl.where(ahead, tl.exp(scaled - top), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _drawn_ahead(logits_ptr, divisor, row_hash, pivot_scaled, pivot, vocab, precise: tl.constexpr):
    """The draw among the tokens before the pivot."""
    best = tl.full([_TILE], float("-inf"), tl.float32)
    chosen = tl.zeros([_TILE], tl.int32) + vocab
    for start in range(0, vocab, _TILE):
        token = start + tl.arange(0, _TILE)
        scaled = _scaled(logits_ptr, token, token < vocab, divisor)
        ahead = _is_ahead(scaled, token, pivot_scaled, pivot)
        score = tl.where(ahead, scaled + _noise(row_hash, token, precise), float("-inf"))
        chosen = tl.where(score > best, token, chosen)
        best = tl.maximum(best, score)
    return _first_best(best, chosen, vocab)


@triton.jit
def _write_down(logits_ptr, kept_ptr, divisor, pivot_scaled, pivot, vocab):
    """Write down the tokens before the pivot, in the order of their numbers."""
    written = 0
    for start in range(0, vocab, _TILE):
        token = start + tl.arange(0, _TILE)
        scaled = _scaled(logits_ptr, token, token < vocab, divisor)
        ahead = _is_ahead(scaled, token, pivot_scaled, pivot)
        place = written + tl.cumsum(ahead.to(tl.int32), 0) - 1
        tl.store(kept_ptr + place, token, mask=ahead)
        written += tl.sum(ahead.to(tl.int32), 0)


@triton.jit
def _is_allowed(count, mass, scaled, top, whole, top_k, top_p, min_p):
    """Whether truncation keeps a token with so many, and so much, before it; always the first."""
    allowed = (mass / whole < top_p) & ((top_k == 0) | (count < top_k)) & (tl.exp(scaled - top) >= min_p)
    return (count == 0) | allowed


@triton.jit
def _settled(
    logits_ptr, kept_ptr, num_kept, divisor, row_hash, top, whole, top_k, top_p, min_p, vocab,
    kept: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """The draw among the tokens that were written down, which are all that stand before the last one refused."""
    place = tl.arange(0, kept)
    token = tl.load(kept_ptr + place, mask=place < num_kept, other=0)
    scaled = _scaled(logits_ptr, token, place < num_kept, divisor)
    score = tl.where(place < num_kept, scaled + _noise(row_hash, token, precise), float("-inf"))
    left = place < num_kept
    is_settled = False
    drawn = 0
    while not is_settled:
        drawn = _first_best(tl.where(left, score, float("-inf")), tl.where(left, token, vocab), vocab)
        pivot = tl.max(tl.where(token == drawn, scaled, float("-inf")), 0)
        ahead = left & _is_ahead(scaled, token, pivot, drawn)
        count = tl.sum(ahead.to(tl.int32), 0)
        mass = tl.sum(tl.where(ahead, tl.exp(scaled - top), 0.0), 0)
        is_settled = _is_allowed(count, mass, pivot, top, whole, top_k, top_p, min_p)
        left = ahead
    return drawn


@kernel()
def settle(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    scores_ptr, tokens_ptr, tops_ptr, masses_ptr, kept_ptr, out_ptr, logits_row, vocab, num_chunks,
    chunks: tl.constexpr, kept: tl.constexpr, truncated: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """The token of a row: the best of all chunks, or the first draw that truncation keeps."""
    row = tl.program_id(0).to(tl.int64)
    chunk, first = tl.arange(0, chunks), row * num_chunks
    scores = tl.load(scores_ptr + first + chunk, mask=chunk < num_chunks, other=float("-inf"))
    tokens = tl.load(tokens_ptr + first + chunk, mask=chunk < num_chunks, other=vocab)
    drawn = _first_best(scores, tokens, vocab)
    if truncated:
        temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        row_hash = _row_hash(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        divisor = tl.maximum(temperature, 1e-6)
        logits_ptr += row * logits_row
        kept_ptr += row * kept
        top, whole = _whole_mass(tops_ptr, masses_ptr, first, num_chunks, chunks)
        is_settled = (temperature <= 0) | ((top_k == 0) & (top_p >= 1) & (min_p <= 0))
        while not is_settled:
            pivot = tl.div_rn(tl.load(logits_ptr + drawn).to(tl.float32), divisor)
            count, mass = _tally(logits_ptr, divisor, top, pivot, drawn, vocab)
            is_settled = _is_allowed(count, mass, pivot, top, whole, top_k, top_p, min_p)
            if not is_settled:
                if count <= kept:
                    _write_down(logits_ptr, kept_ptr, divisor, pivot, drawn, vocab)
                    tl.debug_barrier()  # what one thread wrote, others read
                    drawn = _settled(
                        logits_ptr, kept_ptr, count, divisor, row_hash, top, whole, top_k, top_p, min_p, vocab,
                        kept, precise,
                    )  # fmt: skip
                    is_settled = True
                else:
                    drawn = _drawn_ahead(logits_ptr, divisor, row_hash, pivot, drawn, vocab, precise)
    tl.store(out_ptr + row, drawn.to(tl.int64))


@kernel()
def favourites(
    logits_ptr, values_ptr, tokens_ptr, tops_ptr, masses_ptr, logits_row, vocab, num_chunks,
    chunk: tl.constexpr, most: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Of a chunk of a row: the `most` highest logits and their tokens, in order; the exponentials' sum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * chunk + tl.arange(0, chunk)
    logits = tl.load(logits_ptr + row * logits_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    at = row * num_chunks + part
    top = tl.maximum(tl.max(logits, 0), _LOWEST)
    tl.store(tops_ptr + at, top)
    tl.store(masses_ptr + at, tl.sum(tl.exp(logits - top), 0))
    token = tl.where(token < vocab, token, vocab)
    values, tokens = _highest(logits, token, vocab, most, columns)
    column = tl.arange(0, columns)
    tl.store(values_ptr + at * most + column, values, mask=column < most)
    tl.store(tokens_ptr + at * most + column, tokens, mask=column < most)


@triton.jit
def _highest(value, token, vocab, most: tl.constexpr, columns: tl.constexpr):
    """The `most` highest values and their tokens, in order; equal ones by number. Taken tokens become `vocab`."""
    column = tl.arange(0, columns)
    values = tl.full([columns], float("-inf"), tl.float32)
    tokens = tl.zeros([columns], tl.int32) + vocab
    for place in range(most):
        left = token < vocab
        best = tl.max(tl.where(left, value, float("-inf")), 0)
        chosen = tl.min(tl.where(left & (value == best), token, vocab), 0)
        values = tl.where(column == place, best, values)
        tokens = tl.where(column == place, chosen, tokens)
        token = tl.where(token == chosen, vocab, token)
    return values, tokens


@kernel()
def rank(
    logits_ptr, picked_ptr, values_ptr, tokens_ptr, tops_ptr, masses_ptr, logprob_ptr, ids_ptr, logprobs_ptr,
    logits_row, vocab, num_chunks,
    chunks: tl.constexpr, most: tl.constexpr, columns: tl.constexpr, found: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of a row's picked token and of its favourites, from those of the chunks."""
    row = tl.program_id(0).to(tl.int64)
    top, whole = _whole_mass(tops_ptr, masses_ptr, row * num_chunks, num_chunks, chunks)
    total = top + tl.log(whole)
    at, column = tl.arange(0, found), tl.arange(0, columns)
    inside = at < num_chunks * most
    value = tl.load(values_ptr + row * num_chunks * most + at, mask=inside, other=float("-inf"))
    token = tl.load(tokens_ptr + row * num_chunks * most + at, mask=inside, other=vocab)
    values, tokens = _highest(value, token, vocab, most, columns)
    tl.store(ids_ptr + row * most + column, tokens.to(tl.int64), mask=column < most)
    tl.store(logprobs_ptr + row * most + column, values - total, mask=column < most)
    logit = tl.load(logits_ptr + row * logits_row + tl.load(picked_ptr + row)).to(tl.float32)
    tl.store(logprob_ptr + row, logit - total)
