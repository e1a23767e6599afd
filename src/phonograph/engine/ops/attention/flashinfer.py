"""FlashInfer: attention of steps that the host plans: prompts between the graphs of a breakable recording; eager ones.

Its planner wants the lengths of all sequences on the host and copies a plan to the device at every step. A decode step
is one launch that runs ahead of the host, so decode steps keep the attention whose kernels read lengths themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from phonograph.devices import Device, Fence
from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.queries import PLAIN, Attention, Queries, Scores, Span, StepAttention
from phonograph.errors import DeviceError
from phonograph.sizes import ceil_div

_WORKSPACE = 128 << 20
_NUM_PLANNERS = 4
"""More than the windows of a model, so that the plans of one step are not each other's."""


@dataclass(frozen=True)
class _Planner:
    """A wrapper of the library, and when the device has copied its last plan from the host's memory."""

    wrapper: Any
    copied: Fence


class FlashInferAttention:
    """`inner` attends wherever the host's view of a step, its spans, is not there."""

    def __init__(self, device: Device, inner: Attention) -> None:
        try:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        except ImportError:
            raise DeviceError("attention='flashinfer' needs FlashInfer. Run: pip install flashinfer-python") from None
        self.name = f"flashinfer; {inner.name} in decode steps"
        self._inner = inner
        self._device = device
        # Plans of one stream run one after the other: they share what kernels work with.
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device.torch_device)
        self._planners = [
            _Planner(BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"), device.fence())
            for _ in range(_NUM_PLANNERS)
        ]
        self._num_planned = 0

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        if queries.spans is None:
            return self._inner.prepare(cache, queries, num_heads)
        return _FlashInferStep(self, cache, queries, queries.spans, num_heads)

    def unplanned(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        """For layers whose scoring differs from the plain softmax, for which FlashInfer is not used."""
        return self._inner.prepare(cache, replace(queries, spans=None, spans_from=0), num_heads)

    def planned(
        self, cache: PagedCache, queries: Queries, spans: Sequence[Span], num_heads: int, window: int | None
    ) -> Any:
        """A wrapper that holds the plan of this step."""
        planner = self._planners[self._num_planned % len(self._planners)]
        self._num_planned += 1
        planner.copied.synchronize()  # the plan is made in pinned memory that the device reads later
        size, table = cache.page_size, queries.table
        lengths = [span.start + span.count for span in spans]
        num_pages = [ceil_div(length, size) for length in lengths]
        rows = [span.row for span, pages in zip(spans, num_pages, strict=True) for _ in range(pages)]
        columns = [column for pages in num_pages for column in range(pages)]
        row, column = self._sent([rows, columns], torch.int64).to(table.device, non_blocking=True)
        planner.wrapper.plan(
            self._sent([0, *accumulate(span.count for span in spans)]),
            self._sent([0, *accumulate(num_pages)]),
            table[row, column],
            self._sent([(length - 1) % size + 1 for length in lengths]),
            num_heads,
            cache.keys.shape[3],
            cache.keys.shape[4],
            size,
            causal=True,
            window_left=-1 if window is None else window - 1,
            q_data_type=cache.keys.dtype,
            kv_data_type=cache.keys.dtype,
            seq_lens=self._sent(lengths),
        )
        planner.copied.record()
        return planner.wrapper

    def _sent(self, numbers: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """In memory of the host that a copy to the device need not wait for."""
        made = torch.tensor(numbers, dtype=dtype)
        return self._device.host_block(made.nbytes).view(dtype).view(made.shape).copy_(made)


@dataclass(frozen=True)
class _FlashInferStep:
    """The sequences of one step; planned for each window when its first layer comes."""

    outer: FlashInferAttention
    cache: PagedCache
    queries: Queries
    spans: Sequence[Span]
    num_heads: int
    plans: dict[int | None, Any] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        if not scores.is_plain:
            return self.outer.unplanned(self.cache, self.queries, self.num_heads).attend(layer, q, window, out, scores)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        used = sum(span.count for span in self.spans)
        if used < out.shape[0]:
            out[used:].zero_()
        if used == 0:
            return out
        if window not in self.plans:
            self.plans[window] = self.outer.planned(self.cache, self.queries, self.spans, self.num_heads, window)
        pages = self.cache.keys[layer], self.cache.values[layer]
        self.plans[window].run(q[:used], pages, out=out[:used])
        return out
