"""Gathered token counts: computed slots for the counts that data-parallel ranks exchange."""

from __future__ import annotations

from typing import Any

import torch

from phonograph.errors import DeclarationError, LoadError
from phonograph.graphs.inputs.extent import Extent
from phonograph.graphs.inputs.fields import fetch, path_of
from phonograph.graphs.inputs.slot import Slot


def local_num_tokens(num_tokens: int, padded: int, rank: int, num_ranks: int) -> int:
    """How many real tokens lie in this rank's share of the padded ones; the last get fewer where they don't divide.

    These are the sizes that `torch.chunk` cuts.
    """
    share = -(-padded // num_ranks)
    return max(0, min(num_tokens, padded, (rank + 1) * share) - rank * share)


def local_num_tokens_slot(
    rank: int, num_ranks: int, *, dim: str = "tokens", name: str = "local_num_tokens", count: str = "num_tokens"
) -> Slot:
    """The rank's non-padded count, from the field `count` of the batch.

    A batch without one may bring its own local count; else its used size counts. Ranks that replay a graph need
    equal shares, so a bucket that does not divide is refused; eager batches may have any size.
    """
    if not 0 <= rank < num_ranks:
        raise DeclarationError(f"slot {name!r}: rank is {rank}, expected 0 to {num_ranks - 1}. Count ranks from 0.")
    path, own = path_of(count), path_of(name)

    def compute(batch: Any, extent: Extent) -> list[int] | None:
        num_tokens = fetch(batch, {}, path)
        if num_tokens is None and fetch(batch, {}, own) is not None:
            return None
        padded = extent.padded[dim]
        if extent.for_graph and padded % num_ranks:
            raise LoadError(
                f"slot {name!r}: {padded} padded {dim} don't divide over {num_ranks} ranks. Choose buckets that do."
            )
        real = extent.used[dim] if num_tokens is None else int(num_tokens)
        return [local_num_tokens(real, padded, rank, num_ranks)]

    return Slot(name, (1,), torch.int32, compute=compute)


def global_num_tokens_slot(
    num_ranks: int, *, dim: str = "tokens", name: str = "global_num_tokens", required: bool = False
) -> Slot:
    """Every rank's count: in a graph the padded one, since all ranks run the same bucket; eager, what the batch says.

    Batches without counts have recordings of their own, unless counts are `required`.
    """

    def compute(batch: Any, extent: Extent) -> list[int] | None:
        return [extent.padded[dim]] * num_ranks if extent.for_graph else None

    return Slot(name, (num_ranks,), torch.int64, compute=compute, keyed=not required)
