"""The Triton kernels (interpreted where there is no GPU) against the torch reference."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from phonograph.engine.attention.base import PagedCache, Queries
from phonograph.engine.kernels.base import Angles, Heads, Norm
from phonograph.engine.kernels.reference import ReferenceKernels
from phonograph.engine.kernels.triton import rows
from phonograph.engine.kernels.triton.layers import TritonKernels
from phonograph.errors import DeviceError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 4
REFERENCE, TRITON = ReferenceKernels(), TritonKernels()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("size", [(1, 64), (3, 576), (17, 100), (0, 64)], ids=str)
def test_add_norm(size: tuple[int, int], with_delta: bool) -> None:
    x, delta = random(*size), random(*size) if with_delta else None
    kept, norm = x.clone(), Norm(random(size[1]), 1e-5)
    for found, wanted in zip(TRITON.add_norm(x, delta, norm), REFERENCE.add_norm(x, delta, norm), strict=True):
        near(found, wanted)
    assert torch.equal(x, kept), "the residual stream that went in is still the caller's"


def test_add_norm_takes_strided_rows() -> None:
    x, delta, norm = random(3, 2, 96)[:, 1], random(3, 200)[:, 4:100], Norm(random(96), 1e-6)
    for found, wanted in zip(TRITON.add_norm(x, delta, norm), REFERENCE.add_norm(x, delta, norm), strict=True):
        near(found, wanted)


def test_a_row_that_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(DeviceError, match="kernels='reference'"):
        TRITON.add_norm(random(1, rows.WIDEST_ROW + 1), None, Norm(random(rows.WIDEST_ROW + 1), 1e-6))


@pytest.mark.parametrize("size", [(1, 64), (3, 1536), (2, 1100)], ids=str)
def test_silu_mul(size: tuple[int, int]) -> None:
    mixed = random(size[0], 2 * size[1])
    gate, up = mixed.chunk(2, -1)
    near(rows.silu_mul(mixed), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("shape", "num_tokens"),
    [((4, 2, 16), 1), ((4, 2, 16), 65), ((9, 3, 64), 5), ((2, 1, 24), 5), ((2, 1, 24), 1)],
    ids=str,
)
def test_rotate_and_store(shape: tuple[int, int, int], num_tokens: int, with_norm: bool) -> None:
    num_heads, kv_heads, head_dim = shape
    norms = (Norm(random(head_dim), 1e-6), Norm(random(head_dim), 1e-5)) if with_norm else (None, None)
    heads = Heads(num_heads, kv_heads, head_dim, *norms)
    qkv = random(num_tokens, (num_heads + 2 * kv_heads) * head_dim + 8)[:, :-8]  # rows with a stride of their own
    table = Angles(random(40, head_dim), random(40, head_dim))
    queries = queries_of(num_tokens)
    caches = [PagedCache.empty(2, 140, PAGE, kv_heads, head_dim, dtype=torch.float32, device=DEVICE) for _ in "rt"]
    wanted = REFERENCE.rotate_and_store(
        qkv.contiguous(), heads, REFERENCE.angles(table, queries.positions), queries, caches[0], 1
    )
    found = TRITON.rotate_and_store(qkv, heads, TRITON.angles(table, queries.positions), queries, caches[1], 1)
    near(found, wanted)
    for cache in caches:  # two padding tokens may share the null page's first place: either may win
        cache.keys[:, 0], cache.values[:, 0] = 0, 0
    near(caches[1].keys, caches[0].keys)
    near(caches[1].values, caches[0].values)
    assert caches[1].keys[1].any()


def queries_of(num_tokens: int) -> Queries:
    """Tokens of sequences of their own in shuffled pages; the last three, where there are five, are padding."""
    positions = torch.arange(num_tokens, device=DEVICE) * 3 % 8
    rows = torch.arange(num_tokens, device=DEVICE) + 1
    table = torch.zeros(num_tokens + 1, 2, dtype=torch.int32, device=DEVICE)
    table[1:] = (torch.randperm(2 * num_tokens) + 1).view(num_tokens, 2)
    if num_tokens >= 5:
        positions[-3:], rows[-3:] = 0, 0
    return Queries(rows, positions, table, one_per_sequence=True)
