"""A head by Triton's kernels (interpreted where there is no GPU) against the torch reference, over several rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from random_head import write_random_head

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.checkpoints.draft_head import DraftCheckpoint, drafted_for
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.draft_head import DraftHead
from phonograph.engine.ops.attention.triton import TritonAttention
from phonograph.engine.ops.queries import Queries
from phonograph.engine.ops.triton.layers import TritonKernels
from phonograph.engine.ops.tuning import Tuning
from speculation import plain_llm

PAGE, WIDTH, DEPTH = 8, 3, 3
ROWS = torch.tensor([2, 1, 0, 4])
STARTS = torch.tensor([9, 3, 0, 14])
LASTS = torch.tensor([2, 0, 0, 1])
"""Of each row the last place that stays."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    folder = tmp_path_factory.mktemp("head")
    write_random_head(folder, SHAPES["tiny"], 100, torch.float32)
    return DraftCheckpoint.open(folder, SHAPES["tiny"]).load(drafted_for(plain_llm().executor.model), 64)


def drafted(head: DraftHead) -> tuple[torch.Tensor, torch.Tensor]:
    """All that stands before a round, the round, and a chain of drafts after it: their tokens, and hidden states."""
    hidden, vocab = head.config.layer.hidden, head.config.layer.vocab
    numbers = torch.Generator().manual_seed(3)
    cache = CacheGroup.empty(head.layers.keeps, 40, PAGE, dtype=torch.float32, device=torch.device("cpu"))
    table = torch.arange(40).view(5, 8).int()
    before = [(row, place) for row, start in zip(ROWS.tolist(), STARTS.tolist(), strict=True) for place in range(start)]
    rows, positions = torch.tensor(before).t().contiguous().unbind(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, vocab, (count,), generator=numbers), torch.randn(count, hidden, generator=numbers)

    head.store(*some(len(rows)), Queries(rows, positions, table, None), cache)
    places = (STARTS[:, None] + torch.arange(WIDTH)).flatten()
    q, x = head.store(*some(len(places)), Queries(ROWS.repeat_interleave(WIDTH), places, table, WIDTH), cache)
    chosen = torch.arange(len(ROWS)) * WIDTH + LASTS
    queries = Queries(ROWS, STARTS + LASTS, table, tokens_per_row=1)
    state, token = head.first(q[chosen], x[chosen], queries, cache)
    states, tokens = [state.clone()], [token]
    for _ in range(DEPTH - 1):
        queries = replace(queries, positions=queries.positions + 1)
        state, token = head.next(token, state, queries, cache)
        states.append(state.clone())
        tokens.append(token)
    return torch.stack(tokens, 1)[ROWS > 0], torch.stack(states, 1)[ROWS > 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels take no tensors of the CPU")
def test_a_chain_is_that_of_the_reference(head: DraftHead) -> None:
    kernels = TritonKernels(torch.device("cpu"), Tuning({}))
    fused = replace(head, layers=replace(head.layers, kernels=kernels, attention=TritonAttention()))
    (tokens, states), (wanted, by_reference) = drafted(fused), drafted(head)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(states, by_reference, rtol=1e-3, atol=1e-3)
    assert len(set(map(tuple, wanted.tolist()))) == len(wanted), "rows that draft the same would show nothing"


def test_queries_that_lie_apart_are_refused() -> None:
    """Kernels read them one by one: apart, each would be another row's."""
    table, apart = torch.zeros(5, 8).int(), torch.arange(8).view(4, 2)[:, 0]
    with pytest.raises(ValueError, match=r"rows lie 2 numbers apart, and kernels take them one by one"):
        Queries(apart, torch.arange(4), table, tokens_per_row=1)
    with pytest.raises(ValueError, match="positions lie 2 numbers apart"):
        Queries(torch.arange(4), apart, table, tokens_per_row=1)
    assert Queries(apart[:1], apart[:1], table, tokens_per_row=1).rows.tolist() == [0], "one stands alone"
