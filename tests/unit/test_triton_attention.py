"""The Triton kernel's own ways: splits and their merge, tiles, padding, poison, strides. Interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged import DEVICE, LAUNCHES, Case, Heads, by_hand, case_of, poison_dead, spans_of

pytest.importorskip("triton")

from phonograph.devices import Hardware
from phonograph.engine.kernel_selection import default_overlap
from phonograph.engine.ops.attention.launch_config import HOPPER, PLAIN, Launch, Launches, launches_for, pick
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.attention.triton import TritonAttention
from phonograph.engine.ops.kernels import Angles, Norm, RotatingAttention
from phonograph.engine.ops.kernels import Heads as KernelHeads
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.engine.ops.queries import Queries, Scores
from phonograph.engine.ops.tuning import Overlap


def attention(
    block_m: int = 16, block_n: int = 16, programs: int = 1, part_keys: int = 0, *, apart: bool = False
) -> TritonAttention:
    """With small blocks, so that short sequences have many."""
    launch = Launch(1 << 30, block_m, block_n, 4, 2, programs, part_keys, apart=apart)
    return TritonAttention(Launches((launch,), (launch,)))


def is_right(case: Case, found: torch.Tensor, window: int | None = None) -> None:
    torch.testing.assert_close(found.double(), by_hand(case, 0, window), rtol=1e-4, atol=1e-4)


def rowwise(queries: Queries) -> Queries:
    """The same, with the positions in a table of all rows."""
    lengths = torch.full((queries.table.shape[0],), 3, device=DEVICE)
    lengths[queries.rows] = queries.positions
    return replace(queries, positions=lengths, by_row=True)


RAGGED = spans_of((0, 1), (15, 1), (16, 1), (70, 1))
"""One key, one full block, one key more than a block, several blocks."""


class TestDecode:
    @pytest.mark.parametrize("window", [None, 1, 20])
    @pytest.mark.parametrize("splits", [1, 2, 4, 8])
    def test_parts_of_ragged_lengths_merge(self, splits: int, window: int | None) -> None:
        case = case_of(RAGGED, Heads(2, 1, 16), decode=True)
        is_right(case, case.run(attention(programs=splits * 4), 0, window), window)

    @pytest.mark.parametrize("heads", [Heads(2, 2, 64), Heads(3, 1, 64), Heads(4, 1, 128), Heads(8, 1, 128)], ids=str)
    def test_any_group_of_heads(self, heads: Heads) -> None:
        case = case_of(RAGGED, heads, decode=True)
        is_right(case, case.run(attention(programs=4 * 4 * heads.kv)))

    @pytest.mark.parametrize("page_size", [8, 16, 64])
    def test_any_page_size(self, page_size: int) -> None:
        case = case_of(RAGGED, Heads(4, 2, 16), decode=True, page_size=page_size)
        is_right(case, case.run(attention(programs=2 * 4 * 2)))

    @pytest.mark.parametrize("part_keys", [16, 32, 64, 128])
    def test_parts_of_a_least_size(self, part_keys: int) -> None:
        case = case_of(RAGGED, Heads(2, 1, 16), decode=True)
        is_right(case, case.run(attention(programs=8 * 4, part_keys=part_keys)))

    def test_counters_are_zero_again_for_the_next_layer(self) -> None:
        case = case_of(RAGGED, Heads(4, 2, 16), decode=True)
        step = attention(programs=4 * 4 * 2).prepare(case.cache, case.queries, 4)
        once, twice = step.attend(0, case.q, None), step.attend(0, case.q, None)
        assert torch.equal(once, twice)
        is_right(case, twice)

    def test_padding_reads_as_zero(self) -> None:
        case = case_of(RAGGED, Heads(4, 2, 16), decode=True, padding=4)
        step = attention(programs=2 * 8 * 2).prepare(case.cache, case.queries, 4)
        out = step.attend(0, case.q, None)
        assert torch.count_nonzero(out[case.used :]) == 0
        is_right(case, out[: case.used])


MANY = spans_of((9, 1), (0, 17), (30, 1), (5, 3), (0, 4), (33, 9))
"""Decode rows, full and started tiles, and cached prefixes."""


class TestPrefill:
    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize(("block_m", "programs"), [(16, 1), (64, 1), (16, 60), (64, 60)])
    def test_sequences_of_all_kinds_share_a_step(self, block_m: int, programs: int, window: int | None) -> None:
        case = case_of(MANY, Heads(4, 1, 16), padding=5)
        is_right(case, case.run(attention(block_m, programs=programs), 0, window), window)

    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize("block_m", [16, 64])
    def test_blocks_without_masks_have_a_loop_of_their_own(self, block_m: int, window: int | None) -> None:
        case = case_of(MANY, Heads(4, 1, 16), padding=5)
        poison_dead(case, float("nan"))
        is_right(case, case.run(attention(block_m, apart=True), 0, window), window)

    @pytest.mark.parametrize("programs", [1, 60])
    @pytest.mark.parametrize("decode", [False, True])
    def test_sinks_are_seen_once_however_many_parts_there_are(self, decode: bool, programs: int) -> None:
        case = case_of(RAGGED if decode else MANY, Heads(3, 1, 16), padding=2, decode=decode)
        scores = Scores(0.4, 2.0, torch.tensor([1.0, -3.0, 5.0], device=DEVICE))
        found = case.run(attention(16, programs=programs), 0, None, scores)
        torch.testing.assert_close(found.double(), by_hand(case, 0, None, scores), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("heads", [Heads(2, 2, 64), Heads(3, 1, 64), Heads(8, 1, 128)], ids=str)
    def test_any_group_of_heads(self, heads: Heads) -> None:
        case = case_of(spans_of((20, 9), (0, 3)), heads)
        is_right(case, case.run(attention(32)))

    def test_more_heads_than_rows_of_a_tile(self) -> None:
        case = case_of(spans_of((20, 3), (4, 1)), Heads(32, 1, 16))
        is_right(case, case.run(attention(16)))

    def test_padding_reads_as_zero(self) -> None:
        case = case_of(spans_of((2, 6)), Heads(4, 2, 16), padding=23)
        out = attention().prepare(case.cache, case.queries, 4).attend(0, case.q, None)
        assert torch.count_nonzero(out[case.used :]) == 0

    def test_nothing_but_padding(self) -> None:
        case = case_of(spans_of((0, 1)), Heads(4, 2, 16), padding=8)
        nobody = replace(case.queries, rows=torch.zeros_like(case.queries.rows))
        out = attention().prepare(case.cache, nobody, 4).attend(0, case.q, None)
        assert torch.count_nonzero(out) == 0


@pytest.mark.parametrize("decode", [True, False])
class TestWhatMustNotMatter:
    def spans(self, decode: bool) -> Case:
        return case_of(RAGGED if decode else MANY, Heads(4, 1, 16), padding=6, decode=decode)

    def test_poison_in_padding_and_dead_pages(self, decode: bool) -> None:
        case = self.spans(decode)
        attend = attention(programs=2 * 10 if decode else 1)
        clean = case.run(attend)
        poison_dead(case, float("nan"))
        case.q[case.used :] = float("nan")
        assert torch.equal(case.run(attend), clean)

    def test_how_much_padding_there_is(self, decode: bool) -> None:
        case = self.spans(decode)
        queries, short = case.queries, case.used + 1
        less = replace(
            case,
            queries=replace(queries, rows=queries.rows[:short], positions=queries.positions[:short]),
            q=case.q[:short],
        )
        assert torch.equal(case.run(attention()), less.run(attention()))

    def test_how_q_lies_in_memory(self, decode: bool) -> None:
        case = self.spans(decode)
        wide = torch.randn(case.q.shape[0], 8, 16, device=case.q.device)
        wide[:, 2:6] = case.q
        assert torch.equal(replace(case, q=wide[:, 2:6]).run(attention()), case.run(attention()))

    def test_how_wide_the_table_is(self, decode: bool) -> None:
        case = self.spans(decode)
        table = torch.cat([case.queries.table, torch.full_like(case.queries.table, 1)], 1)[:, :-3]
        assert torch.equal(
            replace(case, queries=replace(case.queries, table=table)).run(attention()), case.run(attention())
        )


def test_no_tokens_at_all() -> None:
    case = case_of(spans_of((0, 1)), Heads(4, 2, 16))
    none = replace(case.queries, rows=case.queries.rows[:0], positions=case.queries.positions[:0])
    for given in (none, replace(none, tokens_per_row=1)):
        assert attention().prepare(case.cache, given, 4).attend(0, case.q[:0], None).shape == (0, 4, 16)


def test_triton_agrees_with_the_reference_on_its_default_launches() -> None:
    case = case_of(spans_of((3, 20), (50, 1), (0, 2)), Heads(9, 3, 64), padding=2, page_size=16)
    torch.testing.assert_close(
        case.run(TritonAttention(LAUNCHES)), case.run(ReferenceAttention()), rtol=1e-4, atol=1e-4
    )


class TestLaunches:
    def test_splits_depend_on_the_bucket_and_fill_the_device(self) -> None:
        launch = replace(PLAIN.decode[0], programs=512)
        assert [launch.splits(seqs, 8) for seqs in (1, 2, 8, 32, 64, 256)] == [64, 32, 8, 2, 1, 1]

    def test_splits_are_bounded(self) -> None:
        assert replace(PLAIN.decode[0], programs=1 << 20).splits(1, 1) == 64

    def test_they_are_those_of_the_chips_generation(self) -> None:
        assert launches_for(Hardware("NVIDIA H200", (9, 0))) is HOPPER
        assert launches_for(Hardware("NVIDIA A100", (8, 0))) is PLAIN
        assert launches_for(Hardware("AMD Instinct MI300X")) is PLAIN
        assert launches_for(Hardware("cpu")) is PLAIN

    @pytest.mark.parametrize(
        ("hardware", "overlap"),
        [
            (("H200", (9, 0)), "early"),
            (("B200", (10, 0)), "early"),
            (("A100", (8, 0)), "none"),
            (("cpu", None), "none"),
        ],
    )
    def test_kernels_overlap_from_hopper_on(
        self, hardware: tuple[str, tuple[int, int] | None], overlap: Overlap
    ) -> None:
        assert default_overlap(Hardware(*hardware)) == overlap

    @pytest.mark.parametrize("launches", [HOPPER, PLAIN])
    def test_every_bucket_has_a_launch_and_they_are_in_order(self, launches: Launches) -> None:
        for known in (launches.decode, launches.prefill):
            assert [entry.max_tokens for entry in known] == sorted(entry.max_tokens for entry in known)
            assert pick(known, 1 << 20, 256) == known[-1]
            assert pick(known, 1, 256) == known[0]

    def test_wide_keys_get_smaller_blocks(self) -> None:
        wide = pick(HOPPER.prefill, 4096, 512)
        plain = pick(HOPPER.prefill, 4096, 256)
        assert wide.block_m * wide.block_n < plain.block_m * plain.block_n


class TestRotating:
    """One launch against the torch reference's two, with the same projections."""

    @pytest.mark.parametrize("window", [None, 1, 20])
    @pytest.mark.parametrize("splits", [1, 4])
    @pytest.mark.parametrize(("normed", "by_row"), [(False, True), (True, False), (True, True)])
    @pytest.mark.parametrize("heads", [Heads(2, 1, 16), Heads(6, 2, 24)], ids=str)
    def test_as_rotating_and_attending_apart(
        self, heads: Heads, by_row: bool, normed: bool, splits: int, window: int | None
    ) -> None:
        case, angles = case_of(RAGGED, heads, decode=True, padding=2), rope(100, heads.dim)
        norms = [Norm(torch.rand(heads.dim, device=DEVICE) + 0.5, 1e-6) if normed else None for _ in range(2)]
        layout = KernelHeads(heads.queries, heads.kv, heads.dim, *norms)
        qkv = torch.randn(case.q.shape[0], (heads.queries + 2 * heads.kv) * heads.dim, device=DEVICE)
        other = replace(case.cache, keys=case.cache.keys.clone(), values=case.cache.values.clone())
        reference = ReferenceKernels()
        nothing, nobody = torch.zeros(1, 1, device=DEVICE), torch.zeros_like(case.queries.rows)
        _, places = reference.embed_tokens(nothing, nobody, angles, case.queries, case.cache.page_size, torch.float32)
        q = reference.rotate_and_store(qkv, layout, places, other, 1)
        wanted = ReferenceAttention().prepare(other, case.queries, heads.queries).attend(1, q, window)
        own = case.queries.table[case.queries.rows[: case.used], case.queries.positions[: case.used] // 4].long()
        case.cache.keys[1, own, case.queries.positions[: case.used] % 4] = float("nan")  # written, never read
        queries = rowwise(case.queries) if by_row else case.queries
        step = attention(programs=splits * 6 * heads.kv).prepare(case.cache, queries, heads.queries)
        assert isinstance(step, RotatingAttention)
        found = step.rotate_and_attend(1, qkv, layout, places, window)
        torch.testing.assert_close(found[: case.used], wanted[: case.used], rtol=1e-4, atol=1e-4)
        assert found.isfinite().all()
        torch.testing.assert_close(case.cache.keys[:, 1:], other.keys[:, 1:], rtol=1e-5, atol=1e-5)
        assert torch.equal(case.cache.values[:, 1:], other.values[:, 1:]), "the null page is padding's alone"

    @pytest.mark.parametrize("splits", [1, 4])
    def test_many_sequences_are_found_by_row_too(self, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phonograph.engine.ops.attention.triton._MOST_ROTATED", 0)
        case = case_of(RAGGED, Heads(6, 2, 24), decode=True, padding=2)
        step = attention(programs=splits * 12).prepare(case.cache, rowwise(case.queries), 6)
        assert not isinstance(step, RotatingAttention)
        is_right(case, step.attend(0, case.q, None)[: case.used])

    def test_by_row_means_one_token_of_each(self) -> None:
        case = case_of(spans_of((0, 5)), Heads(2, 1, 16))
        with pytest.raises(ValueError, match="one position for each row"):
            replace(case.queries, by_row=True)

    def test_a_prefill_step_does_not(self) -> None:
        case = case_of(spans_of((0, 5)), Heads(2, 1, 16))
        assert not isinstance(attention().prepare(case.cache, case.queries, 2), RotatingAttention)


def rope(num_positions: int, dim: int) -> Angles:
    angle = torch.rand(num_positions, dim // 2, device=DEVICE).repeat(1, 2) * 6
    signs = torch.tensor([-1.0, 1.0], device=DEVICE).repeat_interleave(dim // 2)
    return Angles(angle.cos(), angle.sin() * signs)
