"""What drafters write: engines start with those that write their own memory alone, and refuse all others by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import engine, every_drafter, made
from phonograph.engine.cache.groups import Paged
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafter, Drafting
from phonograph.engine.passes.registry import TARGET_VERIFY
from phonograph.engine.passes.unread import UnreadSize
from phonograph.engine.state.column import Column, Form, Writer
from phonograph.errors import DeclarationError
from speculation import speculating

DEPTH = 3
MOOD = Column("mood", torch.float32, writer=Writer.ENTRY | Writer.GRAPH, form=Form.RESET)
Act = Callable[[PassParts, Any], object]


@dataclass
class Writing:
    """The protocol `ReadsTarget`; does something in one of its calls, with the first argument of that."""

    parts: PassParts
    where: str
    act: Act
    writes: Sequence[str] = ()
    reads: Sequence[str] = ()
    taps: tuple[int, ...] = (0,)

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        return self.parts.beside[TARGET_VERIFY.name].tensors

    def _at(self, call: str, given: Any) -> None:
        if call == self.where:
            self.act(self.parts, given)

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self._at("features", taps)
        return taps[0].clone()

    def read(self, following: torch.Tensor, features: torch.Tensor, queries: Any) -> None:
        self._at("read", (following, features, queries))

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        self._at("draft", accepted)
        return accepted.tokens[:, :1].repeat(1, depth)

    def keep_up(self, accepted: Accepted) -> None:
        self._at("keep_up", accepted)


def writing(where: str, act: Act, writes: Sequence[str] = ()) -> Drafting:
    return Drafting(
        "writing", DEPTH, lambda parts: Writing(parts, where, act, writes), lambda: (MOOD,),
        keeps=lambda model: (Paged(1, 8),),
    )  # fmt: skip


def refusal_of(drafting: Drafting, backend: str = "disabled", **changes: Any) -> str:
    with pytest.raises(DeclarationError) as caught:
        speculating(drafting, backend, **changes)
    return str(caught.value)


LENT = "which is lent to it, and read again after it"
ENGINES = "which is the engine's"


@pytest.mark.parametrize(
    ("where", "act", "said"),
    [
        ("draft", lambda parts, a: a.rows.mul_(2), f"aten.mul_.Tensor writes accepted.rows, {LENT}"),
        ("draft", lambda parts, a: a.starts.add_(1), f"writes accepted.starts, {LENT}"),
        ("draft", lambda parts, a: a.table.clamp_(min=1), f"writes accepted.table, {LENT}"),
        ("keep_up", lambda parts, a: a.counts.zero_(), f"writes accepted.counts, {LENT}"),
        ("keep_up", lambda parts, a: a.features.zero_(), f"writes accepted.features, {LENT}"),
        ("features", lambda parts, taps: taps[0].div_(2), f"writes taps[0], {LENT}"),
        ("read", lambda parts, given: given[0].clamp_(min=0), f"writes following, {LENT}"),
        ("read", lambda parts, given: given[2].positions.add_(1), f"writes queries.positions, {LENT}"),
        ("read", lambda parts, given: given[2].table.clamp_(min=1), f"writes queries.table, {LENT}"),
        ("draft", lambda parts, a: parts.tables.length.sub_(1), f"writes the column 'length', {ENGINES}"),
        ("draft", lambda parts, a: parts.tables.last_token[a.rows].fill_(7), ""),
        ("draft", lambda parts, a: parts.tables.last_token.index_fill_(0, a.rows, 7), f"'last_token', {ENGINES}"),
        ("draft", lambda parts, a: parts.tables["seed"].fill_(7), f"the column 'seed', {ENGINES}"),
        ("draft", lambda parts, a: parts.tables["depth"].fill_(0), f"the column 'depth', {ENGINES}"),
        (
            "draft",
            lambda parts, a: parts.tables["mood"].fill_(7),
            "the column 'mood', which its `writes` does not name",
        ),
        ("draft", lambda parts, a: parts.cache.tensors[0].zero_(), f"the KV cache of the model (0), {ENGINES}"),
        ("draft", lambda parts, a: parts.model.weights.embedding.mul_(1), "which it neither makes nor declares"),
        ("draft", lambda parts, a: parts.tables.length.numpy().fill(3), "that torch does not see writes the column"),
        ("draft", lambda parts, a: a.rows.clone().mul_(2), ""),
        ("draft", lambda parts, a: parts.tables["draft"].fill_(3), ""),
        ("read", lambda parts, given: parts.beside[TARGET_VERIFY.name].tensors[0].zero_(), ""),
    ],
)
def test_a_drafter_writes_what_is_its_own(where: str, act: Act, said: str) -> None:
    drafting = writing(where, act)
    if not said:
        speculating(drafting, "disabled")
        return
    told = refusal_of(drafting)
    assert told.startswith(f"the drafter 'writing', in `{where}`: ")
    assert said in told
    assert "that torch does not see" in told or "(test_drafter_writes.py:" in told


def test_it_may_write_a_column_of_its_own_that_it_names() -> None:
    speculating(writing("draft", lambda parts, a: parts.tables["mood"].fill_(7), ["mood"]), "disabled")


def test_a_write_that_it_gets_over_is_refused_all_the_same() -> None:
    def tries(parts: PassParts, accepted: Accepted) -> None:
        try:
            accepted.rows.zero_()
        except Exception:
            return

    assert "writes accepted.rows" in refusal_of(writing("draft", tries))


@pytest.mark.parametrize("name", ["last_token", "length", "seed", "limit"])
def test_it_can_name_no_column_of_the_engine(name: str) -> None:
    assert name in refusal_of(writing("draft", lambda parts, a: None, [name]))


def test_what_is_read_late_is_lent_too() -> None:
    drafting = writing("draft", lambda parts, a: a.tokens[:, 8:].zero_())
    speculating(drafting, "disabled")
    late = replace(drafting, unread=UnreadSize(16, 1, 64, torch.float32))
    assert f"writes accepted.tokens, {LENT}" in refusal_of(late, unread_places=16)


def test_nothing_is_recorded_first() -> None:
    def writes(parts: PassParts, accepted: Accepted) -> None:
        calls.append(1)
        parts.tables.length.zero_()

    calls: list[int] = []
    assert "the column 'length'" in refusal_of(writing("draft", writes), "full")
    assert len(calls) <= 2, "its shapes are looked at, and what it writes"


def test_a_drafter_that_raises_starts() -> None:
    def raises(parts: PassParts, accepted: Accepted) -> None:
        raise ValueError("no idea")

    speculating(writing("draft", raises), "disabled")


def test_rows_hold_what_they_held() -> None:
    core = speculating(writing("draft", lambda parts, a: None), "disabled")
    tables = core.executor.tables
    assert all(bool((tables[one.name] == one.default).all()) for one in tables.columns)


@every_drafter
def test_our_own_pass(drafting: Drafting) -> None:
    engine(drafting, "disabled")


@pytest.fixture
def drafting(request: pytest.FixtureRequest, tmp_path: Path) -> Drafting:
    return made(request.param, tmp_path)


@pytest.mark.faults
def test_a_host_read_of_a_drafter_is_no_recording(caplog: pytest.LogCaptureFixture) -> None:
    class Reads:
        reads: Sequence[str] = ()
        writes: Sequence[str] = ()

        def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
            return torch.full((len(accepted.rows), depth), int(accepted.tokens[0, 0].item()))

        def keep_up(self, accepted: Accepted) -> None:
            pass

    drafter: Drafter = Reads()
    core = speculating(Drafting("reads", DEPTH, lambda parts: drafter))
    assert not any(not key.axes for key in core.executor.runners["target_verify"].captured)
    told = [record.getMessage() for record in caplog.records if "capturing target_verify" in record.getMessage()]
    assert told
    assert all("reads the device from the host (test_drafter_writes.py:" in one for one in told)
