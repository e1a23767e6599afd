"""Declarations: what a slot, a pad and a dim accept, and what a refusal tells the reader to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.extent import Dim, Extent, check_dims, padded_sizes
from phonograph.graphs.inputs.slot import Pad, Slot, check_known, check_slots, collect_dims

ZERO = Pad.fill(0)
UNREAD = Pad.unread(because="attention stops at the length")


def ints(name: str = "x", shape: Any = ("tokens",), pad: Pad | None = ZERO, **more: Any) -> Slot:
    return Slot(name, shape, torch.int64, pad=pad, **more)


def floats(name: str = "x", shape: Any = ("tokens",), **more: Any) -> Slot:
    return Slot(name, shape, torch.float32, **more)


# What is declared, and words that its refusal must contain: what was found and what to do.
REFUSED: dict[str, tuple[Callable[[], object], list[str]]] = {
    "an integer slot without a pad value": (
        lambda: ints(pad=None),
        ["'x'", "no pad value", "Pad.fill(", "Pad.unread("],
    ),
    "a bool slot without a pad value": (lambda: Slot("x", ("tokens",), torch.bool), ["'x'", "Pad.fill("]),
    "an unread integer slot without a range": (lambda: ints(pad=UNREAD), ["'x'", "valid=(smallest, largest)"]),
    "a pad without value and reason": (lambda: Pad(None), ["Pad.fill(", "Pad.unread("]),
    "Pad.fill(None)": (lambda: Pad.fill(None), ["Pad.fill(", "Pad.unread("]),  # type: ignore[arg-type]
    "Pad.unread without a reason": (lambda: Pad.unread(because=""), ["Pad.unread("]),
    "a pad value that the dtype can't hold": (
        lambda: Slot("x", ("tokens",), torch.uint8, pad=Pad.fill(-1)),
        ["'x'", "pad", "-1", "torch.uint8"],
    ),
    "a pad outside the legal range": (
        lambda: ints(pad=Pad.fill(9), valid=(0, 8)),
        ["'x'", "hold 9", "valid=(0, 8)", "because="],
    ),
    "a dtype by name": (lambda: Slot("x", ("tokens",), "float32"), ["'x'", "'float32'", "torch.float32"]),  # type: ignore[arg-type]
    "a number as pad": (
        lambda: Slot("x", ("tokens",), torch.int64, pad=0),  # type: ignore[arg-type]
        ["'x'", "Pad.fill(0)"],
    ),
    "a number as range": (lambda: ints(valid=8), ["'x'", "8", "(smallest, largest)"]),
    "a fraction as an integer pad": (lambda: ints(pad=Pad.fill(0.5)), ["'x'", "0.5", "torch.int64"]),
    "a bool pad that is neither": (
        lambda: Slot("x", ("tokens",), torch.bool, pad=Pad.fill(2)),
        ["'x'", "2", "torch.bool"],
    ),
    "a float pad beyond the dtype": (
        lambda: Slot("x", ("tokens",), torch.float16, pad=Pad.fill(1e6)),
        ["'x'", "torch.float16"],
    ),
    "an absent value that the dtype can't hold": (lambda: ints(absent=1.5), ["'x'", "absent", "1.5"]),
    "absent and keyed": (lambda: ints(absent=0, keyed=True), ["'x'", "absent=", "keyed=True"]),
    "an empty range": (lambda: ints(valid=(5, 4)), ["'x'", "(5, 4)", "(smallest, largest)"]),
    "an endless range": (lambda: floats(valid=(0.0, float("inf"))), ["'x'", "inf", "bound"]),
    "a range that is no number": (lambda: floats(valid=(0.0, float("nan"))), ["'x'", "nan"]),
    "a range that the dtype can't hold": (lambda: ints(valid=(0.5, 2)), ["'x'", "valid", "0.5"]),
    "a shape that is a name": (lambda: ints(shape="tokens"), ["'x'", "tuple", "('tokens',)"]),
    "a size of zero": (lambda: ints(shape=(0, "tokens")), ["'x'", "0", "positive"]),
    "a negative size": (lambda: ints(shape=(-1, "tokens")), ["'x'", "-1", "positive"]),
    "a bool as size": (lambda: ints(shape=(True,)), ["'x'", "True"]),
    "a float as size": (lambda: ints(shape=(2.0,)), ["'x'", "2.0"]),
    "a dim without a name in a shape": (lambda: ints(shape=("",)), ["'x'", "dim's name"]),
    "a dim that stands twice": (lambda: ints(shape=("tokens", "tokens")), ["'x'", "twice", "own dim"]),
    "no name": (lambda: ints(name=""), ["name"]),
    "a name with a space": (lambda: ints(name="packed inputs"), ["'packed inputs'", "field name"]),
    "a source with an empty part": (lambda: ints(source="ngram..table"), ["'ngram..table'"]),
    "a computed slot without a function": (lambda: ints(compute="later"), ["'x'", "compute=f(batch, extent)"]),
    "two slots of one name": (
        lambda: check_slots([ints("x"), ints("x", source="y")]),
        ["'x'", "name", "Remove or rename"],
    ),
    "two slots of one source": (
        lambda: check_slots([ints("x", source="z"), ints("y", source="z")]),
        ["'z'", "source", "Remove or rename"],
    ),
    "a source inside another slot": (
        lambda: check_slots([ints("ngram"), ints("table", source="ngram.table")]),
        ["'ngram.table'", "'table'", "'ngram'", "Change one"],
    ),
    "a dim declared twice": (lambda: collect_dims([], [Dim("a"), Dim("a")]), ["'a'", "twice", "Remove one"]),
    "a dim without a name": (lambda: Dim(""), ["name", "Dim("]),
    "a limit and per": (lambda: Dim("pages", limit=4, per="seqs"), ["'pages'", "limit", "per='seqs'"]),
    "a limit of zero": (lambda: Dim("pages", limit=0), ["'pages'", "positive"]),
    "no times": (lambda: Dim("pages", per="seqs", times=0), ["'pages'", "positive"]),
    "times of nothing": (lambda: Dim("pages", times=3), ["'pages'", "per="]),
    "a size field that is no field": (lambda: Dim("seqs", field="batch size"), ["'seqs'", "'batch size'"]),
    "a bucketed dim that no slot has": (
        lambda: check_dims(collect_dims([ints()], []), "seqs"),
        ["'seqs'", "tokens", "Name one"],
    ),
    "a bucketed dim with a limit": (
        lambda: check_dims({"seqs": Dim("seqs", limit=4)}, "seqs"),
        ["'seqs'", "buckets", "Remove"],
    ),
    "a dim per one that does not vary": (
        lambda: check_dims({"seqs": Dim("seqs"), "a": Dim("a", per="b")}, "seqs"),
        ["'a'", "'b'", "per='seqs'"],
    ),
    "an unknown dim": (
        lambda: check_dims(collect_dims([ints(shape=("seqs", "pages"))], []), "seqs"),
        ["'pages'", "Dim('pages', limit=", "per='seqs'"],
    ),
    "a slot over an undeclared dim": (
        lambda: check_known([ints(shape=("tokens", "pages"))], {"tokens": Dim("tokens")}),
        ["'x'", "'pages'", "tokens", "Dim('pages')"],
    ),
    "a size in the field of a slot": (
        lambda: check_known([ints("x")], {"tokens": Dim("tokens", field="x")}),
        ["'tokens'", "'x'", "Rename"],
    ),
    "two sizes in one field": (
        lambda: check_known([], {"a": Dim("a", field="n"), "b": Dim("b", field="n")}),
        ["'a'", "'b'", "'n'", "Rename"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_remedy(case: str) -> None:
    declare, words = REFUSED[case]
    with pytest.raises(DeclarationError) as caught:
        declare()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)


def test_float_slots_are_padded_with_zero_by_default() -> None:
    assert floats().pad == Pad.fill(0)


def test_slots_without_dims_need_no_pad() -> None:
    assert ints(shape=(), pad=None).pad == Pad.fill(0)


def test_an_unread_bool_needs_no_range() -> None:
    slot = Slot("mask", ("tokens",), torch.bool, pad=UNREAD)
    assert [slot.poison(0), slot.poison(1)] == [False, True]


def test_slots_are_frozen() -> None:
    with pytest.raises(AttributeError):
        floats().name = "y"  # type: ignore[misc]


def test_the_axis_is_where_the_name_stands() -> None:
    slot = ints(shape=(3, "tokens", 2, "pages"))
    assert slot.dims == ("tokens", "pages")
    assert slot.sizes({"tokens": 5, "pages": 7}) == (3, 5, 2, 7)


def test_a_source_may_be_dotted_and_defaults_to_the_name() -> None:
    assert ints("ids").path == ("ids",)
    assert ints("table", source="ngram.token_table").path == ("ngram", "token_table")


@pytest.mark.parametrize(
    ("slot", "legal"),
    [
        (ints(pad=UNREAD, valid=(3, 9)), {3, 9}),
        (floats(pad=UNREAD, valid=(-0.5, 0.5)), {-0.5, 0.5}),
        (floats(pad=UNREAD), {-173.0, 211.0}),
    ],
)
def test_the_two_poisons_differ_and_are_legal(slot: Slot, legal: set[float]) -> None:
    assert {slot.poison(0), slot.poison(1)} == legal


@pytest.mark.parametrize(
    ("slot", "filler"),
    [(ints(pad=Pad.fill(7)), 7), (ints(pad=UNREAD, valid=(3, 9)), 3), (floats(pad=UNREAD), 0)],
)
def test_a_tail_holds_the_pad_value_or_a_legal_one(slot: Slot, filler: float) -> None:
    assert slot.filler == filler


def test_padded_sizes_follow_the_bucket_the_limit_and_per() -> None:
    dims = collect_dims(
        [ints(shape=("seqs", "pages")), floats("y")], [Dim("pages", limit=16), Dim("tokens", per="seqs", times=4)]
    )
    check_dims(dims, "seqs")
    assert padded_sizes(dims, "seqs", 8) == {"seqs": 8, "pages": 16, "tokens": 32}


def test_an_extent_tells_used_of_padded() -> None:
    extent = Extent({"seqs": 3, "pages": 4}, {"seqs": 8, "pages": 4})
    assert str(extent) == "seqs=3/8, pages=4/4"
    assert extent.is_padded
    assert not Extent({"seqs": 8}, {"seqs": 8}).is_padded


def test_the_default_pad_is_legal_and_a_sentinel_has_a_reason() -> None:
    assert floats(valid=(1.0, 2.0)).pad == Pad.fill(1.0)
    assert floats(valid=(-1.0, 2.0)).pad == Pad.fill(0)
    assert ints(pad=Pad.fill(-1, because="the kernel skips it"), valid=(0, 8)).filler == -1


def test_a_null_row_lies_outside_of_the_live_ones() -> None:
    slot = Slot("rows", ("seqs",), torch.int64, pad=Pad.fill(0, null=True), valid=(1, 8))
    assert slot.pad is not None
    assert slot.pad.value == 0
