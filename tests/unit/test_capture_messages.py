"""Messages of refused captures: the user's own line, the argument that is missing, keys that are tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fact_bodies import SLOTS, X
from phonograph import Extent, graphed
from phonograph.graphs.progress import silent


def told(body: Callable[..., Any], **options: Any) -> str:
    """Why a body is not recorded."""
    run = graphed(body, slots=SLOTS, bucketed="rows", buckets=[4], device="emulated", **options)
    (row,) = run.capture(silent).failures
    return str(row.error)


def sample(extent: Extent, seed: int) -> dict[str, Any]:
    return {"x": torch.ones(extent.used["rows"], 4), "k": 2.0}


def multiplied(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


def by_the_library(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * 2 if dataclasses.is_dataclass(k) else x


def copied(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * 2 if copy.copy(k) else x


@functools.singledispatch
def scale(k: Any) -> float:
    return float(k)


def dispatched(x: torch.Tensor, k: Any) -> torch.Tensor:
    return x * scale(k)


@pytest.mark.parametrize("body", [multiplied, by_the_library, copied, dispatched])
def test_a_live_argument_that_is_read_is_told_with_the_users_line(body: Callable[..., Any]) -> None:
    found = told(body, live=["k"], sample=sample)
    assert "the body reads the live argument 'k'" in found
    name = "scale" if body is dispatched and "in scale" in found else body.__name__
    assert re.search(rf"\(test_capture_messages\.py:\d+, in {name}\)", found), found


def test_a_required_argument_that_is_no_slot_is_told_as_such() -> None:
    found = told(multiplied)
    assert "the argument 'k' of multiplied" in found
    assert "sample=" in found
    run = graphed(multiplied, slots=SLOTS, bucketed="rows", buckets=[4], device="emulated")
    run.capture(silent)
    assert torch.equal(run(x=X, k=3.0), X * 3)


def test_an_error_in_the_library_is_told_with_the_users_line() -> None:
    def body(x: torch.Tensor) -> Any:
        return x * dataclasses.replace(3).scale  # type: ignore[type-var,attr-defined]

    assert re.search(r"\(test_capture_messages\.py:\d+, in body\)", told(body))


def test_a_key_that_is_a_tensor_is_told_in_few_words() -> None:
    key = torch.ones(4)
    counts = {key: 0}

    def body(x: torch.Tensor) -> Any:
        counts[key] += 1
        return x * counts[key]

    found = told(body)
    assert "counts[float32[4] at 0x" in found
    assert "tensor([" not in found
