"""Bounds of a request: each one refused by name with the limit and what was found, and listed in the documentation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.server.http import request_limits as limits
from phonograph.server.http.json_shape import shape_of
from phonograph.server.http.request_limits import ModelBounds, json_size
from server.conftest import Server
from server.test_http import CHAT, HELLO, TEXT, error_of

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}

TOO_MUCH: list[tuple[str, dict[str, Any], str, str]] = [
    (TEXT, {"prompt": "x" * 5000}, "found 5,000 characters; at most 4,608", "prompt"),
    (TEXT, {"prompt": ["x", "x" * 5000]}, "found 5,000 characters; at most 4,608", "prompt[1]"),
    ("/tokenize", {"prompt": "x" * 5000}, "found 5,000 characters; at most 4,608", "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "characters; at most 4,608", "messages"),
    (CHAT, {"messages": HELLO * 2049}, "found 2,049 messages; at most 2,048", "messages"),
    ("/tokenize", {"messages": HELLO * 2049}, "found 2,049 messages; at most 2,048", "messages"),
    (CHAT, {"messages": HELLO, "tools": [TOOL] * 129}, "found 129 tools; at most 128", "tools"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": "x" * 20000}}, "at most 16,384", "chat_template_kwargs"),
    (TEXT, {"prompt": "x", "stop": "x" * 1025}, "found 1,025 characters; at most 1,024", "stop"),
    (TEXT, {"prompt": "x", "stop": ["a", "x" * 1025]}, "found 1,025 characters; at most 1,024", "stop[1]"),
    (TEXT, {"prompt": "x", "stop_token_ids": [1] * 65}, "found 65 token ids; at most 64", "stop_token_ids"),
    (TEXT, {"prompt": "x", "logit_bias": dict.fromkeys(range(301), 1)}, "301 tokens; at most 300", "logit_bias"),
    (TEXT, {"prompt": "x", "guided_choice": ["a"] * 1025}, "found 1,025 texts; at most 1,024", "guided_choice"),
    (TEXT, {"prompt": "x", "guided_choice": ["a" * 70000]}, "at most 65,536", "guided_choice"),
    (TEXT, {"prompt": "x", "guided_regex": "a" * 70000}, "found 70,000 characters", "guided_regex"),
    (TEXT, {"prompt": "x", "guided_grammar": "a" * 70000}, "found 70,000 characters", "guided_grammar"),
    (TEXT, {"prompt": "x", "guided_json": {"a": "b" * 70000}}, "at most 65,536", "guided_json"),
    (TEXT, {"prompt": "x", "response_format": {"type": "text", "a": "b" * 70000}}, "at most 65,536", "response_format"),
    (TEXT, {"prompt": "x", "metadata": {"a": ["b"] * 20000}}, "at most 16,384", "metadata"),
    (TEXT, {"prompt": "x", "user": "b" * 1025}, "found 1,025 characters; at most 1,024", "user"),
    (TEXT, {"prompt": "x", "model": "b" * 1025}, "found 1,025 characters; at most 1,024", "model"),
    (
        CHAT,
        {"messages": HELLO, "n": 128, "logprobs": True, "top_logprobs": 20},
        "found 1,376,256 entries (`n` × `max_tokens` × (1 + `top_logprobs`)); at most 1,048,576",
        "logprobs",
    ),
    (TEXT, {"prompt": [[1]] * 250, "n": 2}, "500 sequences; expected 1 to 308", "n"),
]


@pytest.mark.parametrize(("path", "body", "says", "param"), TOO_MUCH, ids=lambda value: str(value)[:40])
def test_too_much_is_refused_with_the_limit_and_what_was_found(
    tiny_server: Server, path: str, body: dict[str, Any], says: str, param: str
) -> None:
    error = error_of(tiny_server.post(path, body), 400)
    assert says in error["message"]
    assert error["param"] == param


def test_a_body_of_too_many_lists_is_refused_before_it_is_decoded(tiny_server: Server) -> None:
    error = error_of(tiny_server.post(TEXT, {"prompt": "x", "metadata": {"a": [[]] * 33000}}), 400)
    assert "found 33,003 lists and objects; at most 32,768" in error["message"]


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ("9e306," * 65, "found 65 numbers with an exponent; at most 64"),
        ("1E-310," * 65, "found 65 numbers with an exponent; at most 64"),
        ("9007199254740993.0," * 4097, "found 4,097 numbers with a fraction; at most 4,096"),
        ("9" * 5000 + ",", "found 4,980 digits of numbers after their 20th; at most 4,096"),
    ],
    ids=["large", "small", "fractions", "digits"],
)
def test_numbers_that_are_slow_to_read_are_counted_before_they_are_decoded(
    tiny_server: Server, numbers: str, says: str
) -> None:
    headers = {"Content-Type": "application/json"}
    data = f'{{"prompt": "x", "metadata": {{"a": [{numbers} 1]}}}}'.encode()
    said = httpx.post(tiny_server.url + TEXT, content=data, headers=headers, timeout=60)
    assert says in error_of(said, 400)["message"]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f"[{numbers} 1]"}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    if len(numbers) < 4000:  # else there are too many characters
        assert says in error_of(tiny_server.post(CHAT, {"messages": messages}), 400)["message"]


@pytest.mark.parametrize(
    "numbers",
    [
        "9e306," * 64,
        "1e-310," * 64,
        "9007199254740993.0," * 4096,
        "1e23," * 64,
        "9" * 4116 + ",",
        "0." + "1" * 4000 + ",",
    ],
    ids=lambda numbers: numbers[:6],
)
def test_what_is_within_the_bounds_is_decoded_in_no_time(numbers: str) -> None:
    """Decoding is one call that holds Python's lock."""
    data = f"[{numbers} 1]".encode()
    ModelBounds.of(8192, 81, 10, None).check_shape(shape_of(data, 10**9))
    seconds = []
    for _ in range(3):
        begin = time.thread_time()
        msgspec.json.decode(data)
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 0.02  # 3 ms at most; the machine may be slow


def test_a_prompt_that_could_fit_is_never_too_many_characters() -> None:
    bounds = ModelBounds.of(max_len=8192, longest_token=81, max_prompts=10, max_chars=None)
    bounds.prompt_chars.check(8192 * 81)
    assert ModelBounds.of(8192, 81, 10, max_chars=1000).prompt_chars.most == 1000


def test_the_documentation_lists_every_bound() -> None:
    assert "\n".join(limits.table()) in DOCS.read_text(encoding="utf-8")
    named = {value for name, value in vars(limits).items() if isinstance(value, limits.Bound)}
    assert named == set(limits.FIXED)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('a"\\[]{},:\n')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('a"\\[,')), inner, max_size=4),
)


def numbers_in(value: object) -> Iterator[str]:
    """All numbers, as they are written."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def counted(value: object) -> tuple[int, int, int]:
    """Values, lists and depth, by looking at everything; what is empty counts twice."""
    if not isinstance(value, list | dict):
        return 1, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)] or [(1, 0, 0)]
    values, lists, depths = zip(*parts, strict=True)
    return 1 + sum(values), 1 + sum(lists), 1 + max(depths)


@given(JSON, st.integers(0, 70_000))
def test_the_shape_of_a_body_is_known_without_decoding_it(value: object, padding: int) -> None:
    data = json.dumps([value, " " * padding, value]).encode()  # values and escapes cross the blocks
    found = shape_of(data, 10**9)
    assert (found.values, found.containers, found.depth) == counted([value, " " * padding, value])
    numbers = list(numbers_in([value, value]))
    assert found.exponents == sum("e" in number for number in numbers)
    assert found.fractions == sum("." in number for number in numbers)
    lengths = [len(number.lstrip("-").partition("e")[0]) for number in numbers]
    assert found.further_digits == sum(max(0, length - 20) for length in lengths)


@pytest.mark.parametrize("number", ["9" * 5000, "0." + "1" * 5000, "-" + "9" * 5000 + "e3"])
@pytest.mark.parametrize("before", [0, 65_500, 65_530])
def test_a_number_may_lie_across_blocks(number: str, before: int) -> None:
    found = shape_of(f'["{"x" * before}",{number},true,"9e3.5",false]'.encode(), 10**9)
    assert found.further_digits == len(number.lstrip("-").partition("e")[0]) - 20
    assert (found.exponents, found.fractions) == ("e" in number, "." in number)


@given(JSON)
def test_the_size_of_a_value_counts_texts_names_and_values(value: object) -> None:
    def size(found: object) -> int:
        if isinstance(found, str):
            return 1 + len(found)
        if isinstance(found, dict):
            return 1 + sum(len(name) + size(part) for name, part in found.items())
        return 1 + (sum(map(size, found)) if isinstance(found, list) else 0)

    assert json_size(value, 10**9) == size(value)
