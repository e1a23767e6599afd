"""The tile list that the device makes is the one that plain Python makes, for any sequences in any bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged import DEVICE

pytest.importorskip("triton")

from phonograph.engine.ops.attention.tiles import list_tiles, max_tiles

Tile = tuple[int, int, int, int]
MAX_SEQS = 6

sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 21)), max_size=MAX_SEQS)
"""(start, count) of the sequences of a step."""


def tokens_of(given: list[tuple[int, int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [row + 1 for row, (_, count) in enumerate(given) for _ in range(count)] + [0] * padding
    positions = [start + offset for start, count in given for offset in range(count)] + [0] * padding
    return torch.tensor(rows, device=DEVICE), torch.tensor(positions, device=DEVICE)


def by_hand(given: list[tuple[int, int]], padding: int, tile_tokens: int) -> list[Tile]:
    """The longest context first; equals in the order of the tokens; padding last."""
    tiles: list[Tile] = []
    first = 0
    for row, (start, count) in enumerate(given):
        for offset in range(0, count, tile_tokens):
            tiles.append((first + offset, min(tile_tokens, count - offset), row + 1, start + offset))
        first += count
    padded = [(first + at, min(tile_tokens, padding - at), 0, 0) for at in range(0, padding, tile_tokens)]
    return sorted(tiles, key=lambda tile: -tile[3]) + padded


@settings(max_examples=40, deadline=None)
@given(given=sequences, padding=st.integers(0, 20), tile_tokens=st.sampled_from([1, 4, 8]))
def test_the_device_finds_the_same_tiles(given: list[tuple[int, int]], padding: int, tile_tokens: int) -> None:
    rows, positions = tokens_of(given, padding)
    found = list_tiles(rows, positions, tile_tokens, MAX_SEQS)
    wanted = by_hand(given, padding, tile_tokens)
    assert found.shape == (max_tiles(len(rows), tile_tokens, MAX_SEQS), 4)
    assert [tuple(tile) for tile in found[: len(wanted)].tolist()] == wanted
    assert torch.count_nonzero(found[len(wanted) :]) == 0


@given(given=sequences, padding=st.integers(0, 20), tile_tokens=st.sampled_from([1, 4, 8, 32]))
def test_no_step_has_more_tiles_than_its_bucket_allows(
    given: list[tuple[int, int]], padding: int, tile_tokens: int
) -> None:
    num_tokens = sum(count for _, count in given) + padding
    assert len(by_hand(given, padding, tile_tokens)) <= max_tiles(num_tokens, tile_tokens, MAX_SEQS)


def test_a_list_longer_than_one_chunk() -> None:
    given = [(3, 5000), (0, 1), (7, 4200)]
    rows, positions = tokens_of(given, 100)
    found = list_tiles(rows, positions, 64, 3)
    wanted = by_hand(given, 100, 64)
    assert [tuple(tile) for tile in found[: len(wanted)].tolist()] == wanted
