"""Columns and request tables: what a declaration refuses, the ends of domains, and what costs a transfer."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph import DeclarationError, Device, EmulatedDevice
from phonograph.engine.requests.request import MAX_BIASED, Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Chunk, ScheduledStep
from phonograph.engine.sampling.masks import mask
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.state.column import Access, Column, Form, Group, TableSizes, TrialRows, Width, Writer
from phonograph.engine.state.columns import CONSTRAINED, MASKS, PENALISED, PENALTIES, PLACE
from phonograph.engine.state.tables import RequestTables
from phonograph.engine.state.updates import UpdateBuilder

COLUMNS = (*PLACE, *TorchSampler.columns, *PENALTIES, *MASKS)
SIZES = TableSizes(max_seqs=4, vocab=300, max_pages=8)


def sequence(row: int, prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> Sequence:
    request = Request(f"of row {row}", prompt, SamplingParams(**params))
    return Sequence(request, 0, 8, frozenset(), (0, 0, 0.0, 0), row=row)


def entry(*sequences: Sequence, pages: tuple[tuple[int, int, int], ...] = ()) -> ScheduledStep:
    chunks = tuple(Chunk(one, 0, one.known(), True, True) for one in sequences)
    return ScheduledStep(1, (), chunks, pages, pass_name="prefill")


class Engine:
    """Tables with their host side."""

    def __init__(self, device: Device, sizes: TableSizes = SIZES, columns: tuple[Column, ...] = COLUMNS) -> None:
        self.tables = RequestTables(device, columns, sizes)
        self.builder = UpdateBuilder(columns, sizes)

    def run(self, step: ScheduledStep) -> int:
        """How many transfers the step's updates took."""
        before, updates = self.tables.counts.transfers, self.builder.build(step)
        if updates is not None:
            self.tables.apply(pickle.loads(pickle.dumps(updates)))  # plain data: it may come from another process
        counts = self.tables.counts
        assert counts.grouped == counts.plain == 0
        return counts.transfers - before


class Words:
    """A grammar of one mask."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def mask(self) -> Any:
        return self.words

    def accept(self, token: int) -> None:
        """Nothing to follow."""


def test_everything_that_the_host_writes_goes_over_in_one_transfer(device: Device) -> None:
    engine = Engine(device)
    engine.tables.make_all()
    constrained = sequence(3, presence_penalty=1.0)
    constrained.constraint = Words(np.full(10, 5, dtype=np.int32))
    others = [sequence(1, logit_bias={7: 1.0, 8: -1.0}), sequence(2, temperature=0.5), constrained]
    assert engine.run(entry(*others, pages=((1, 0, 3), (4, 7, 9)))) == 1
    assert engine.tables.pages[4, 7] == 9
    assert engine.tables["bias_ids"][1, :3].tolist() == [7, 8, 0]
    assert engine.tables["allowed"][1:4, 0].tolist() == [-1, -1, 5]
    assert engine.run(ScheduledStep(2, tuple(others), (), (), pass_name="decode")) == 1  # the mask
    assert engine.run(ScheduledStep(3, tuple(others[:2]), (), (), pass_name="decode")) == 0


class Ops(TorchDispatchMode):
    """The names of all ops, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 4])
def test_an_entry_costs_a_transfer_a_reset_and_three_copies(count: int) -> None:
    """Nothing else, once a step of that shape was there: every op is a launch, or a few microseconds of the host."""
    engine = Engine(EmulatedDevice())
    for temperature in (0.5, 0.25):
        entered = [sequence(row, temperature=temperature, top_k=row) for row in range(1, count + 1)]
        with torch.inference_mode(), Ops() as ops:
            engine.run(entry(*entered, pages=((1, 0, 3), (1, 1, 4))))
        assert engine.tables["temperature"][1 : count + 1].tolist() == [temperature] * count
        assert engine.tables["top_k"][1 : count + 1].tolist() == list(range(1, count + 1))
    assert ops.names == ["copy_", "index_fill_", "index_copy_", "index_copy_", "index_copy_"]


def test_what_is_kept_of_a_shape_stands_no_longer_when_the_block_has_grown(device: Device) -> None:
    engine = Engine(device, TableSizes(4, 300, 5000))
    engine.run(entry(sequence(1, seed=1), pages=((1, 0, 3),)))
    engine.run(entry(sequence(2, seed=2), pages=tuple((2, index, index + 1) for index in range(5000))))
    engine.run(entry(sequence(3, seed=3, top_p=0.5), pages=((3, 4999, 9),)))
    assert engine.tables.pages[2].tolist() == list(range(1, 5001))
    assert engine.tables.pages[3].nonzero().tolist() == [[4999]]
    assert engine.tables["seed"].tolist() == [0, *(sequence(row, seed=row).noise_seed for row in (1, 2, 3)), 0]
    assert engine.tables["top_p"].tolist() == [1, 1, 1, 0.5, 1]


def test_more_shapes_than_are_kept(device: Device) -> None:
    engine = Engine(device, TableSizes(4, 300, 600))
    for count in (*range(1, 600), *range(1, 30)):
        engine.run(entry(sequence(1), pages=tuple((1, index, count) for index in range(count))))
    assert engine.tables.pages[1].tolist() == [29] * 29 + [0] * 571


def test_columns_that_lie_together_keep_their_types(device: Device) -> None:
    kinds = [torch.int64, torch.float64, torch.int32, torch.float32, torch.int16, torch.float16, torch.int8, torch.bool]
    columns = [Column(f"c{at}", kind, default=1, value=one) for at, kind in enumerate(kinds)]
    columns += [Column(f"d{at}", kind, value=lambda entry: entry.sequence.row % 2) for at, kind in enumerate(kinds)]
    engine = Engine(device, columns=(*PLACE, *columns))
    assert engine.run(entry(sequence(1), sequence(4))) == 1
    for at, kind in enumerate(kinds):
        assert engine.tables[f"c{at}"].dtype == engine.tables[f"d{at}"].dtype == kind
        assert engine.tables[f"c{at}"].tolist() == [1] * 5
        assert engine.tables[f"d{at}"].tolist() == [0, 1, 0, 0, 0]


def test_state_of_those_who_ask_is_reset_though_nothing_is_sent(device: Device) -> None:
    drafted = Group("drafts", lambda sequence: sequence.request.params.top_k == 1)
    state = Column("state", torch.float32, width=3, writer=Writer.GRAPH, form=Form.RESET, group=drafted)
    engine = Engine(device, columns=(*PLACE, state))
    engine.tables["state"].fill_(7)
    engine.run(entry(sequence(1), sequence(2, top_k=1)))
    assert engine.tables["state"][:, 0].tolist() == [7, 7, 0, 7, 7]


def test_who_asks_for_nothing_pays_nothing_for_wide_columns(device: Device) -> None:
    engine = Engine(device)
    updates = engine.builder.build(entry(sequence(1), sequence(2)))
    assert updates is not None
    assert {write.group for write in updates.writes} == {"request tables"}
    engine.run(entry(sequence(1), sequence(2)))
    assert not engine.tables.is_made(PENALISED)
    assert not engine.tables.is_made(CONSTRAINED)


def test_most_biases_in_the_last_row(device: Device) -> None:
    engine, biases = Engine(device), {token: token / 4 - 30 for token in range(MAX_BIASED)}
    engine.run(entry(sequence(4, logit_bias=biases)))
    assert engine.tables["bias_ids"][4].tolist() == list(biases)
    assert engine.tables["bias"][4].tolist() == list(biases.values())
    engine.run(entry(sequence(4)))
    assert not engine.tables["bias"].any()
    assert not engine.tables["bias_ids"].any()


def test_counts_stop_at_the_most_that_they_hold(device: Device) -> None:
    engine, again = Engine(device), sequence(2, (0, 0, 0, 299, 299), frequency_penalty=1.0)
    again.outputs = [299] * 40_000 + [0]
    engine.run(entry(again))
    assert engine.tables["counts"][2, 299] == 2**15 - 1
    assert engine.tables["counts"][2, 0] == 1
    assert engine.tables["counts"].sum() == 2**15
    assert engine.tables["prompted"].nonzero().tolist() == [[2, 0], [2, 299]]


@pytest.mark.parametrize("vocab", [151_936, 151_937, 33])
@pytest.mark.parametrize("words", [-1, 0, 1])
def test_masks_of_a_whole_vocabulary(vocab: int, words: int) -> None:
    """By masks of a word less, as many, and a word more than the model has."""
    engine = Engine(EmulatedDevice(), TableSizes(3, vocab, 2))
    width = -(-vocab // 32)
    bits = np.random.default_rng(0).integers(0, 2, size=32 * (width + words)).astype(bool)
    held = sequence(3)
    held.constraint = Words(np.packbits(bits, bitorder="little").view(np.int32))
    assert engine.run(entry(held)) == 1
    logits = mask(torch.zeros(2, vocab), engine.tables["allowed"][torch.tensor([3, 1])])
    wanted = np.zeros(vocab, dtype=bool)
    wanted[: len(bits)] = bits[:vocab]
    assert torch.equal(logits[0].isfinite(), torch.from_numpy(wanted))
    assert logits[1].isfinite().all()


def test_a_value_beyond_its_row_is_refused_before_anything_is_written() -> None:
    engine = Engine(EmulatedDevice())
    with pytest.raises(DeclarationError, match="'prompted' is 300 wide and has no place 300"):
        engine.run(entry(sequence(1, (300,), presence_penalty=1.0), pages=((1, 0, 5),)))
    assert not engine.tables.pages.any()


def test_a_reset_without_values_reaches_the_rows_that_are_entered(device: Device) -> None:
    """State that forward passes alone write, as a recurrent one."""
    state = Column("state", torch.float32, default=2, width=3, writer=Writer.GRAPH, form=Form.RESET)
    engine = Engine(device, columns=(*PLACE, state))
    engine.tables["state"].fill_(7)
    engine.run(entry(sequence(1), sequence(4)))
    assert engine.tables["state"][:, 0].tolist() == [7, 2, 7, 7, 2]


def test_trial_values_stay_in_their_rows_and_leave_again(device: Device) -> None:
    tables = Engine(device).tables
    tables.make_all()
    before = {column.name: tables[column.name].clone() for column in COLUMNS}
    trial = TrialRows(3, SIZES.vocab, 16, 1, 31, torch.Generator().manual_seed(0))
    with tables.kept(3):
        for part, value in tables.trial_values(trial):
            part.copy_(value)
        assert tables.pages[:, :3].tolist() == [[0, 0, 0], [1, 2, 0], [1, 3, 0], [1, 4, 0], [0, 0, 0]]
        assert ((tables.length[1:4] >= 16) & (tables.length[1:4] < 32)).all()
        for column in COLUMNS:
            for untouched in (0, 4):
                assert torch.equal(tables[column.name][untouched], before[column.name][untouched])
    for column in COLUMNS:
        assert torch.equal(tables[column.name], before[column.name])


@dataclass(frozen=True)
class _Gathered:
    temperature: torch.Tensor
    pages: torch.Tensor


def test_what_kernels_index_by_row_is_not_gathered() -> None:
    with pytest.raises(DeclarationError, match="'pages' is no column that is gathered"):
        Engine(EmulatedDevice()).tables.gather(_Gathered, torch.tensor([1]))


def one(entry: object) -> int:
    return 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "min p"}, "no name"),
    ({"dtype": torch.bfloat16}, "numpy can't write"),
    ({"width": 0}, "0 wide"),
    ({"width": Width.BITS}, "packed into int32"),
    ({"form": Form.ROW | Form.PAIRS, "width": 4}, "two forms"),
    ({"writer": Writer.ENTRY | Writer.STEP}, "Take one"),
    ({"form": Form.PAIRS}, "no places for pairs"),
    ({"writer": Writer.GRAPH}, "nobody writes from"),
    ({"writer": Writer.GRAPH, "value": None}, "what the last one left.*Form.RESET"),
    ({"writer": Writer(0), "value": None}, "has no writer"),
    ({"form": Form.PAIRS, "width": 4}, r"PAIRS \| RESET"),
    ({"form": Form.PAIRS, "width": 4, "writer": Writer.STEP}, r"PAIRS \| RESET"),
    ({"width": 2.0}, "2.0 wide. Give it a whole number"),
    ({"width": True}, "True wide. Give it a whole number"),
    ({"dtype": torch.int32, "default": 0.9}, "default 0.9, which torch.int32 can't hold"),
    ({"dtype": torch.int32, "default": float("inf")}, "default inf, which torch.int32 can't hold"),
    ({"dtype": torch.uint8, "default": -1}, "default -1, which torch.uint8 can't hold"),
    ({"dtype": torch.bool, "default": 2}, "default 2, which torch.bool can't hold"),
    ({"dtype": torch.float16, "default": 1e5}, "100000.0, which torch.float16 can't hold"),
    ({"default": None}, "default None"),
    ({"value": None}, "say from what"),
    ({"changes": lambda step: (), "value": None}, "they are pairs, written by STEP"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_declaration_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"name": "depth", "dtype": torch.int64, "value": one, "access": Access.BY_ROW}
    Column(**good)
    with pytest.raises(DeclarationError, match=said):
        Column(**{**good, **changes})


def test_two_columns_or_groups_of_one_name_are_refused() -> None:
    depth = Column("depth", torch.int64, value=one)
    with pytest.raises(DeclarationError, match="two columns have the name 'depth'"):
        RequestTables(EmulatedDevice(), (depth, depth), SIZES)
    other = Column("other", torch.int64, value=one, group=Group("request tables", lambda sequence: True))
    with pytest.raises(DeclarationError, match="two groups of columns have the name 'request tables'"):
        RequestTables(EmulatedDevice(), (depth, other), SIZES)


def test_the_host_need_not_know_a_type_that_it_never_writes() -> None:
    state = Column("state", torch.bfloat16, default=1, width=2, writer=Writer.GRAPH, form=Form.RESET)
    updates = UpdateBuilder((*PLACE, state), SIZES).build(entry(sequence(2)))
    assert updates is not None
    assert any("state" in write.columns and write.form == "reset" for write in updates.writes)
    with pytest.raises(DeclarationError, match="numpy can't write"):
        Column("state", torch.bfloat16, value=lambda source: 1)


_ASKED = Group("asked", lambda sequence: True)


def test_a_reset_reaches_rows_of_an_asked_group_that_nothing_is_written_to(device: Device) -> None:
    by_step = Column(
        "mine", torch.float32, width=4, writer=Writer.STEP, form=Form.PAIRS | Form.RESET, group=_ASKED,
        changes=lambda step: [(1, 2, 5.0)] if step.page_updates else [],
    )  # fmt: skip
    engine = Engine(device, columns=(*PLACE, by_step))
    engine.run(entry(sequence(1), pages=((1, 0, 3),)))
    assert engine.tables["mine"][1].tolist() == [0, 0, 5, 0]
    engine.run(entry(sequence(1)))
    assert engine.tables["mine"][1].tolist() == [0, 0, 0, 0]


def test_a_prompt_in_chunks_resets_before_its_first(device: Device) -> None:
    both = Column(
        "mine", torch.float32, width=2, writer=Writer.STEP | Writer.GRAPH, form=Form.PAIRS | Form.RESET, group=_ASKED,
        value=lambda source: ([0], [1.0]),
    )  # fmt: skip
    engine, one = Engine(device, columns=(*PLACE, both)), sequence(1)
    engine.tables["mine"][1] = 7
    engine.run(ScheduledStep(1, (), (Chunk(one, 0, (1, 2), False, True),), (), pass_name="prefill"))
    assert engine.tables["mine"][1].tolist() == [0, 0]
    engine.run(ScheduledStep(2, (), (Chunk(one, 2, (3,), True, False),), (), pass_name="prefill"))
    assert engine.tables["mine"][1].tolist() == [1, 0]


_PAIRS: dict[str, Any] = {"width": 4, "form": Form.PAIRS | Form.RESET}


@pytest.mark.parametrize(
    ("dtype", "changes", "value", "said"),
    [
        (torch.int32, {}, 0.9, "0.9 .*int32"),
        (torch.int32, {}, 2**31, "2147483648"),
        (torch.uint8, {}, np.int64(300), "300"),
        (torch.uint8, {}, -1, "-1"),
        (torch.float32, {}, None, "None"),
        (torch.float32, {}, "1", "'1'"),
        (torch.float32, {}, 1e40, "1e[+]40"),
        (torch.float32, {}, [5.0], "5.0"),
        (torch.bool, {}, "no", "'no'"),
        (torch.bool, {}, 2, "2"),
        (torch.float32, {"width": 4}, [1, 2, 3, 4, 5, 6], "4 values at most"),
        (torch.float32, {"width": 4}, [[1, 2], [3, 4]], "a row of numbers"),
        (torch.float32, {"width": 4}, 1.0, "a row of numbers"),
        (torch.float32, {"width": 4}, "1234", "a row of numbers"),
        (torch.float32, {"width": 4}, [1, None], "float32 holds"),
        (torch.float32, {"width": 4}, [1e40], "float32 holds"),
        (torch.int32, {"width": 4}, [1.5], "int32 holds"),
        (torch.uint8, {"width": 4}, np.array([300]), "uint8 holds"),
        (torch.bool, {"width": 4}, [1, 2], "bool holds"),
        (torch.uint8, _PAIRS, (np.array([0]), np.array([300])), "uint8 holds"),
        (torch.uint8, _PAIRS, ([0, 1], [1, 300]), "300"),
        (torch.float32, _PAIRS, ([0.9, 1.9], [5.0, 6.0]), "indices that are whole numbers"),
        (torch.float32, _PAIRS, (np.array([False, True]), [5.0, 6.0]), "indices that are whole numbers"),
        (torch.float32, _PAIRS, [(1, 5.0), (3, 2.0)], "a tuple of all indices and all values"),
        (torch.float32, _PAIRS, [(1, 5.0)], "a tuple of all indices and all values"),
        (torch.float32, _PAIRS, {1: 5.0, 3: 6.0}, "a tuple of all indices and all values"),
        (torch.float32, _PAIRS, ([1, 2, 3], [1.0, 2.0]), "as many indices as values"),
        (torch.float32, _PAIRS, ([], [1.0]), "as many indices as values"),
        (torch.float32, _PAIRS, ([1, 2], 1.0), "as many indices as values"),
    ],
)
def test_a_value_that_the_column_can_t_hold_fails_its_request_by_name(
    dtype: torch.dtype, changes: dict[str, Any], value: Any, said: str
) -> None:
    def of(source: Any) -> Any:
        neutral: Any = ([], []) if "form" in changes else [] if "width" in changes else 0
        return value if source.sequence.row == 2 else neutral

    engine = Engine(EmulatedDevice(), columns=(*PLACE, Column("mine", dtype, value=of, **changes)))
    with pytest.raises(DeclarationError, match=rf"column 'mine': its value of the request 'of row 2' .*{said}"):
        engine.run(entry(sequence(1), sequence(2), sequence(3)))


@pytest.mark.parametrize(
    "change", [(9, 1, 5.0), (-1, 1, 5.0), (0, 1, 5.0), (1, 0.5, 5.0), (1, 1, None), (1, None, 5.0)]
)
def test_changes_that_name_no_place_are_refused(change: Any) -> None:
    column = Column("mine", torch.float32, writer=Writer.STEP, changes=lambda step: [change], **_PAIRS)
    engine = Engine(EmulatedDevice(), columns=(*PLACE, column))
    with pytest.raises(DeclarationError, match="column 'mine'"):
        engine.run(entry(sequence(1)))


def test_a_short_row_is_filled_with_the_default(device: Device) -> None:
    short = Column("mine", torch.float32, default=-1, width=4, value=lambda source: [1, 2])
    engine = Engine(device, columns=(*PLACE, short))
    engine.run(entry(sequence(1)))
    assert engine.tables["mine"][1].tolist() == [1, 2, -1, -1]


def test_numbers_of_numpy_and_of_any_width_that_fit_are_taken(device: Device) -> None:
    columns = (
        Column("small", torch.int16, value=lambda source: np.int64(-3)),
        Column("real", torch.float32, value=lambda source: np.float64(0.5)),
        Column("truth", torch.bool, value=lambda source: np.bool_(True)),
        Column("wide", torch.float64, width=3, value=lambda source: [1, 2.5, float("-inf")]),
        Column("few", torch.int16, value=lambda source: (range(2), np.array([7, 8])), **_PAIRS),
    )
    engine = Engine(device, columns=(*PLACE, *columns))
    engine.run(entry(sequence(1)))
    found = [engine.tables[column.name][1].tolist() for column in columns]
    assert found == [-3, 0.5, True, [1, 2.5, float("-inf")], [7, 8, 0, 0]]
