"""The Triton kernels (interpreted where there is no GPU) against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from phonograph.engine.cache.groups import CacheGroup, PagedCache
from phonograph.engine.checkpoints.loading import load_weights
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.decoder import _pieces
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.models.registry import family_of
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.kernels import Angles, Heads, Kernels, Norm, Places
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.triton import rows
from phonograph.engine.ops.triton.layers import TritonKernels
from phonograph.engine.ops.triton.products import Products
from phonograph.engine.ops.tuning import MOST_VECTORS, Choice, Tuning
from phonograph.errors import DeviceError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 4
REFERENCE, TRITON = ReferenceKernels(), TritonKernels(DEVICE, Tuning({}))


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
    norm = Norm(random(size[1]), 1e-5)
    for found, wanted in zip(TRITON.add_norm(x.clone(), delta, norm), REFERENCE.add_norm(x, delta, norm), strict=True):
        near(found, wanted)
    total = TRITON.add_norm(x, delta, norm)[1]
    assert total is x, "the residual stream needs no second place"


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [(1, 64), (5, 576), (0, 64)], ids=str)
def test_norms_side_by_side(size: tuple[int, int], count: int) -> None:
    """Of rows that lie apart, at scales that differ by far, with weights and eps of their own."""
    parts = [random(size[0], 2, size[1])[:, 1] * 1000.0 ** (number - 1) for number in range(count)]
    norms = [Norm(random(size[1]), 10.0**-number) for number in range(4, 4 + count)]
    found = TRITON.joined_norms(parts, norms)
    near(found, REFERENCE.joined_norms(parts, norms))
    assert found.shape == (size[0], count * size[1])


def test_norms_side_by_side_are_in_the_dtype_of_the_weights() -> None:
    parts, norm = [random(2, 32), random(2, 32)], Norm(random(32).bfloat16(), 1e-5)
    found, wanted = (kernels.joined_norms(parts, [norm, norm]) for kernels in (TRITON, REFERENCE))
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


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

    def places(kernels: Kernels) -> Places:
        return kernels.embed_tokens(random(3, 8), torch.zeros_like(queries.rows), table, queries, PAGE, torch.float32)[
            1
        ]

    caches = [PagedCache.empty(2, 140, PAGE, kv_heads, head_dim, dtype=torch.float32, device=DEVICE) for _ in "rt"]
    wanted = REFERENCE.rotate_and_store(qkv.contiguous(), heads, places(REFERENCE), caches[0], 1)
    found = TRITON.rotate_and_store(qkv, heads, places(TRITON), caches[1], 1)
    near(found, wanted)
    for cache in caches:  # two padding tokens may share the null page's first place: either may win
        cache.keys[:, 0], cache.values[:, 0] = 0, 0
    near(caches[1].keys, caches[0].keys)
    near(caches[1].values, caches[0].values)
    assert caches[1].keys[1].any()


def test_queries_go_where_they_are_wanted() -> None:
    heads, queries = Heads(2, 1, 16, None, None), queries_of(5)
    qkv, table = random(5, 4 * 16), Angles(random(40, 16), random(40, 16))
    for kernels in (REFERENCE, TRITON):
        cache = PagedCache.empty(1, 12, PAGE, 1, 16, dtype=torch.float32, device=DEVICE)
        _, places = kernels.embed_tokens(
            random(3, 8), torch.zeros_like(queries.rows), table, queries, PAGE, torch.float32
        )
        wanted, out = kernels.rotate_and_store(qkv, heads, places, cache, 0), torch.empty(5, 2, 16, device=DEVICE)
        assert kernels.rotate_and_store(qkv, heads, places, cache, 0, out) is out
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
def test_the_ends_of_a_step(num_tokens: int, by_row: bool) -> None:
    queries, embedding = queries_of(num_tokens), random(50, 24)
    tokens = torch.randint(0, 50, (num_tokens,), device=DEVICE)
    table = Angles(random(40, 12), random(40, 12))
    if by_row:
        queries, tokens = rowwise(queries, tokens)
    states, tables = [], []
    for kernels in (REFERENCE, TRITON):
        x, places = kernels.embed_tokens(embedding, tokens, table, queries, PAGE, torch.float32)
        states.append((x, places.cos, places.sin, places.slots))
        last_token = torch.full((num_tokens + 2,), 7, device=DEVICE)
        length = queries.positions.clone() if by_row else last_token.clone()
        last_token[0], length[0] = 0, 0
        picked = torch.arange(num_tokens, device=DEVICE) + 100
        kernels.write_next_token(replace(queries, positions=length) if by_row else queries, picked, last_token, length)
        tables.append((last_token, length))
    for one, other in (*zip(*states, strict=True), *zip(*tables, strict=True)):
        assert torch.equal(one, other)
    last_token, length = tables[0]
    real = queries.rows > 0
    assert torch.equal(last_token[queries.rows[real]], picked[real])
    assert torch.equal(length[queries.rows[real]], queries.token_positions[real] + 1)
    others = [int(last_token[0]), int(length[0]), int(last_token[-1])]
    assert others == [0, 0, 7], "nobody's row, and one that is not in the step"


def test_what_a_row_computes_past_its_pages_goes_to_the_null_page() -> None:
    table = torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
    table[1, :2], table[2, :1] = torch.tensor([5, 6]), 7
    rows = torch.tensor([1] * 6 + [2] * 6, device=DEVICE)
    positions = torch.cat([PAGE + torch.arange(6), PAGE - 2 + torch.arange(6)]).to(DEVICE)
    queries = Queries(rows, positions, table, tokens_per_row=6)
    angles = Angles(random(40, 16), random(40, 16))
    for kernels in (REFERENCE, TRITON):
        _, places = kernels.embed_tokens(random(3, 8), rows * 0, angles, queries, PAGE, torch.float32)
        pages = (places.slots // PAGE).tolist()
        own = min(6, PAGE)
        assert pages == [*[6] * own, *[0] * (6 - own), 7, 7, 0, 0, 0, 0]


def rowwise(queries: Queries, tokens: torch.Tensor) -> tuple[Queries, torch.Tensor]:
    """The same with positions and tokens in tables of all rows."""
    size = queries.rows.shape[0] + 2
    positions, words = torch.full((2, size), 3, device=DEVICE)
    positions[0], words[0] = 0, 0
    positions[queries.rows], words[queries.rows] = queries.positions, tokens
    words[0] = 0
    return replace(queries, positions=positions, by_row=True), words


def queries_of(num_tokens: int) -> Queries:
    """Tokens of sequences of their own in shuffled pages; the last three, where there are five, are padding."""
    positions = torch.arange(num_tokens, device=DEVICE) * 3 % 8
    rows = torch.arange(num_tokens, device=DEVICE) + 1
    table = torch.zeros(num_tokens + 1, 2, dtype=torch.int32, device=DEVICE)
    table[1:] = (torch.randperm(2 * num_tokens) + 1).view(num_tokens, 2)
    if num_tokens >= 5:
        positions[-3:], rows[-3:] = 0, 0
    return Queries(rows, positions, table, tokens_per_row=1)


# -- products -------------------------------------------------------------------------------------------------

VECTOR = {
    "whole, a tile per program": Choice("vector", rows=4, block=64),
    "whole, dealt to 3 programs": Choice("vector", rows=2, block=64, programs=3),
    "whole, more columns than there are": Choice("vector", rows=2, block=128, stages=3),
    "streamed, a tile per program": Choice("vector", rows=4, block=64, stages=2),
    "streamed, dealt to 3 programs": Choice("vector", rows=2, block=64, stages=2, programs=3),
    "blocks": Choice("vector", rows=4, block=16, stages=2),
    "blocks with a rest": Choice("vector", rows=8, block=32),
}
MATRIX = {
    "tokens are tall": Choice("matrix", rows=16, block=16, stages=2),
    "weights are tall": Choice("matrix", rows=32, block=32, swap=True),
    "split in 3": Choice("matrix", rows=16, block=16, split=3),
    "split in more parts than there are": Choice("matrix", rows=16, block=32, split=7, swap=True),
    "fused": Choice("matrix", rows=16, block=32, fused=True),
    "fused, weights are tall": Choice("matrix", rows=16, block=16, fused=True, swap=True),
}
CASES = {
    **{f"1, vector, {name}": (1, choice) for name, choice in VECTOR.items()},
    **{f"3, matrix, {name}": (3, choice) for name, choice in MATRIX.items()},
    **{
        f"{count}, vectors, {some} programs": (count, replace(VECTOR["streamed, a tile per program"], programs=some))
        for count, some in ((2, 0), (3, 3), (5, 0), (8, 2))
    },
    "3, vectors, more columns than there are": (3, Choice("vector", rows=2, block=128, stages=2)),
    "1, matrix": (1, MATRIX["fused, weights are tall"]),
    "16, matrix": (16, MATRIX["split in 3"]),
    "17, matrix": (17, MATRIX["fused"]),
}
WIDTH, OUTPUTS = 56, 26


@pytest.mark.parametrize("name", list(CASES))
def test_products(name: str) -> None:
    (num_tokens, choice), products = CASES[name], Products(DEVICE)
    x, delta, norm = random(num_tokens, WIDTH), random(num_tokens, WIDTH), Norm(random(WIDTH), 1e-5)
    weight, bias, gate_up = random(OUTPUTS, WIDTH), random(OUTPUTS), Matrix(random(2 * OUTPUTS, WIDTH))
    plain, biased = Matrix(weight), Matrix(weight, bias)
    near(products.linear(choice, x, plain), x @ weight.T)
    near(products.linear(choice, x, biased), REFERENCE.linear(x, plain) + bias)
    near(REFERENCE.linear(x, biased), REFERENCE.linear(x, plain) + bias)
    for with_delta, matrix in ((None, plain), (delta, biased)):
        found = products.norm_linear(choice, x.clone(), with_delta, norm, matrix)
        wanted = REFERENCE.norm_linear(x, with_delta, norm, matrix)
        near(found[0], wanted[0])
        near(found[1], wanted[1])
        found = products.norm_gated(choice, x.clone(), with_delta, norm, gate_up)
        wanted = REFERENCE.norm_gated(x, with_delta, norm, gate_up)
        near(found[0], wanted[0])
        near(found[1], wanted[1])


@pytest.mark.parametrize("name", list(CASES))
def test_a_residual_stream_in_float32_may_be_beyond_the_range_of_float16(name: str) -> None:
    """So large that float16 would not hold it before the norm, nor what is added to it."""
    (num_tokens, choice), products, dtype = CASES[name], Products(DEVICE), torch.float16
    x, delta = random(num_tokens, WIDTH) * 1e5, random(num_tokens, WIDTH) * 1e5
    weight, gate_up = (Matrix(random(rows, WIDTH).to(dtype)) for rows in (OUTPUTS, 2 * OUTPUTS))
    wide, wide_gate_up = Matrix(weight.data.double()), Matrix(gate_up.data.double())
    norm = Norm(random(WIDTH).to(dtype), 1e-5)
    exact = Norm(norm.weight.double(), norm.eps)
    for found, wanted in (
        (
            products.norm_linear(choice, x.clone(), delta, norm, weight),
            REFERENCE.norm_linear(x.double(), delta.double(), exact, wide),
        ),
        (
            products.norm_gated(choice, x.clone(), delta, norm, gate_up),
            REFERENCE.norm_gated(x.double(), delta.double(), exact, wide_gate_up),
        ),
    ):
        assert found[0].dtype == dtype
        assert found[1].dtype == torch.float32
        assert ((found[0].double() - wanted[0]).norm() / wanted[0].norm()).item() <= 2e-2
        near(found[1] / 1e5, wanted[1].float() / 1e5)
    narrow = (random(num_tokens, WIDTH) * 1e4).to(dtype)
    added = products.linear(choice, narrow, weight, dtype=torch.float32)
    assert added.dtype == torch.float32
    near(added / 1e5, REFERENCE.linear(narrow.double(), wide).float() / 1e5)
    bias = random(OUTPUTS).to(dtype)
    biased = products.linear(choice, narrow, Matrix(weight.data, bias), dtype=torch.float32)
    assert torch.equal(biased, added + bias.float()), "the same sums, and a bias that is added in float32"


@pytest.mark.parametrize("choice", [Choice("vector", rows=8, block=1024), Choice("matrix", rows=64, block=128)])
def test_a_product_of_the_default_models_widths(choice: Choice) -> None:
    x, weight = random(1, 576), Matrix(random(100, 576))
    near(Products(DEVICE).linear(choice, x, weight), REFERENCE.linear(x, weight))


@pytest.mark.parametrize("num_tokens", range(1, MOST_VECTORS + 1))
def test_a_few_vectors_are_multiplied_as_each_alone(num_tokens: int) -> None:
    """Rows may lie apart, and nothing depends on those beside."""
    choice, products = Choice("vector", rows=2, block=64, stages=2), Products(DEVICE)
    x, delta = random(num_tokens + 1, 2 * WIDTH)[:, :WIDTH], random(num_tokens + 1, WIDTH)
    norm, gate_up = Norm(random(WIDTH), 1e-5), Matrix(random(2 * OUTPUTS, WIDTH))
    together = products.norm_gated(choice, x[:num_tokens], delta[:num_tokens], norm, gate_up)
    apart = [products.norm_gated(choice, x[at : at + 1], delta[at : at + 1], norm, gate_up) for at in range(num_tokens)]
    for found, wanted in zip(together, zip(*apart, strict=True), strict=True):
        near(found, torch.cat(wanted))


def test_a_split_product_leaves_its_counters_ready() -> None:
    products, choice = Products(DEVICE), Choice("matrix", rows=16, block=16, split=3)
    weight = random(OUTPUTS, WIDTH)
    for _ in range(2):
        x = random(2, WIDTH)
        near(products.linear(choice, x, Matrix(weight)), x @ weight.T)


def test_kernels_without_measurements_compute_any_number_of_tokens() -> None:
    norm, weight = Norm(random(WIDTH), 1e-5), Matrix(random(OUTPUTS, WIDTH), random(OUTPUTS))
    gate_up = Matrix(random(2 * OUTPUTS, WIDTH))
    for num_tokens in (0, 1, 2):
        x = random(num_tokens, WIDTH)
        near(TRITON.linear(x, weight), REFERENCE.linear(x, weight))
        near(TRITON.norm_linear(x, None, norm, weight)[0], REFERENCE.norm_linear(x, None, norm, weight)[0])
        near(TRITON.norm_gated(x.clone(), x, norm, gate_up)[0], REFERENCE.norm_gated(x, x, norm, gate_up)[0])


def test_a_decoder_computes_the_same_with_either_kernels() -> None:
    config = SHAPES["tiny"]
    weights = load_weights(RandomCheckpoint(config), torch.float32, DEVICE)
    queries = Queries(
        torch.tensor([1, 2, 0], device=DEVICE),
        torch.tensor([5, 2, 0], device=DEVICE),
        torch.tensor([[0, 0], [1, 2], [3, 4]], dtype=torch.int32, device=DEVICE),
        tokens_per_row=1,
    )
    found = []
    for kernels in (REFERENCE, TRITON):
        model = family_of(config).build(config, weights, ModelParts(ReferenceAttention(), kernels, max_len=8))
        cache = CacheGroup.empty(model.keeps, 5, PAGE, dtype=torch.float32, device=DEVICE)
        hidden = model.hidden(torch.tensor([3, 4, 0], device=DEVICE), queries, cache)
        found.append(model.logits(hidden.states[:2]))
    for whole, pieces in zip(*found, strict=True):
        near(pieces, whole)


def test_a_strided_weight_goes_to_the_library() -> None:
    x, weight = random(1, WIDTH), random(WIDTH, OUTPUTS).T
    near(TRITON.linear(x, Matrix(weight)), x @ weight.T)


@pytest.mark.parametrize(("num_tokens", "kernels"), [(6, REFERENCE), (7, TRITON), (11, REFERENCE)])
def test_many_tokens_are_projected_piece_by_piece(
    num_tokens: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SHAPES["tiny"]
    weights = load_weights(RandomCheckpoint(config), torch.float32, DEVICE)
    rows, positions = torch.ones(num_tokens, dtype=torch.long, device=DEVICE), torch.arange(num_tokens, device=DEVICE)
    table = torch.tensor([[0, 0, 0], [3, 1, 2]], dtype=torch.int32, device=DEVICE)
    tokens, found = torch.arange(num_tokens, device=DEVICE) + 40, []
    for piece in (2048, 3):
        monkeypatch.setattr("phonograph.engine.models.decoder.PIECE", piece)
        model = family_of(config).build(config, weights, ModelParts(ReferenceAttention(), kernels, max_len=16))
        cache = CacheGroup.empty(model.keeps, 4, PAGE, dtype=torch.float32, device=DEVICE)
        hidden = model.hidden(tokens, Queries(rows, positions, table, tokens_per_row=None), cache)
        found.append((hidden.states, *cache.tensors))
    for whole, pieces in zip(*found, strict=True):
        near(pieces, whole)


@pytest.mark.parametrize(
    ("num_tokens", "sizes"),
    [(2049, [1152, 897]), (2304, [1152, 1152]), (4608, [1536] * 3), (6144, [2048] * 3), (8192, [2048] * 4)],
)
def test_pieces_are_few_and_alike(num_tokens: int, sizes: list[int]) -> None:
    pieces = _pieces(num_tokens)
    assert [piece.stop - piece.start for piece in pieces] == sizes
    assert pieces[-1].stop == num_tokens
