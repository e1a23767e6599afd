"""FlashInfer on the same pages, for comparison: planned on the host beforehand, run inside a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phonograph.engine.cache.groups import PagedCache


def flashinfer_call(
    cache: PagedCache, table: torch.Tensor, sequences: tuple[tuple[int, int], ...], q: torch.Tensor
) -> Callable[[int], torch.Tensor]:
    """Attention of one layer; sequences are (cached, new) tokens, in rows 1, 2, … of the table."""
    import flashinfer

    device, size = q.device, cache.page_size
    lengths = [cached + new for cached, new in sequences]
    counts = [-(-length // size) for length in lengths]
    indices = torch.cat([table[row + 1, :count] for row, count in enumerate(counts)]).int().to(device)
    page_starts = _starts(counts, device)
    last = torch.tensor([(length - 1) % size + 1 for length in lengths], dtype=torch.int32, device=device)
    heads = (q.shape[1], cache.keys.shape[3], cache.keys.shape[4], size)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    kinds: dict[str, Any] = {"q_data_type": q.dtype, "kv_data_type": cache.keys.dtype}
    if all(new == 1 for _, new in sequences):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(page_starts, indices, last, *heads, **kinds)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        token_starts = _starts([new for _, new in sequences], device)
        wrapper.plan(token_starts, page_starts, indices, last, *heads, causal=True, **kinds)
    used = q[: sum(new for _, new in sequences)].contiguous()
    return lambda layer: wrapper.run(used, (cache.keys[layer], cache.values[layer]))


def _starts(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
