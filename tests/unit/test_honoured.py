"""Honoured parameters: levels come from the columns' declarations, and what nobody reads can't be set."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph import DeclarationError, RequestError, SamplingParams
from phonograph.engine.requests.parameter import Sampling, SamplingParameter
from phonograph.engine.requests.request import READ_BY_ENGINE, GrammarSpec, Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.sampling.honoured import HonouredParameters
from phonograph.engine.sampling.needs import needs_of
from phonograph.engine.sampling.sampler import SamplingRows, TorchSampler, check_declared
from phonograph.engine.state.column import Column, Group
from phonograph.engine.state.columns import MASKS, MIN_P, PENALISED, PENALTIES, PLACE, SEED, TEMPERATURE, TOP_K, TOP_P

COLUMNS = (*PLACE, *TorchSampler.columns, *PENALTIES, *MASKS)
ALL = HonouredParameters(COLUMNS)


@dataclass(frozen=True)
class Further(SamplingParams):
    top_a: float = 0.0


TOP_A = SamplingParameter("top_a", Sampling.TRUNCATED, off=0.0, of=Further)


def by_hand(params: SamplingParams) -> Sampling:
    """The rule, parameter by parameter."""
    changes = (params.presence_penalty != 0.0, params.frequency_penalty != 0.0, bool(params.logit_bias))
    if any(changes) or params.repetition_penalty not in (None, 1.0):
        return Sampling.PENALISED
    if params.temperature == 0:
        return Sampling.GREEDY
    truncated = params.top_k or params.min_p or params.top_p not in (None, 1.0)
    return Sampling.TRUNCATED if truncated else Sampling.SAMPLED


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([None, 0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([None, 0, 1, 2**62]),
    top_p=st.sampled_from([None, 0.5, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([None, 0.5, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 2.0]),
    logit_bias=st.sampled_from([{}, {3: 0.0}, {3: 1.0}]),
    seed=st.sampled_from([None, 0, -1]),
    logprobs=st.sampled_from([None, None, 2]),
    return_hidden_states=st.sampled_from([None, None, "last"]),
)


def sequence(params: SamplingParams) -> Sequence:
    return Sequence(Request("one", (1,), params), 0, 8, frozenset(), (0, 0, 0.0, 0))


@given(st.lists(some_params, min_size=1, max_size=4))
def test_the_level_is_the_highest_that_a_parameter_needs(many: list[SamplingParams]) -> None:
    sequences = [sequence(params) for params in many]
    levels = [by_hand(one.request.params) for one in sequences]
    assert [ALL.level_of(one.request.params) for one in sequences] == levels
    for _ in range(2):
        assert needs_of(sequences, ALL).level is max(levels)
    parts = (needs_of(sequences[:1], ALL), needs_of(sequences[1:], ALL))
    assert parts[0] | parts[1] == parts[1] | parts[0] == needs_of(sequences, ALL)
    asked = PENALISED.asked
    assert asked is not None
    assert [asked(one) for one in sequences] == [level is Sampling.PENALISED for level in levels]


def test_every_field_of_the_parameters_is_read() -> None:
    declared = {column.parameter.name for column in COLUMNS if column.parameter is not None}
    assert declared | READ_BY_ENGINE == {one.name for one in fields(SamplingParams)}
    assert not declared & READ_BY_ENGINE


SET: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "seed": 7,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {1: 1.0},
}


@pytest.mark.parametrize("name", SET)
def test_a_parameter_without_a_column_is_refused_by_name(name: str) -> None:
    without = [one for one in COLUMNS if one.parameter is None or one.parameter.name != name]
    found, quiet = HonouredParameters(without), replace(SamplingParams(), temperature=0.0)
    found.refuse_others(Request("one", (1,), quiet))
    asked = Request("one", (1,), replace(quiet, **{name: SET[name]}))
    ALL.refuse_others(asked)
    with pytest.raises(RequestError, match=f"{name} is .*does not honour it. Leave it out") as error:
        found.refuse_others(asked)
    assert error.value.field == name


def test_without_temperature_nothing_is_drawn_in_silence() -> None:
    found = HonouredParameters(PLACE)
    with pytest.raises(RequestError, match=r"temperature is 1\.0"):
        found.refuse_others(Request("one", (1,), SamplingParams()))


def test_what_the_engine_reads_can_always_be_set() -> None:
    params = SamplingParams(
        3, 0.0, stop=("x",), stop_token_ids=(1,), ignore_eos=True, n=2, logprobs=3, grammar=GrammarSpec("regex", "a")
    )
    HonouredParameters(PLACE).refuse_others(Request("one", (1,), params))


def test_a_field_of_a_subclass_is_refused_unless_a_column_carries_it() -> None:
    carried = HonouredParameters([*COLUMNS, Column("top_a", torch.float32, value=_top_a, parameter=TOP_A)])
    given, plain = Request("one", (1,), Further(temperature=0.0, top_a=0.5)), Request("two", (1,), Further())
    for found in (ALL, carried):
        found.refuse_others(plain)
    carried.refuse_others(given)
    assert carried.level_of(given.params) is Sampling.TRUNCATED, "at temperature 0 too, unless it says otherwise"
    assert carried.level_of(SamplingParams(temperature=0.0)) is Sampling.GREEDY
    with pytest.raises(RequestError, match=r"top_a is 0.5, .*Leave it out, or set 0.0") as error:
        ALL.refuse_others(given)
    assert error.value.field == "top_a"


def _top_a(entry: Any) -> float:
    return float(getattr(entry.params, "top_a", 0.0))


def test_declarations_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(DeclarationError, match="SamplingParams has no field 'top_q'"):
        SamplingParameter("top_q", Sampling.TRUNCATED)
    with pytest.raises(DeclarationError, match="greedy sampling, which reads none"):
        SamplingParameter("top_k", Sampling.GREEDY)
    for group in (PENALISED, Group("some", lambda sequence: True)):
        with pytest.raises(DeclarationError, match=f"does not ask for its group, '{group.name}'"):
            Column("top_a", torch.float32, value=_top_a, parameter=TOP_A, group=group)
    Column("top_a", torch.float32, value=_top_a, parameter=TOP_A, group=Group.asked_by("top-a", TOP_A))
    other = SamplingParameter("top_k", Sampling.PENALISED, off=0)
    with pytest.raises(DeclarationError, match="'other' and another declare the parameter 'top_k' differently"):
        HonouredParameters([*COLUMNS, Column("other", torch.int32, value=lambda entry: 0, parameter=other)])


@dataclass(frozen=True)
class FurtherRows(SamplingRows):
    top_a: torch.Tensor


class Boasting(TorchSampler):
    """It names a parameter that it is not given."""

    columns = (*TorchSampler.columns, Column("top_a", torch.float32, value=_top_a, parameter=TOP_A))


class Wanting(TorchSampler):
    """It wants what it does not name."""

    rows = FurtherRows


def test_a_sampler_is_given_what_it_names() -> None:
    check_declared(TorchSampler())
    with pytest.raises(DeclarationError, match="names the column 'top_a', which its rows don't have"):
        check_declared(Boasting())
    with pytest.raises(DeclarationError, match="have 'top_a', of which it names no column"):
        check_declared(Wanting())


def test_the_samplers_name_their_own_columns() -> None:
    assert TorchSampler.columns == (TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED)
