"""Rules of speculation: what it excludes is refused by name, before weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from phonograph import LLM, EngineOptions, PlanError
from phonograph.engine.checkpoints import base
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.speculation import choose_drafter
from phonograph.engine.execution.speculation_rules import SPECULATION_RULES
from phonograph.engine.models.config import SHAPES

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Theirs(RandomCheckpoint):
    """A checkpoint whose model is in layers of somebody else; nothing of it may be made here."""

    def model(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights are read")

    def check(self, max_len: int) -> None:
        pass

    def breaks(self) -> tuple[str, ...]:
        return ()

    def described(self, dtype: torch.dtype, device: torch.device) -> str:
        return "theirs"


def test_rules_have_names_and_are_in_the_docs() -> None:
    names = [rule.name for rule in SPECULATION_RULES]
    assert len(set(names)) == len(names)
    for page in ("speculation.md", "reference/reasons.md"):
        text = (DOCS / page).read_text()
        assert all(f"`{name}`" in text for name in names), page


@pytest.mark.parametrize("speculate", ["eagle", "ngram+eagle", "mtp", "auto"])
def test_a_head_for_layers_of_others(speculate: Any, tmp_path: Path) -> None:
    assert isinstance(Theirs(SHAPES["tiny"]), base.MakesModel)
    options = EngineOptions(speculate=speculate, draft=tmp_path, max_len=64)
    said = rf"rule 'speculation-own-layers' conflicts with --speculate {speculate}: .*--speculate ngram".replace(
        "+", r"\+"
    )
    with pytest.raises(PlanError, match=said):
        LLM(Theirs(SHAPES["tiny"]), device="cpu", options=options)


@pytest.mark.parametrize("speculate", ["eagle", "ngram+eagle"])
def test_a_head_that_nobody_gave(speculate: Any) -> None:
    with pytest.raises(PlanError, match=r"rule 'speculation-needs-a-head' conflicts with .*Give --draft PATH"):
        choose_drafter(EngineOptions(speculate=speculate), RandomCheckpoint(SHAPES["tiny"]))


@pytest.mark.parametrize("speculate", ["ngram", "auto"])
def test_n_grams_go_with_layers_of_others(speculate: Any) -> None:
    chosen = choose_drafter(EngineOptions(speculate=speculate), Theirs(SHAPES["tiny"]))
    assert chosen is not None
    assert chosen.name == "ngram"
    assert chosen.why == ("this model has layers that no head can read" if speculate == "auto" else "")


def test_nothing_is_refused_where_nothing_is_drafted() -> None:
    assert choose_drafter(EngineOptions(), Theirs(SHAPES["tiny"])) is None
