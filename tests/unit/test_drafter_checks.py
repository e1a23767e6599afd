"""Drafters that can't work as they are declared: refused when the engine is made, by what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from phonograph import DeclarationError
from phonograph.engine.cache.groups import Paged
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafting
from phonograph.engine.passes.registry import TARGET_VERIFY
from phonograph.engine.passes.unread import UnreadSize
from speculation import speculating

DEPTH = 3
TARGET = SHAPES["tiny"]
LAST = TARGET.num_layers - 1


class Saying:
    """The least that a drafter is."""

    reads: Any = ()
    writes: Any = ()

    def __init__(self, parts: PassParts) -> None:
        self.parts = parts

    def draft(self, accepted: Accepted, depth: int) -> Any:
        return accepted.tokens[:, :1].repeat(1, depth)

    def keep_up(self, accepted: Accepted) -> None:
        pass


class Reading(Saying):
    """And one that reads hidden states."""

    taps: Any = (0, LAST)

    def __init__(self, parts: PassParts) -> None:
        super().__init__(parts)
        self.kept: Any = parts.beside[TARGET_VERIFY.name].tensors

    def features(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return taps[0] + taps[1]

    def read(self, following: torch.Tensor, features: torch.Tensor, queries: Any) -> None:
        pass


def unread(places: int = 8, num_taps: int = 2, hidden: int = TARGET.hidden) -> UnreadSize:
    return UnreadSize(places, num_taps, hidden, torch.float32)


def declared(make: Callable[[PassParts], Any], **others: Any) -> Drafting:
    return Drafting("mine", DEPTH, make, **others)


def reading(make: Callable[[PassParts], Any] = Reading, **others: Any) -> Drafting:
    return declared(make, **{"keeps": lambda model: (Paged(1, 8),), **others})


def but(kind: type[Saying], **changes: Any) -> Callable[[PassParts], Any]:
    """The drafter with other attributes, or without those that are None."""

    def make(parts: PassParts) -> Any:
        names = {name: value for name in dir(kind) if (value := getattr(kind, name)) and not name.startswith("__")}
        drafter = kind(parts)
        found = {**names, **vars(drafter), "reads": drafter.reads, "writes": drafter.writes, **changes}
        return type("Other", (), {name: value for name, value in found.items() if value is not None})()

    return make


@pytest.mark.parametrize("drafting", [declared(Saying), reading(), reading(unread=unread())], ids=str)
def test_what_fits_is_not_refused(drafting: Drafting) -> None:
    speculating(drafting, "disabled")


WRONG: dict[str, tuple[Drafting, str]] = {
    "nothing is made": (declared(lambda parts: None), "is None: `make` returns nothing"),
    "no columns": (declared(but(Saying, reads=None, writes=None)), "has no `reads`, `writes`"),
    "no keep_up": (declared(but(Saying, keep_up=None)), "has no `keep_up`"),
    "a text for names": (declared(but(Saying, reads="draft")), r"has reads = 'draft', .* a tuple of texts"),
    "no read": (
        reading(but(Reading, read=None)),
        "has `taps`, `kept`, `features`, as one that reads .* but no `read`. ",
    ),
    "taps alone": (declared(but(Saying, taps=(0,))), "has `taps`, .* but no `kept`, `features`, `read`"),
    "no tap": (reading(but(Reading, taps=())), rf"taps the layers \(\), and the model has layers 0 to {LAST}"),
    "a tap too high": (reading(but(Reading, taps=(0, LAST + 1))), rf"taps the layers \(0, {LAST + 1}\), and"),
    "a tap below 0": (reading(but(Reading, taps=(-1,))), r"taps the layers \(-1,\), and"),
    "taps in a list": (reading(but(Reading, taps=[0])), r"taps the layers \[0\], and"),
    "nothing kept": (reading(but(Reading, kept=())), r"has kept = \(\), .* at least one"),
    "a tensor for kept": (reading(but(Reading, kept=torch.zeros(2))), "has kept = a Tensor, .* at least one"),
    "whole numbers kept": (
        reading(but(Reading, kept=(torch.zeros(2).long(),))),
        "has a first tensor in kept of torch.int64, and features",
    ),
    "no pages": (declared(Saying, keeps=lambda model: ()), "declares pages of its own, and `keeps` gives none"),
    "other taps unread": (reading(unread=unread(num_taps=1)), "declares `unread` of 1 states of .*, and taps 2 of"),
    "other states unread": (
        reading(unread=unread(hidden=5)),
        "declares `unread` of 2 states of 5 numbers, and taps 2 of",
    ),
    "unread and no reader": (declared(Saying, unread=unread()), "declares `unread`, and reads no hidden states"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_what_is_wrong(name: str) -> None:
    drafting, said = WRONG[name]
    with pytest.raises(DeclarationError, match=f"^the drafter 'mine' {said}"):
        speculating(drafting, "disabled")


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, None])
def test_a_depth_that_is_none(depth: Any) -> None:
    with pytest.raises(DeclarationError, match=r"the drafter 'mine' drafts .* tokens a round. Give a whole number"):
        replace(declared(Saying), depth=depth)


@pytest.mark.parametrize("depth", [2, 5])
def test_another_depth_than_the_engine_has(depth: int) -> None:
    with pytest.raises(DeclarationError, match=f"drafts {depth} tokens a round, where rounds of the engine have 3"):
        speculating(replace(declared(Saying), depth=depth), "disabled", tokens_per_row=4, max_tokens=64)


@pytest.mark.parametrize(("places", "drafting"), [(0, reading(unread=unread())), (8, reading())], ids=["one", "other"])
def test_places_for_unread_tokens_on_one_side_alone(places: int, drafting: Drafting) -> None:
    found = f"declares {8 - places} places for unread tokens, where the engine has {places}: .*`Chosen.unread_places`"
    with pytest.raises(DeclarationError, match=found):
        speculating(drafting, "disabled", unread_places=places)


@dataclass(frozen=True)
class Shaped:
    """Drafts that a function makes of the number of rows, and of how many drafts of each are wanted."""

    of: Callable[[int, int], Any]

    def drafting(self, depth: int) -> Drafting:
        def make(parts: PassParts) -> Saying:
            found = Saying(parts)
            found.draft = lambda accepted, depth: self.of(len(accepted.rows), depth)  # type: ignore[method-assign]
            return found

        return Drafting("mine", depth, make)


SHAPES_OF = {
    "transposed": lambda num_rows, depth: torch.zeros(depth, num_rows),
    "flat": lambda num_rows, depth: torch.zeros(num_rows * depth),
    "too many": lambda num_rows, depth: torch.zeros(num_rows, depth + 1),
    "a list": lambda num_rows, depth: [[1] * depth] * num_rows,
    "nothing": lambda num_rows, depth: None,
}


@pytest.mark.parametrize("max_seqs", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SHAPES_OF)
def test_drafts_of_another_shape_are_refused_where_nothing_is_recorded(name: str, depth: int, max_seqs: int) -> None:
    """However many rows and drafts there are."""
    if (name, depth, max_seqs) == ("transposed", 1, 1):
        return  # which is the same
    with pytest.raises(DeclarationError, match=r"the drafter 'mine' returns .* where .* is asked for"):
        speculating(Shaped(SHAPES_OF[name]).drafting(depth), "disabled", max_seqs=max_seqs)


def test_one_that_drafts_as_many_in_every_round_is_refused_where_rounds_may_be_narrower() -> None:
    always = Shaped(lambda num_rows, depth: torch.zeros(num_rows, DEPTH)).drafting(DEPTH)
    speculating(always, "disabled")
    with pytest.raises(DeclarationError, match=r"returns \[2, 3\] where \[2, 1\] is asked for"):
        speculating(always, "disabled", narrows=True)
