"""Request tables against a plain model of what each row holds, over random orders of entries, steps and preemptions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph import EmulatedDevice
from phonograph.engine.requests.request import Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Chunk, ScheduledStep
from phonograph.engine.sampling.penalties import count_tokens
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.state.column import TableSizes
from phonograph.engine.state.columns import CONSTRAINED, MASKS, PENALISED, PENALTIES, PLACE
from phonograph.engine.state.tables import RequestTables
from phonograph.engine.state.updates import UpdateBuilder

ROWS, VOCAB, PAGES = 5, 37, 6
COLUMNS = (*PLACE, *TorchSampler.columns, *PENALTIES, *MASKS)


@dataclass
class Bits:
    """A grammar that allows what it is told to."""

    words: Any = None

    def mask(self) -> Any:
        return self.words

    def accept(self, token: int) -> None:
        """Nothing to follow."""


@dataclass
class Row:
    """What a row must hold."""

    owner: Sequence
    start: int
    pages: dict[int, int] = field(default_factory=dict)
    allowed: Any = None


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 7, 3_000_000_000]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**63 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    logit_bias=st.one_of(
        st.just({}), st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-1.0, 2.5]), max_size=5)
    ),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)


class House:
    """Tables, and the model beside them."""

    def __init__(self) -> None:
        sizes = TableSizes(ROWS, VOCAB, PAGES)
        self.tables = RequestTables(EmulatedDevice(), COLUMNS, sizes)
        self.builder = UpdateBuilder(COLUMNS, sizes)
        self.rows: dict[int, Row] = {}
        self.pages: dict[tuple[int, int], int] = {}
        self.preempted: list[Sequence] = []
        self.decodes: tuple[Sequence, ...] = ()
        self.number = 0

    def step(self, data: st.DataObject) -> None:
        self.number += 1
        for row in data.draw(st.sets(st.sampled_from(sorted(self.rows)))) if self.rows else ():
            gone = self.rows.pop(row).owner
            self.preempted.append(gone)
        free = [row for row in range(1, ROWS + 1) if row not in self.rows]
        old = tuple(row.owner for row in self.rows.values())
        self.decodes = self.decodes if old == self.decodes else old
        chunks = [self.entering(row, data) for row in free if data.draw(st.booleans())]
        live = [*self.rows, *(chunk.sequence.row for chunk in chunks)]
        places = st.tuples(st.sampled_from(live), st.integers(0, PAGES - 1)) if live else st.nothing()
        changed = data.draw(st.dictionaries(places, st.integers(1, 99), max_size=4)) if live else {}
        for sequence in (*self.decodes, *(chunk.sequence for chunk in chunks)):
            if isinstance(sequence.constraint, Bits):
                short = data.draw(st.sampled_from([1, 2, 3]))  # of a tokenizer with fewer or more words than the model
                sequence.constraint.words = np.asarray(
                    data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=short, max_size=short)),
                    dtype=np.int32,
                )
        updates = tuple((row, index, page) for (row, index), page in changed.items())
        self.run(ScheduledStep(self.number, self.decodes, tuple(chunks), updates, pass_name="any"), data)

    def entering(self, row: int, data: st.DataObject) -> Chunk:
        comes_back = data.draw(st.booleans())
        if self.preempted and comes_back:
            sequence = self.preempted.pop()
        else:
            request = Request(f"r{self.number}.{row}", tuple(data.draw(prompts)), data.draw(params))
            sequence = Sequence(request, data.draw(st.integers(0, 1)), 8, frozenset(), (0, 0, 0.0, 0))
            sequence.constraint = Bits() if data.draw(st.booleans()) and data.draw(st.booleans()) else None
        sequence.row = row
        start = data.draw(st.integers(0, len(sequence.known()) - 1))
        return Chunk(sequence, start, sequence.known()[start:], data.draw(st.booleans()), True)

    def run(self, step: ScheduledStep, data: st.DataObject) -> None:
        updates, before = self.builder.build(step), self.tables.counts.transfers
        masked = any(sequence.constraint is not None for sequence in step.sampling)
        assert (updates is not None) == bool(step.prefills or step.page_updates or masked)
        if updates is not None:
            self.tables.apply(updates)
            assert self.tables.counts.transfers == before + 1
        for chunk in step.prefills:
            self.rows[chunk.sequence.row] = Row(chunk.sequence, chunk.start)
            for index in range(PAGES):  # the former owner's are gone
                self.pages[chunk.sequence.row, index] = 0
        for row, index, page in step.page_updates:
            self.pages[row, index] = page
        for sequence in step.sampling:
            if isinstance(sequence.constraint, Bits):
                self.rows[sequence.row].allowed = sequence.constraint.words
        self.check()
        self.pick(step, data)

    def pick(self, step: ScheduledStep, data: st.DataObject) -> None:
        """What the graph does at the end: tokens are noted, in rows that don't ask too, where there are counts."""
        tokens = [data.draw(st.integers(0, VOCAB - 1)) for _ in step.sampling]
        for sequence, token in zip(step.sampling, tokens, strict=True):
            sequence.outputs.append(token)
        if tokens and self.tables.is_made(PENALISED):
            rows = torch.tensor([sequence.row for sequence in step.sampling])
            count_tokens(self.tables["counts"], rows, torch.tensor(tokens))

    def check(self) -> None:
        tables = self.tables
        for (row, index), page in self.pages.items():
            assert tables.pages[row, index] == page
        for row, held in self.rows.items():
            asked = held.owner.request.params
            assert tables.length[row] == held.start
            assert tables["seed"][row] == held.owner.noise_seed
            assert tables["top_k"][row] == min(asked.top_k or 0, 2**31 - 1)
            for name in ("temperature", "top_p", "min_p"):
                assert tables[name][row] == torch.tensor(getattr(asked, name))
            if tables.is_made(PENALISED):
                self.check_penalties(row, held.owner, asked)
            if tables.is_made(CONSTRAINED):
                self.check_mask(row, held)

    def check_penalties(self, row: int, owner: Sequence, asked: SamplingParams) -> None:
        tables = self.tables
        assert tables["repetition"][row] == asked.repetition_penalty
        assert tables["presence"][row] == asked.presence_penalty
        assert tables["frequency"][row] == asked.frequency_penalty
        bias = asked.logit_bias
        assert tables["bias_ids"][row].tolist() == [*bias, *[0] * (300 - len(bias))]
        assert tables["bias"][row].tolist() == [*bias.values(), *[0.0] * (300 - len(bias))]
        if PENALISED.asked is not None and PENALISED.asked(owner):
            said, prompt = Counter(owner.outputs), set(owner.request.prompt)
            assert tables["counts"][row].tolist() == [said[token] for token in range(VOCAB)]
            assert tables["prompted"][row].tolist() == [token in prompt for token in range(VOCAB)]

    def check_mask(self, row: int, held: Row) -> None:
        wanted = [-1, -1]
        if held.allowed is not None:
            wanted = [*held.allowed.tolist(), 0, 0][:2]
        assert self.tables["allowed"][row].tolist() == wanted


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_hold_what_their_owners_ask_for(data: st.DataObject) -> None:
    house = House()
    for _ in range(data.draw(st.integers(1, 8))):
        house.step(data)
    null = {"top_p": 1, "repetition": 1, "allowed": -1}
    for column in COLUMNS:
        if house.tables.is_made(column.group):
            assert (house.tables[column.name][0] == null.get(column.name, 0)).all()
