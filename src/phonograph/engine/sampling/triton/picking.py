"""Picking kernels: tokens without a sort, by the rule of `engine.sampling.sampler`.

The best token after Gumbel noise is a draw. Top-k, top-p and min-p each keep the tokens up to some place in the order
of the logits, so a draw over all tokens is the draw over the kept ones if it is kept itself. If it is not, neither is
anything after it, and the next draw is among those ahead of it: a draw is accepted at once with the probability that
truncation keeps, and what is left shrinks each time. Of tokens with equal logits the one with the higher number stands
ahead. Where nothing stands ahead of a draw, it is taken: a row has a token, and its loops end, also where the highest
logits that were surveyed are not those of the logits, since verify changes both at random.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phonograph.engine.ops.triton.kernel import kernel
from phonograph.engine.requests.step import NOT_FINITE, NOTHING_ALLOWED
from phonograph.engine.sampling.triton.noise import noise, row_hash_of

CHUNK = 2048
"""Tokens that a program surveys; a constant, so that sums do not depend on the batch."""
KEPT = 1024
"""Tokens ahead of a refused draw that are written down and settled without looking at the row again."""
_TILE = tl.constexpr(4096)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Not above any logit but that of a forbidden token, whose exponential relative to it is 0."""
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)


@triton.jit
def _scaled(logits_ptr, token, inside, top, divisor):
    """Logits' distance from the highest, over temperature: not above 0, and -inf outside."""
    logits = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits - top, divisor)


@triton.jit
def _scaled_one(logits_ptr, token, top, divisor):
    """The same of one token."""
    return tl.div_rn(tl.load(logits_ptr + token).to(tl.float32) - top, divisor)


@triton.jit
def _is_ahead(scaled, token, pivot_scaled, pivot):
    """Whether tokens stand before the pivot."""
    return (scaled > pivot_scaled) | ((scaled == pivot_scaled) & (token > pivot))


@triton.jit
def _first_best(score, token, vocab):
    """The token with the highest score, of several the first."""
    best = tl.max(score, 0)
    return tl.minimum(tl.min(tl.where(score == best, token, vocab), 0), vocab - 1)


@triton.jit
def _divisor(temperature):
    """What logits are divided by; a greedy row's are left as they are."""
    return tl.where(temperature > 0, temperature, 1.0)


@kernel()
def survey(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, tokens_ptr, tops_ptr, masses_ptr,
    logits_row, vocab, num_chunks,
    chunk: tl.constexpr, is_greedy: tl.constexpr, with_mass: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """Of a chunk of a row: the best token, or that it is not finite; the highest logit and the exponentials' sum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * chunk + tl.arange(0, chunk)
    inside = token < vocab
    logits = tl.load(logits_ptr + row * logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
    is_broken = ~(logits < float("inf"))  # NaN too
    logits = tl.where(is_broken, float("-inf"), logits)
    top = tl.max(logits, 0)
    score = logits
    at = row * num_chunks + part
    if not is_greedy:
        temperature = tl.load(temperature_ptr + row)
        scaled = tl.div_rn(logits - tl.maximum(top, _LOWEST), _divisor(temperature))
        added = noise(row_hash_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)), token, precise)
        score = scaled + tl.where(temperature > 0, added, 0.0)
        if with_mass:
            tl.store(masses_ptr + at, tl.sum(tl.exp(scaled), 0))
    best = _first_best(score, token, vocab)
    tl.store(tokens_ptr + at, tl.where(tl.max(is_broken.to(tl.int32), 0) > 0, _NOT_FINITE, best))
    tl.store(tops_ptr + at, top)


@triton.jit
def _whole_mass(tops_ptr, masses_ptr, first, num_chunks, divisor, chunks: tl.constexpr):
    """(the highest logit of a row, the sum of exponentials relative to it)."""
    chunk = tl.arange(0, chunks)
    tops = tl.load(tops_ptr + first + chunk, mask=chunk < num_chunks, other=float("-inf"))
    masses = tl.load(masses_ptr + first + chunk, mask=chunk < num_chunks, other=0.0)
    top = tl.maximum(tl.max(tops, 0), _LOWEST)
    return top, tl.sum(masses * tl.exp(tl.div_rn(tops - top, divisor)), 0)


@triton.jit
def _tally(logits_ptr, top, divisor, pivot_scaled, pivot, vocab):
    """(how many tokens are above the pivot, how many stand before it, the sum of those' exponentials)."""
    above = tl.zeros([_TILE], tl.int32)
    count = tl.zeros([_TILE], tl.int32)
    mass = tl.zeros([_TILE], tl.float32)
    for start in range(0, vocab, _TILE):
        token = start + tl.arange(0, _TILE)
        scaled = _scaled(logits_ptr, token, token < vocab, top, divisor)
        ahead = _is_ahead(scaled, token, pivot_scaled, pivot)
        above += (scaled > pivot_scaled).to(tl.int32)
        count += ahead.to(tl.int32)
        mass += tl.where(ahead, tl.exp(scaled), 0.0)
    return tl.sum(above, 0), tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _top_k_mass(logits_ptr, top, divisor, whole, top_k, vocab):
    """The sum of exponentials of the `top_k` highest logits, and of what equals the last; of fewer than all.

    The distance from the top within which there are so many is halved in the bits of a float, whose order is its own.
    """
    low, high = -1, _INFINITY_BITS + 0
    count = vocab + 0
    while (high - low > 1) & (count != top_k):
        middle = low + (high - low) // 2
        reach = middle.to(tl.float32, bitcast=True)
        found = tl.zeros([_TILE], tl.int32)
        mass = tl.zeros([_TILE], tl.float32)
        for start in range(0, vocab, _TILE):
            token = start + tl.arange(0, _TILE)
            scaled = _scaled(logits_ptr, token, token < vocab, top, divisor)
            within = (-scaled <= reach) & (token < vocab)
            found += within.to(tl.int32)
            mass += tl.where(within, tl.exp(scaled), 0.0)
        num_found = tl.sum(found, 0)
        enough = num_found >= top_k
        count = tl.where(enough, num_found, count)
        whole = tl.where(enough, tl.sum(mass, 0), whole)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return whole


@triton.jit
def _drawn_ahead(logits_ptr, top, divisor, row_hash, pivot_scaled, pivot, vocab, precise: tl.constexpr):
    """The draw among the tokens before the pivot."""
    best = tl.full([_TILE], float("-inf"), tl.float32)
    chosen = tl.zeros([_TILE], tl.int32) + vocab
    for start in range(0, vocab, _TILE):
        token = start + tl.arange(0, _TILE)
        scaled = _scaled(logits_ptr, token, token < vocab, top, divisor)
        ahead = _is_ahead(scaled, token, pivot_scaled, pivot) & (token < vocab)
        score = tl.where(ahead, scaled + noise(row_hash, token, precise), float("-inf"))
        chosen = tl.where(score > best, token, chosen)
        best = tl.maximum(best, score)
    return _first_best(best, chosen, vocab)


@triton.jit
def _write_down(logits_ptr, kept_ptr, top, divisor, pivot_scaled, pivot, vocab, kept: tl.constexpr):
    """Write down the tokens before the pivot, in the order of their numbers, as many as there is room for.

    Returns how many there are.
    """
    written = 0
    for start in range(0, vocab, _TILE):
        token = start + tl.arange(0, _TILE)
        scaled = _scaled(logits_ptr, token, token < vocab, top, divisor)
        ahead = _is_ahead(scaled, token, pivot_scaled, pivot) & (token < vocab)
        num_found = tl.sum(ahead.to(tl.int32), 0)
        if num_found > 0:  # most tiles have none
            place = written + tl.cumsum(ahead.to(tl.int32), 0) - 1
            tl.store(kept_ptr + place, token, mask=ahead & (place < kept))
            written += num_found
    return written


@triton.jit
def _is_allowed(above, mass, scaled, whole, top_k, top_p, min_p):
    """Whether truncation keeps a token with so many above it, and so much before it."""
    in_top_p = (mass < top_p * whole) | (top_p >= 1)
    return ((top_k == 0) | (above < top_k)) & in_top_p & (tl.exp(scaled) >= min_p)


@triton.jit
def _top_k_mass_of(scaled, whole, top_k):
    """As `_top_k_mass`, of tokens in registers, among which are all of the highest."""
    low, high = -1, _INFINITY_BITS + 0
    count = -1
    while (high - low > 1) & (count != top_k):
        middle = low + (high - low) // 2
        within = -scaled <= middle.to(tl.float32, bitcast=True)
        num_found = tl.sum(within.to(tl.int32), 0)
        enough = num_found >= top_k
        count = tl.where(enough, num_found, count)
        whole = tl.where(enough, tl.sum(tl.where(within, tl.exp(scaled), 0.0), 0), whole)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return whole


@triton.jit
def _settled(
    logits_ptr, kept_ptr, num_kept, has_top_k, top, divisor, row_hash, whole, top_k, top_p, min_p, vocab,
    kept: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """The draw among the tokens that were written down, outside of which truncation keeps none.

    Where the `top_k` highest are among them, what these weigh is found here.
    """
    place = tl.arange(0, kept)
    left = place < num_kept
    token = tl.load(kept_ptr + place, mask=left, other=0)
    scaled = _scaled(logits_ptr, token, left, top, divisor)
    score = tl.where(left, scaled + noise(row_hash, token, precise), float("-inf"))
    if has_top_k & (top_p < 1):
        whole = _top_k_mass_of(scaled, whole, top_k)
    is_settled = False
    drawn = 0
    while not is_settled:
        drawn = _first_best(tl.where(left, score, float("-inf")), tl.where(left, token, vocab), vocab)
        pivot = tl.max(tl.where(token == drawn, scaled, float("-inf")), 0)
        above = tl.sum((scaled > pivot).to(tl.int32), 0)
        left = left & _is_ahead(scaled, token, pivot, drawn)
        mass = tl.sum(tl.where(left, tl.exp(scaled), 0.0), 0)
        is_last = tl.sum(left.to(tl.int32), 0) == 0
        is_settled = is_last | _is_allowed(above, mass, pivot, whole, top_k, top_p, min_p)
    return drawn


@triton.jit
def _first_kept(
    logits_ptr, kept_ptr, drawn, top, divisor, row_hash, whole, top_k, top_p, min_p, vocab,
    kept: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """The first draw that truncation keeps, from the draw over all tokens on."""
    pivot = _scaled_one(logits_ptr, drawn, top, divisor)
    above, count, mass = _tally(logits_ptr, top, divisor, pivot, drawn, vocab)
    # What top-k leaves weighs at least as much as the draw and all before it, which is mostly all one needs to know.
    is_open = (above >= top_k) | (mass >= top_p * (mass + tl.exp(pivot)))
    has_top_k = (top_k > 0) & (above >= top_k) & (count <= kept)
    if is_open & (top_k > 0) & (top_k < vocab) & (top_p < 1) & (not has_top_k):
        whole = _top_k_mass(logits_ptr, top, divisor, whole, top_k, vocab)
    is_settled = (count == 0) | _is_allowed(above, mass, pivot, whole, top_k, top_p, min_p)
    while not is_settled:
        if count <= kept:
            _write_down(logits_ptr, kept_ptr, top, divisor, pivot, drawn, vocab, kept)
            tl.debug_barrier()  # what one thread wrote, others read
            drawn = _settled(
                logits_ptr, kept_ptr, count, has_top_k, top, divisor, row_hash, whole, top_k, top_p, min_p, vocab,
                kept, precise,
            )  # fmt: skip
            is_settled = True
        else:
            drawn = _drawn_ahead(logits_ptr, top, divisor, row_hash, pivot, drawn, vocab, precise)
            pivot = _scaled_one(logits_ptr, drawn, top, divisor)
            above, count, mass = _tally(logits_ptr, top, divisor, pivot, drawn, vocab)
            is_settled = (count == 0) | _is_allowed(above, mass, pivot, whole, top_k, top_p, min_p)
    return drawn


@triton.jit
def _kth_top(tops, top_k, chunk, num_chunks):
    """The `top_k`-th highest of the chunks' highest logits: so many tokens at least are not below it."""
    is_higher = (tops[None, :] > tops[:, None]) & (chunk < num_chunks)[None, :]
    rank = tl.sum(is_higher.to(tl.int32), 1)
    return tl.min(tl.where((rank < top_k) & (chunk < num_chunks), tops, float("inf")), 0)


@kernel()
def settle(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    tokens_ptr, tops_ptr, masses_ptr, kept_ptr, out_ptr, logits_row, vocab, num_chunks,
    chunks: tl.constexpr, kept: tl.constexpr, is_greedy: tl.constexpr, truncated: tl.constexpr, precise: tl.constexpr,
):  # fmt: skip
    """The token of a row: the best of all chunks, or the first draw that truncation keeps; or what is wrong."""
    row = tl.program_id(0).to(tl.int64)
    chunk, first = tl.arange(0, chunks), row * num_chunks
    tokens = tl.load(tokens_ptr + first + chunk, mask=chunk < num_chunks, other=vocab)
    tops = tl.load(tops_ptr + first + chunk, mask=chunk < num_chunks, other=float("-inf"))
    highest, is_broken = tl.max(tops, 0), tl.min(tokens, 0) < 0
    if is_greedy:
        drawn = _first_best(tops, tokens, vocab)
    else:
        logits_ptr += row * logits_row
        top = tl.maximum(highest, _LOWEST)
        temperature = tl.load(temperature_ptr + row)
        divisor = _divisor(temperature)
        row_hash = row_hash_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        inside = (chunk < num_chunks) & (tokens >= 0)
        scaled = _scaled(logits_ptr, tokens, inside, top, divisor)
        added = tl.where(temperature > 0, noise(row_hash, tokens, precise), 0.0)
        drawn = _first_best(tl.where(inside, scaled + added, float("-inf")), tokens, vocab)
        if truncated:
            top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
            is_whole = ((top_k == 0) | (top_k >= vocab)) & (top_p >= 1) & (min_p <= 0)
            if not (is_whole | (temperature <= 0) | is_broken | (highest == float("-inf"))):
                _, whole = _whole_mass(tops_ptr, masses_ptr, first, num_chunks, divisor, chunks)
                kept_ptr += row * kept
                num_kept = kept + 1
                if (top_k > 0) & (top_k <= num_chunks):
                    floor = tl.div_rn(_kth_top(tops, top_k, chunk, num_chunks) - top, divisor)
                    num_kept = _write_down(logits_ptr, kept_ptr, top, divisor, floor, -1, vocab, kept)
                if (num_kept >= top_k) & (num_kept <= kept):  # fewer, and the floor is not that of these logits
                    tl.debug_barrier()  # what one thread wrote, others read
                    drawn = _settled(
                        logits_ptr, kept_ptr, num_kept, True, top, divisor, row_hash, whole, top_k, top_p, min_p,
                        vocab, kept, precise,
                    )  # fmt: skip
                else:
                    drawn = _first_kept(
                        logits_ptr, kept_ptr, drawn, top, divisor, row_hash, whole, top_k, top_p, min_p, vocab,
                        kept, precise,
                    )  # fmt: skip
    drawn = tl.where(highest == float("-inf"), _NOTHING_ALLOWED, drawn)
    tl.store(out_ptr + row, tl.where(is_broken, _NOT_FINITE, drawn).to(tl.int64))


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
    highest = tl.max(logits, 0)
    tl.store(tops_ptr + at, highest)
    tl.store(masses_ptr + at, tl.sum(tl.exp(logits - tl.maximum(highest, _LOWEST)), 0))
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
    top, whole = _whole_mass(tops_ptr, masses_ptr, row * num_chunks, num_chunks, 1.0, chunks)
    total = top + tl.log(whole)
    at, column = tl.arange(0, found), tl.arange(0, columns)
    inside = at < num_chunks * most
    value = tl.load(values_ptr + row * num_chunks * most + at, mask=inside, other=float("-inf"))
    token = tl.load(tokens_ptr + row * num_chunks * most + at, mask=inside, other=vocab)
    values, tokens = _highest(value, token, vocab, most, columns)
    tl.store(ids_ptr + row * most + column, tokens.to(tl.int64), mask=column < most)
    tl.store(logprobs_ptr + row * most + column, values - total, mask=column < most)
    picked = tl.maximum(tl.load(picked_ptr + row), 0)  # where there is none, what is told means nothing
    logit = tl.load(logits_ptr + row * logits_row + picked).to(tl.float32)
    tl.store(logprob_ptr + row, logit - total)
