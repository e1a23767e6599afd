"""Candidates: the ways of computing a product that are worth measuring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from phonograph.engine.ops.tuning import MAX_TILES, MOST_TOKENS, MOST_VECTORS, STREAMED, Choice, Product
from phonograph.sizes import ceil_div, next_power_of_two

Job = tuple[Product, Choice]
SHARED_BYTES = 227 << 10
"""Shared memory of a program at most, on sm_90."""
_NUM_VARIED = 6
_MOST_HELD = 384
"""Elements of half a register that a thread may hold of weights and vectors."""


def candidates(product: Product, multiprocessors: int) -> list[Choice]:
    """The ways worth trying, launched one after the other."""
    found = [Choice("library"), Choice("library_lt")]
    if product.tokens == 1:
        found += _whole_vectors(product, multiprocessors)
        found += _blocked_vectors(product)
    elif product.tokens <= MOST_VECTORS:
        found += _few_vectors(product)
    if product.tokens <= MOST_TOKENS:
        found += _matrices(product, multiprocessors)
    return list(dict.fromkeys(found))


def variations(measured: Iterable[tuple[Product, Choice, float]]) -> list[Job]:
    """The fastest of each product again, overlapping with its neighbours, with and without a prefetch of weights."""
    by_product: dict[Product, list[tuple[float, Choice]]] = {}
    for product, choice, us in measured:
        if us < math.inf:
            by_product.setdefault(product, []).append((us, choice))
    jobs: list[Job] = []
    for product, timed in by_product.items():
        ordered = [choice for _, choice in sorted(timed, key=lambda pair: pair[0])]
        jobs += [(product, Choice(kind, overlap="early")) for kind in ("library", "library_lt") if "norm" in product.op]
        jobs += [(product, varied) for choice in _distinct(ordered) for varied in _overlapping(product, choice)]
    return list(dict.fromkeys(jobs))


def _distinct(ordered: Iterable[Choice]) -> list[Choice]:
    """The first few kernels that differ in more than how they are launched."""
    kernels: dict[Choice, Choice] = {}
    for choice in ordered:
        if choice.kind in ("vector", "matrix"):
            kernels.setdefault(replace(choice, programs=0, ahead=0), choice)
    return list(kernels.values())[:_NUM_VARIED]


def _overlapping(product: Product, choice: Choice) -> Iterator[Choice]:
    is_streamed = choice.kind == "vector" and choice.block >= product.inputs and choice.stages == STREAMED
    held = 0 if is_streamed else min(product.inputs, choice.block * choice.stages)
    for overlap in ("late", "early"):
        for ahead in {0, held}:
            # Programs that start at different times share work evenly only if it is dealt out as they come.
            for programs in {choice.programs, 0}:
                yield replace(choice, overlap=overlap, ahead=ahead, programs=programs)


def _whole_vectors(product: Product, multiprocessors: int) -> Iterator[Choice]:
    block = next_power_of_two(product.inputs)
    if block > 16384:
        return
    usual = max(4, min(16, block // 512))
    scale = max(1, 4096 // block)  # narrower weights: more rows, for as many bytes
    gated = 2 if product.op == "norm_gated" else 1
    for rows, warps, stages in (
        (1, usual, 1), (2, usual, 1), (4, usual, 1), (1, usual // 2, 1), (2, usual // 2, 1), (1, 16, 1),
        (1, usual, 2), (2, usual, 2), (1, usual // 2, 2), (2, usual // 2, 2), (1, 16, 2),
        (1, usual, 3), (1, usual, 4), (2, usual, 3), (2, usual, 4), (4, usual, 3),
    ):  # fmt: skip
        if stages > STREAMED and stages * gated * rows * scale * block * product.dtype.itemsize > SHARED_BYTES:
            continue
        plain = Choice("vector", rows=rows * scale, block=block, warps=warps, stages=stages)
        yield plain
        tiles = ceil_div(product.outputs, plain.rows)
        for each in (2, 3, 4, 6, 8):
            most = ceil_div(tiles, each * multiprocessors)
            yield replace(plain, programs=min(tiles, each * multiprocessors))
            yield replace(plain, programs=ceil_div(tiles, most))  # all have as many tiles


def _blocked_vectors(product: Product) -> Iterator[Choice]:
    for rows, block, warps, stages in (
        (4, 512, 4, 4), (4, 1024, 4, 4), (4, 2048, 8, 3), (8, 256, 2, 6), (8, 512, 4, 3), (8, 512, 4, 4),
        (8, 512, 4, 6), (8, 1024, 4, 3), (8, 1024, 8, 3), (16, 256, 4, 4), (16, 256, 4, 6), (16, 512, 4, 3),
        (16, 512, 8, 3), (32, 256, 8, 3),
    ):  # fmt: skip
        if block < product.inputs:
            yield Choice("vector", rows=rows, block=block, warps=warps, stages=stages)


def _few_vectors(product: Product) -> Iterator[Choice]:
    """Where whole rows of a few vectors and of the weights fit in registers."""
    block = next_power_of_two(product.inputs)
    gated = 2 if product.op == "norm_gated" else 1
    for rows, warps in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8)):
        held = block * (2 * gated * rows + product.tokens) // (32 * warps)  # of a thread, weights of two tiles
        if held <= _MOST_HELD:
            yield Choice("vector", rows=rows, block=block, warps=warps, stages=STREAMED)


# rows, block, warps, stages, swap
_TILES = {
    16: (
        (16, 128, 4, 8, False), (16, 256, 4, 4, False), (32, 64, 4, 8, False), (32, 128, 4, 4, False),
        (32, 128, 4, 6, False), (32, 128, 4, 8, False), (32, 256, 4, 4, False), (64, 64, 4, 8, True),
        (64, 128, 4, 4, True), (64, 128, 4, 5, True), (64, 128, 4, 8, True), (64, 256, 4, 3, True),
        (128, 64, 4, 6, True),
    ),
    32: (
        (32, 128, 4, 6, False), (32, 256, 4, 4, False), (64, 64, 4, 8, True), (64, 128, 4, 4, True),
        (64, 128, 4, 6, True), (64, 128, 4, 8, True), (64, 256, 4, 3, True), (128, 64, 4, 6, True),
        (128, 64, 8, 5, True), (128, 128, 8, 4, True),
    ),
    64: (
        (64, 64, 4, 6, True), (64, 64, 4, 8, True), (64, 128, 4, 4, True), (64, 128, 4, 5, True),
        (64, 128, 4, 6, True), (64, 256, 4, 3, True), (128, 64, 4, 5, True), (128, 64, 8, 5, True),
        (128, 64, 8, 7, True), (128, 128, 8, 3, True), (128, 128, 8, 4, True),
    ),
    128: (
        (64, 64, 4, 5, True), (64, 128, 4, 3, True), (64, 128, 4, 4, True), (128, 64, 8, 4, True),
        (128, 64, 8, 6, True), (128, 128, 8, 3, True),
    ),
}  # fmt: skip


def _matrices(product: Product, multiprocessors: int) -> Iterator[Choice]:
    tokens = max(16, next_power_of_two(product.tokens))
    gated = product.op == "norm_gated"
    for rows, block, warps, stages, swap in _TILES[tokens]:
        stage = (rows * (2 if gated else 1) + tokens) * block * product.dtype.itemsize
        fitting = min(stages, SHARED_BYTES // stage)
        if fitting < 2 or block >= 2 * product.inputs:
            continue
        tile = Choice("matrix", rows=rows, block=block, warps=warps, stages=fitting, swap=swap)
        tiles = ceil_div(product.outputs, rows)
        for split in (1, 2, 3, 4, 8):
            is_useful = 0.9 * multiprocessors <= tiles * split <= 6 * multiprocessors
            if split == 1 or (is_useful and not gated and tiles <= MAX_TILES and split * block <= product.inputs):
                yield replace(tile, split=split)
        fused = min(stages, SHARED_BYTES // (stage + 2 * tokens * block * product.dtype.itemsize))
        if product.op != "linear" and product.tokens <= 8 and fused >= 2:
            yield replace(tile, stages=fused, fused=True)
