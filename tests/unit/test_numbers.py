"""Numbers that users give, and the small arithmetic on sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.numbers import MAX_WHOLE, expect_finite, expect_whole, is_finite, is_number, is_whole, shown
from phonograph.sizes import ceil_div, is_power_of_two, next_power_of_two, round_up

sizes = st.integers(0, 2**40)
divisors = st.integers(1, 2**20)


@pytest.mark.parametrize("slip", [True, False, None, "1", 1.0, math.nan, math.inf, 2**63, -(2**63), [1]])
def test_a_slip_is_no_whole_number(slip: object) -> None:
    assert not is_whole(slip)
    with pytest.raises(ValueError, match="size must be a whole number of at least 1"):
        expect_whole("size", slip, ValueError, least=1)


@pytest.mark.parametrize("slip", [True, None, "1", math.nan, math.inf, -math.inf, 10**400])
def test_a_slip_is_no_finite_number(slip: object) -> None:
    assert not is_finite(slip)
    with pytest.raises(ValueError, match="share must be a finite number"):
        expect_finite("share", slip, ValueError)


def test_any_number_is_a_number_but_a_bool() -> None:
    assert all(map(is_number, (0, 1.5, math.inf, math.nan, 10**400)))
    assert not any(map(is_number, (True, "1", None)))


@given(st.integers(-10, 10), st.integers(-10, 10), st.integers(-10, 10))
def test_bounds_include_their_ends(value: int, least: int, most: int) -> None:
    assert is_whole(value, least, most) == (least <= value <= most)
    if least <= value <= most:
        assert expect_whole("it", value, ValueError, least=least, most=most) == value
        assert expect_finite("it", value, ValueError, least=least, most=most) == value


@pytest.mark.parametrize(
    ("bounds", "value", "said"),
    [
        ({}, "x", "it must be a whole number, found 'x' (str)."),
        ({"least": 0}, -1, "it must be a whole number of at least 0, found -1 (int)."),
        ({"most": 5}, 6, "it must be a whole number of at most 5, found 6 (int)."),
        ({"least": 0, "most": 5}, True, "it must be a whole number of at least 0 and at most 5, found True (bool)."),
        ({"least": 1}, MAX_WHOLE + 1, f"it must be a whole number of at least 1 and at most {MAX_WHOLE}, found"),
    ],
)
def test_the_error_says_what_was_expected_and_found(bounds: dict[str, Any], value: object, said: str) -> None:
    with pytest.raises(ValueError) as error:
        expect_whole("it", value, ValueError, **bounds)
    assert str(error.value).startswith(said)


def test_an_open_bound_is_left_out() -> None:
    assert expect_finite("p", 0, ValueError, least=0) == 0
    with pytest.raises(ValueError, match=r"p must be a finite number above 0 and at most 1, found 0 \(int\)"):
        expect_finite("p", 0, ValueError, least=0, most=1, open_below=True)


def test_what_is_shown_is_short_and_never_an_error() -> None:
    endless: list[object] = []
    endless.append(endless)
    values: tuple[object, ...] = ("x" * 10**6, 10**5000, endless, [[0] * 1000])
    for value in values:
        assert len(shown(value)) < 60


@given(sizes, divisors)
def test_parts_hold_the_number_and_one_less_does_not(number: int, divisor: int) -> None:
    parts = ceil_div(number, divisor)
    assert (parts - 1) * divisor < number <= parts * divisor
    assert round_up(number, divisor) == parts * divisor


@given(sizes)
def test_the_next_power_of_two_is_the_smallest_that_holds_it(size: int) -> None:
    power = next_power_of_two(size)
    assert is_power_of_two(power)
    assert power >= size
    assert power == 1 or power // 2 < size


@given(st.integers(-8, 2**12))
def test_powers_of_two_have_one_bit(number: int) -> None:
    assert is_power_of_two(number) == (number > 0 and number.bit_count() == 1)
