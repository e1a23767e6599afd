"""Computed slots for the token counts that data-parallel ranks gather."""

from __future__ import annotations

from typing import Any

import torch

from phonograph.errors import DeclarationError
from phonograph.graphs.extent import Extent
from phonograph.graphs.fields import fetch, path_of
from phonograph.graphs.slots import Slot


def local_num_tokens(num_tokens: int, padded: int, rank: int, num_ranks: int) -> int:
    """How many real tokens lie in this rank's share of the padded ones."""
    if padded % num_ranks:
        raise DeclarationError(f"{padded} padded tokens don't divide over {num_ranks} ranks. Choose buckets that do.")
    share = padded // num_ranks
    return max(0, min(num_tokens - rank * share, share))


def local_num_tokens_slot(
    rank: int, num_ranks: int, *, dim: str = "tokens", name: str = "local_num_tokens", count: str = "num_tokens"
) -> Slot:
    """The rank's non-padded count, from the field `count` of the batch; declines where the batch has none."""
    if not 0 <= rank < num_ranks:
        raise DeclarationError(f"slot {name!r}: there is no rank {rank} among {num_ranks}. Count from 0.")
    path = path_of(count)

    def compute(batch: Any, extent: Extent) -> list[int] | None:
        num_tokens = fetch(batch, {}, path)
        if num_tokens is None:
            return None
        return [local_num_tokens(int(num_tokens), extent.padded[dim], rank, num_ranks)]

    return Slot(name, (1,), torch.int32, compute=compute)


def global_num_tokens_slot(num_ranks: int, *, dim: str = "tokens", name: str = "global_num_tokens") -> Slot:
    """Every rank's padded count: all ranks run the same bucket; declines where the batch has no counts."""
    path = path_of(name)

    def compute(batch: Any, extent: Extent) -> list[int] | None:
        if fetch(batch, {}, path) is None:
            return None
        return [extent.padded[dim]] * num_ranks

    return Slot(name, (num_ranks,), torch.int64, compute=compute, keyed=True)
