"""Kernels of rounds as a GPU runs them: the integers of the torch reference, for histories as long as contexts are."""

from __future__ import annotations

import pytest
import torch

from phonograph.devices import open_device
from phonograph.engine.ops.kernels import NewTokens
from phonograph.engine.ops.layers.rounds import ReferenceRounds
from phonograph.engine.ops.queries import Queries

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

REFERENCE = ReferenceRounds()


@pytest.mark.parametrize("depth", range(1, 8))
@pytest.mark.parametrize("num_positions", [1, 2, 100, 2048, 8200, 131_072])
@pytest.mark.parametrize("vocab", [2, 40, 151_936])
def test_rows_go_on_as_the_reference_has_it(num_positions: int, depth: int, vocab: int) -> None:
    from phonograph.engine.ops.triton.rounds import TritonRounds

    numbers = torch.Generator("cuda").manual_seed(depth * 1000 + vocab)
    num_rows, width = 33, depth + 1

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=numbers, device="cuda")

    history = drawn(0, vocab, num_rows + 1, num_positions).int()
    rows = (torch.randperm(num_rows, device="cuda") + 1) * (drawn(0, 8, num_rows) > 0)
    counts = drawn(0, width + 1, num_rows) * (rows > 0)
    starts = drawn(0, num_positions, num_rows) * (rows > 0)
    starts = torch.minimum(starts, (num_positions - 1 - counts).clamp_min(0))
    whole = torch.stack([rows, starts]).repeat_interleave(width, 1).view(2, num_rows, width)
    new = NewTokens(whole[0, :, 0], whole[1, :, 0], drawn(0, vocab, num_rows, width), counts)
    kept, found = history.clone(), history.clone()
    TritonRounds().keep(kept, new)
    drafted = TritonRounds().keep_and_continue(found, new, depth)
    assert torch.equal(drafted, REFERENCE.keep_and_continue(history, new, depth))
    for one in (kept, found):
        assert torch.equal(one[1:], history[1:]), "the null row is nobody's"


@pytest.mark.parametrize("num_rows", [1, 5, 32, 33, 256])
@pytest.mark.parametrize("width", range(1, 9))
def test_what_stays_is_what_the_reference_has(width: int, num_rows: int) -> None:
    from phonograph.engine.ops.triton.rounds import TritonRounds

    numbers = torch.Generator("cuda").manual_seed(width * 1000 + num_rows)
    rows = (torch.randperm(num_rows, device="cuda") + 1) * (torch.arange(num_rows, device="cuda") % 7 != 3)
    tokens = torch.randint(0, 3, (num_rows, width), generator=numbers, device="cuda")
    picked = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    wrong = torch.rand((num_rows, width), generator=numbers, device="cuda") < 0.2
    picked = torch.where(wrong, -1, picked)
    depth = torch.randint(0, width + 1, (num_rows + 1,), generator=numbers, device="cuda")
    starts = rows * 3
    limit = torch.arange(num_rows + 1, device="cuda") * 3 + depth.flip(0) - 1
    positions = (starts[:, None] + torch.arange(width, device="cuda")).flatten()
    table = torch.zeros((num_rows + 1, 4), dtype=torch.int32, device="cuda")
    queries = Queries(rows.repeat_interleave(width), positions, table, tokens_per_row=width)
    results = []
    for kernels in (REFERENCE, TritonRounds()):
        last_token, length = torch.full((2, num_rows + 1), 7, device="cuda").unbind(0)
        last_token[0], length[0] = 0, 0
        taken = kernels.accept(queries, tokens.flatten(), picked, (depth, limit), last_token, length)
        results.append((taken.counts, taken.block, taken.tokens, last_token, length))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_rows", [1, 5, 33, 256])
@pytest.mark.parametrize("depth", [1, 3, 4, 7])
def test_the_ends_of_rounds_are_those_of_the_reference(depth: int, num_rows: int) -> None:
    from phonograph.engine.ops.triton.rounds import TritonRounds

    rows = (torch.randperm(num_rows, device="cuda") + 1) * (torch.arange(num_rows, device="cuda") % 7 != 3)
    drafts = torch.randint(-99, 60_000, (num_rows + 1, depth), device="cuda")
    last_token, length = torch.randint(0, 49_152, (2, num_rows + 1), device="cuda").unbind(0)
    wanted, found = (k.spread(rows, drafts, last_token, length, 49_152) for k in (REFERENCE, TritonRounds()))
    for name in ("rows", "positions", "tokens"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    new, kept, other = torch.randint(-9, 49_152, (num_rows, depth), device="cuda"), drafts.clone(), drafts.clone()
    REFERENCE.keep_drafts(kept, rows, new)
    TritonRounds().keep_drafts(other, rows, new)
    assert torch.equal(kept[1:], other[1:])


def test_a_round_s_kernels_in_a_graph_follow_what_is_in_memory() -> None:
    """The search ends where memory says, which differs from replay to replay."""
    from phonograph.engine.ops.triton.rounds import TritonRounds

    history = torch.randint(0, 3, (9, 5000), device="cuda", dtype=torch.int32)
    rows = torch.arange(1, 9, device="cuda")
    starts, tokens = torch.full((8,), 4000, device="cuda"), torch.randint(0, 3, (8, 4), device="cuda")
    counts = torch.full((8,), 2, device="cuda")
    device, new = open_device("cuda"), NewTokens(rows, starts, tokens, counts)

    def body() -> torch.Tensor:
        return TritonRounds().keep_and_continue(history, new, 3)

    body()
    with device.recorder(device.new_pool()) as recorder:
        recorder.begin()
        found = body()
        graph = recorder.end()
    for _ in range(20):
        starts.random_(0, 4900)
        counts.random_(0, 5)
        history[1:].random_(0, 3)
        wanted = REFERENCE.keep_and_continue(history.clone(), new, 3)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)
