"""Models: taps, embeddings as inputs, copies with another attention, the table of tensors."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import phonograph
from phonograph.engine.cache.groups import CacheGroup, Paged, PagedCache
from phonograph.engine.checkpoints.loading import load_model, load_weights
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models import dense
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.models.registry import ARCHITECTURES, family_of
from phonograph.engine.models.tensors import ModelTensor, allocate
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.kernels import Heads, Kernels
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.matrix import Matrix
from phonograph.engine.ops.queries import PLAIN, Queries, Scores, StepAttention

CPU = torch.device("cpu")
TINY = replace(SHAPES["tiny"], num_layers=4)
TOKENS = torch.tensor([5, 9, 200, 7, 31, 8])
PAGE = 4


def decoder_of(kernels: Kernels | None = None, residual: torch.dtype | None = None) -> Decoder:
    parts = ModelParts(ReferenceAttention(), kernels or ReferenceKernels(), 64, residual)
    return dense.build(TINY, load_weights(RandomCheckpoint(TINY, 3), torch.float32, CPU), parts)


def queries_of(count: int, start: int = 0, *, by_row: bool = False) -> Queries:
    table = torch.tensor([[0] * 4, [2, 1, 4, 3]], dtype=torch.int32)
    if by_row:
        return Queries(torch.tensor([1]), torch.tensor([0, start]), table, tokens_per_row=1, by_row=True)
    return Queries(torch.ones(count, dtype=torch.int64), torch.arange(start, start + count), table, False)


def cache_of(model: Model) -> CacheGroup:
    return CacheGroup.empty(model.keeps, 5, PAGE, dtype=model.dtype, device=CPU)


class TestTaps:
    def test_a_tap_is_what_a_shorter_model_norms_at_its_end(self) -> None:
        model = decoder_of()
        found = model.hidden(TOKENS, queries_of(6), cache_of(model), taps=(2, 0))
        for layer, tapped in zip((2, 0), found.taps, strict=True):
            short = replace(model, weights=replace(model.weights, layers=model.weights.layers[: layer + 1]))
            wanted = short.hidden(TOKENS, queries_of(6), cache_of(short)).states
            assert torch.equal(model.kernels.add_norm(tapped, None, model.weights.norm)[0], wanted)

    def test_taps_are_of_all_tokens_and_change_nothing(self) -> None:
        model, wanted = decoder_of(), torch.tensor([5])
        plain, tapped = (
            model.hidden(TOKENS, queries_of(6), cache_of(model), wanted=wanted, taps=taps) for taps in ((), (0, 1, 3))
        )
        assert torch.equal(plain.states, tapped.states)
        assert (plain.taps, len(tapped.taps)) == ((), 3)
        assert all(tap.shape == (6, TINY.hidden) for tap in tapped.taps)

    def test_a_tap_stays_as_it_was_when_later_layers_change_x_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = decoder_of()
        whole = model.hidden(TOKENS, queries_of(6), cache_of(model), taps=(1,)).taps[0]
        monkeypatch.setattr("phonograph.engine.models.decoder.PIECE", 4)
        pieces = model.hidden(TOKENS, queries_of(6), cache_of(model), taps=(1,)).taps[0]
        torch.testing.assert_close(pieces, whole)


class TestEmbeddings:
    @pytest.mark.parametrize("piece", [2048, 4])
    def test_embeddings_give_what_their_tokens_give(self, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phonograph.engine.models.decoder.PIECE", piece)
        model = decoder_of()
        caches = cache_of(model), cache_of(model)
        given = model.weights.embedding[TOKENS]
        before = given.clone()
        states = [
            model.hidden(inputs, queries_of(6), cache).states
            for inputs, cache in zip((TOKENS, given), caches, strict=True)
        ]
        assert torch.equal(*states)
        assert all(map(torch.equal, caches[0].tensors, caches[1].tensors))
        assert torch.equal(given, before), "what was given is not the model's to change"

    def test_by_row_they_are_those_of_the_step(self) -> None:
        model = decoder_of()
        caches = cache_of(model), cache_of(model)
        table = torch.tensor([0, 77])
        for cache in caches:
            model.hidden(TOKENS, queries_of(6), cache)
        tokens = model.hidden(table, queries_of(1, 6, by_row=True), caches[0]).states
        embedded = model.hidden(model.weights.embedding[[77]], queries_of(1, 6, by_row=True), caches[1]).states
        assert torch.equal(tokens, embedded)


def test_layers_may_differ_in_their_kv_heads() -> None:
    """A layer with half the KV heads is one whose pairs of KV heads are equal."""
    model, dim = decoder_of(), TINY.head_dim
    layer = model.weights.layers[1]
    q, kv = TINY.num_heads * dim, TINY.num_kv_heads * dim
    qkv = layer.qkv.data
    k, v = qkv[q : q + dim], qkv[q + kv : q + kv + dim]
    few = Heads(TINY.num_heads, 1, dim, None, None)
    narrow = replace(layer, qkv=Matrix(torch.cat([qkv[:q], k, v])), heads=few)
    wide = replace(layer, qkv=Matrix(torch.cat([qkv[:q], k, k, v, v])))
    states = []
    for one in (narrow, wide):
        layers = (model.weights.layers[0], one, *model.weights.layers[2:])
        mixed = replace(model, weights=replace(model.weights, layers=layers))
        cache = cache_of(mixed)
        mixed.hidden(TOKENS, queries_of(6), cache)
        states.append(mixed.hidden(torch.tensor([0, 3]), queries_of(1, 6, by_row=True), cache).states)
        assert mixed.keeps[1] == Paged(one.heads.num_kv_heads, dim)
    torch.testing.assert_close(*states)


class Silent:
    """Attention that sees nothing."""

    name = "silent"

    def prepare(self, cache: PagedCache, queries: Queries, num_heads: int) -> StepAttention:
        return self

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> torch.Tensor:
        return torch.zeros_like(q)


def test_a_copy_shares_weights_and_has_another_attention() -> None:
    model = decoder_of()
    copy = model.with_attention(Silent())
    assert (copy.attention.name, model.attention.name) == ("silent", "reference")
    assert copy.weights is model.weights
    assert copy.rope is model.rope
    assert not torch.equal(*(m.hidden(TOKENS, queries_of(6), cache_of(m)).states for m in (model, copy)))
    kernels = ReferenceKernels(("others",))
    assert model.with_kernels(kernels).kernels is kernels


class TestTable:
    @pytest.mark.parametrize("name", SHAPES)
    def test_names_and_gguf_names_are_unique(self, name: str) -> None:
        table = family_of(SHAPES[name]).tensors(SHAPES[name])
        assert len({tensor.name for tensor in table}) == len({tensor.gguf for tensor in table}) == len(table)

    def test_every_stored_tensor_lies_in_its_place_and_nothing_is_left_over(self) -> None:
        config = replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
        made = allocate(dense.tensors(config), torch.float32, CPU)
        for number, part in enumerate(made.parts.values(), 1):
            part.fill_(number)
        matrices = made.weights.matrices
        wholes = {**made.weights.tensors, **{place: matrix.data for place, matrix in matrices.items()}}
        wholes |= {f"{place} bias": matrix.bias for place, matrix in matrices.items() if matrix.bias is not None}
        spans = {place: list(dict.fromkeys(weight.flatten().tolist())) for place, weight in wholes.items()}
        assert len(spans["layers.0.qkv"]) == len(spans["layers.0.qkv bias"]) == 3
        assert len(spans["layers.0.gate_up bias"]) == 2
        assert len(spans["layers.1.out bias"]) == len(spans["layers.1.down bias"]) == 1
        assert len(spans["layers.3.gate_up"]) == 2
        assert sum(map(len, spans.values())) == len(made.parts), "every element belongs to one tensor"
        assert made.parts["model.layers.2.self_attn.k_proj.weight"].shape == (32, 64)

    def test_a_tied_head_is_the_embedding_itself(self) -> None:
        made = allocate(dense.tensors(replace(TINY, tied_embeddings=True)), torch.float32, CPU)
        assert made.weights.matrices["head"].data is made.weights.tensors["embedding"]

    def test_tensors_that_do_not_stack_are_refused(self) -> None:
        rows = [ModelTensor("a", "both", (2, 3)), ModelTensor("b", "both", (2, 4))]
        with pytest.raises(ValueError, match="differ in more than their rows"):
            allocate(rows, torch.float32, CPU)

    def test_a_bias_without_its_matrix_is_refused(self) -> None:
        with pytest.raises(ValueError, match="a bias and no matrix"):
            allocate([ModelTensor("a", "one", (2, 3)), ModelTensor("b", "one", (2,), "bias")], torch.float32, CPU)

    def test_loading_prepares_every_matrix(self) -> None:
        class Numbering(ReferenceKernels):
            count = 0

            def prepare(self, matrix: Matrix) -> Matrix:
                self.count += 1
                return replace(matrix, prepared=self.count)

        parts = ModelParts(ReferenceAttention(), Numbering(), 8)
        model = load_model(RandomCheckpoint(TINY), parts, torch.float32, CPU)
        assert [matrix.prepared for matrix in model.matrices] == list(range(1, 4 * TINY.num_layers + 2))
        assert {matrix.stored for matrix in model.matrices} == {("random",)}

    def test_a_matrix_knows_the_formats_of_its_parts(self) -> None:
        config = replace(TINY, tied_embeddings=True)
        layer = "model.layers.1.self_attn"
        stored = {f"{layer}.q_proj.weight": "Q4_K", f"{layer}.k_proj.weight": "Q4_K", f"{layer}.v_proj.weight": "Q6_K"}
        stored["model.embed_tokens.weight"] = "Q8_0"
        matrices = allocate(dense.tensors(config), torch.float32, CPU, stored).weights.matrices
        assert matrices["layers.1.qkv"].stored == ("Q4_K", "Q6_K")
        assert matrices["head"].stored == ("Q8_0",), "a tied head is stored as the embedding is"
        assert matrices["layers.0.qkv"].stored == ()


def test_nobody_but_its_family_constructs_a_decoder() -> None:
    package = Path(phonograph.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Decoder"
    }
    assert found == {"engine/models/dense.py"}


def test_every_architecture_is_read_by_its_model_type() -> None:
    assert len({entry.model_type for entry in ARCHITECTURES.values()}) == len(ARCHITECTURES)
