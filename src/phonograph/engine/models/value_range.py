"""ValueRange: how large the values of a model become, by an eager pass at start-up that watches every product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from phonograph.devices import Device
from phonograph.engine.cache.groups import CacheGroup, PagedCache
from phonograph.engine.models.interface import Model
from phonograph.engine.ops import projections
from phonograph.engine.ops.kernels import Angles, Heads, Kernels, Norm, Op, Places, RoundKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Queries, Span
from phonograph.engine.state.column import TableSizes
from phonograph.engine.state.tables import RequestTables
from phonograph.sizes import ceil_div

NUM_TOKENS = 512
_PAGE = 16
_STRIDE = 0.6180339887
"""Of the vocabulary, from one token to the next: all parts of it are visited evenly."""


@dataclass(frozen=True)
class ValueRange:
    """The largest value that a pass put out in the dtype of the weights, and where."""

    num_tokens: int
    largest: float
    """Infinite where a value was not finite."""
    layer: int


def value_range(model: Model, device: Device) -> ValueRange:
    """Of one sequence of tokens from all over the vocabulary, after the token that texts begin with."""
    config, on = model.config, device.torch_device
    num_tokens = min(NUM_TOKENS, model.max_len)
    num_pages = ceil_div(num_tokens, _PAGE)
    watched = _Watched(model.kernels, model.dtype)
    model = model.with_kernels(watched)
    tokens = (torch.arange(1, num_tokens + 1, dtype=torch.float64) * _STRIDE % 1 * config.vocab).long()
    if config.bos_id is not None:
        tokens[0] = config.bos_id
    table = torch.zeros(2, num_pages, dtype=torch.int32)
    table[1] = torch.arange(1, num_pages + 1)
    cache = CacheGroup.empty(model.keeps, num_pages + 1, _PAGE, dtype=model.dtype, device=on)
    if model.columns:
        tables = RequestTables(device, model.columns, TableSizes(1, config.vocab, num_pages))
        cache = replace(cache, by_row={column.name: tables[column.name] for column in model.columns})
    rows, positions = torch.ones(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    spans = (Span(row=1, first=0, start=0, count=num_tokens),)
    with torch.no_grad():
        queries = Queries(rows.to(on), positions.to(on), table.to(on), tokens_per_row=None, spans=spans)
        model.logits(model.hidden(tokens.to(on), queries, cache).states)
        peaks = torch.stack(watched.peaks).nan_to_num(nan=torch.inf).cpu()
    largest, index = peaks.max(0)
    per_layer = (len(watched.peaks) - _AT_THE_END) // config.num_layers
    return ValueRange(num_tokens, largest.item(), min(int(index) // per_layer, config.num_layers - 1))


_AT_THE_END = 2
"""Peaks after the last layer: its norm and the logits."""


@dataclass
class _Watched:
    """Kernels that note the largest value of all that they put out in the dtype of the weights."""

    inner: Kernels
    dtype: torch.dtype
    peaks: list[torch.Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def notes(self) -> tuple[str, ...]:
        return self.inner.notes

    @property
    def rounds(self) -> RoundKernels:
        return self.inner.rounds

    def prepare(self, matrix: Matrix) -> Matrix:
        return self.inner.prepare(matrix)

    def takes(self, op: Op, num_tokens: int, matrix: Matrix) -> bool:
        return True  # what the others decline is watched too

    def resume_overlap(self) -> None:
        self.inner.resume_overlap()

    def embed_tokens(
        self,
        embedding: torch.Tensor,
        tokens: torch.Tensor,
        angles: Angles,
        queries: Queries,
        page_size: int,
        residual: torch.dtype,
    ) -> tuple[torch.Tensor, Places]:
        return self.inner.embed_tokens(embedding, tokens, angles, queries, page_size, residual)

    def places(self, angles: Angles, queries: Queries, page_size: int) -> Places:
        return self.inner.places(angles, queries, page_size)

    def write_next_token(
        self,
        queries: Queries,
        tokens: torch.Tensor,
        last_token: torch.Tensor,
        length: torch.Tensor,
    ) -> None:
        self.inner.write_next_token(queries, tokens, last_token, length)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, x = self.inner.add_norm(x, delta, norm, keeps=keeps)
        return self._noted(normed), x

    def norm_linear(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, matrix: Matrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.add_norm(x.clone(), delta, norm)
        out, x = projections.norm_linear(self.inner, x, delta, norm, matrix)
        return self._noted(out), x

    def norm_gated(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, gate_up: Matrix, *, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.add_norm(x.clone(), delta, norm)
        out, x = projections.norm_gated(self.inner, x, delta, norm, gate_up, keeps=keeps)
        return self._noted(out), x

    def linear(self, x: torch.Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._noted(projections.linear(self.inner, x, matrix, dtype))

    def joined_norms(self, parts: Sequence[torch.Tensor], norms: Sequence[Norm]) -> torch.Tensor:
        return self._noted(self.inner.joined_norms(parts, norms))

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        return self._noted(self.inner.silu_mul(both))

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        places: Places,
        cache: PagedCache,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._noted(self.inner.rotate_and_store(qkv, heads, places, cache, layer, out))

    def _noted(self, values: torch.Tensor) -> torch.Tensor:
        # What is added to a residual stream in float32 may exceed float16's range.
        self.peaks.append(values.abs().amax().float() if values.dtype == self.dtype else values.new_zeros(()))
        return values
