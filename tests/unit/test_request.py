"""Requests: what a user may ask for, and what is said about the rest."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from phonograph.engine.requests.request import FinishReason, Request, SamplingParams
from phonograph.errors import PhonographError, RequestError


def test_the_defaults_are_the_field_s() -> None:
    params = SamplingParams().resolved()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.n) == (16, 1.0, 0, 1.0, 1)
    assert (params.stop, params.stop_token_ids, params.seed, params.logprobs) == ((), (), None, None)
    assert not params.ignore_eos
    assert params.logit_bias == {}


class TestWhatIsLeftOpen:
    MODEL = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)

    def test_the_model_s_own_holds_and_then_the_neutral_value(self) -> None:
        params = SamplingParams(max_tokens=3, top_k=5).resolved(self.MODEL)
        assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 1.0)
        assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.0, 1.1, 3)

    def test_what_is_said_counts_also_where_it_is_neutral(self) -> None:
        said = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        assert said.resolved(self.MODEL) == said
        assert said == SamplingParams().resolved()

    def test_a_request_leaves_nothing_open(self) -> None:
        assert Request("x", (1,)).params == SamplingParams().resolved()

    def test_both_are_hashable_and_differ(self) -> None:
        assert SamplingParams() != SamplingParams(temperature=1.0)
        assert len({SamplingParams(), SamplingParams(), SamplingParams(temperature=1.0)}) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 2.0),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", False),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -math.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("frequency_penalty", math.nan),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("n", 0),
        ("n", True),
        ("n", 1025),
        ("logprobs", -1),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("stop", "END"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", 3),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", (2.0,)),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {True: 1.0}),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})
    assert error.value.field == name


def test_the_message_says_what_was_found_and_expected() -> None:
    with pytest.raises(
        RequestError, match=r"top_p must be a finite number above 0 and at most 1, found 2\.0 \(float\)\."
    ):
        SamplingParams(top_p=2.0)
    with pytest.raises(
        RequestError, match=r"max_tokens must be a whole number of at least 0 and at most 9223372036854"
    ):
        SamplingParams(max_tokens=10**30)
    with pytest.raises(RequestError, match=r"temperature must be a finite number of at least 0"):
        SamplingParams(temperature=10**400)
    assert isinstance(SamplingParams(temperature=10**30).temperature, float), "what a message can carry"
    with pytest.raises(RequestError, match=r"max_tokens must be a whole number of at least 0, found True \(bool\)\."):
        SamplingParams(max_tokens=True)
    text: Any = "END"
    with pytest.raises(RequestError, match=r"Write \('END',\)\."):
        SamplingParams(stop=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e39),
        ("temperature", 1e-46),
        ("temperature", 1e-40),
        ("top_p", 1e-46),
        ("min_p", 1e-39),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", 1e-46),
        ("presence_penalty", -1e-50),
        ("frequency_penalty", 1e-50),
        ("logit_bias", {3: 1e-60}),
    ],
)
def test_what_the_device_could_not_hold_is_refused_by_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name}.* must fit into 32 bits, from 1\.18e-38 to 3\.4e\+38") as error:
        SamplingParams(**{name: value})
    assert error.value.field == name


def test_what_the_device_can_just_hold_is_allowed() -> None:
    least, greatest = 2.0**-126, 2.0**128 - 2.0**104
    SamplingParams(temperature=least, top_p=least, min_p=least, repetition_penalty=least, presence_penalty=-least)
    SamplingParams(temperature=greatest, repetition_penalty=greatest, logit_bias={1: -least})


def test_the_edges_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=0, presence_penalty=-2, frequency_penalty=2, seed=0, logprobs=0)


def test_lists_become_tuples_and_the_bias_a_copy() -> None:
    listed: Any = ["a"]
    bias = {3: 1.0}
    params = SamplingParams(stop=listed, logit_bias=bias)
    bias[3] = 2.0
    assert params.stop == ("a",)
    assert params.logit_bias == {3: 1.0}


def test_requests_travel_between_processes() -> None:
    request = Request("a", (1, 2), SamplingParams(logit_bias={1: 2.0}, stop=("x",)), priority=2, deadline=3.5)
    assert pickle.loads(pickle.dumps(request)) == request
    assert hash(request) == hash(pickle.loads(pickle.dumps(request)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("id", 3),
        ("prompt", "text"),
        ("prompt", (1, -2)),
        ("prompt", (1, 2.0)),
        ("prompt", (1, True)),
        ("prompt", (2**31,)),
        ("params", {"n": 2}),
        ("priority", 1.5),
        ("priority", True),
        ("deadline", math.nan),
        ("deadline", "soon"),
        ("arrival", math.inf),
        ("run_ahead", 1),
    ],
)
def test_a_wrong_request_is_refused_by_field(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"id": "a", "prompt": (1,)}
    with pytest.raises(RequestError, match=field):
        Request(**{**fields, field: value})


def test_a_long_value_is_shown_short() -> None:
    text: Any = "x" * 1000
    with pytest.raises(RequestError) as error:
        SamplingParams(stop_token_ids=text)
    assert len(str(error.value)) < 200


def test_a_request_error_is_a_value_error_of_ours() -> None:
    assert issubclass(RequestError, PhonographError)
    assert issubclass(RequestError, ValueError)


def test_finish_reasons_are_words() -> None:
    assert [reason.value for reason in FinishReason] == ["stop", "length", "cancelled", "deadline", "error"]
