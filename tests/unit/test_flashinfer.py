"""What FlashInfer is told of a step, by a stand-in that does what its wrapper promises, in float64 on the CPU.

The real one is tested on a GPU, in tests/gpu.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from paged import Case, Heads, by_hand, case_of, spans_of
from phonograph.devices import open_device
from phonograph.engine.ops.attention.apart import ApartAttention
from phonograph.engine.ops.attention.flashinfer import FlashInferAttention
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.errors import DeviceError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real one is tested where there is a GPU")

STEPS = {
    "one": [(0, 13)],
    "behind prefixes": [(10, 12), (0, 3), (6, 1), (21, 9)],
    "mixed": [(30, 1), (3, 1), (0, 1), (0, 9), (8, 7)],
}


@dataclass
class StandIn:
    """`BatchPrefillWithPagedKVCacheWrapper`: plans by lists of starts, pages and last lengths, and attends by them."""

    workspace: torch.Tensor
    layout: str
    sequences: list[tuple[slice, torch.Tensor, int]] = field(default_factory=list)
    window_left: int = -1

    def plan(self, tokens: Any, pages: Any, indices: Any, last: Any, *shape: int, **named: Any) -> None:
        size, seq_lens = shape[3], named["seq_lens"]
        assert self.layout == "NHD"
        assert named["causal"]
        assert named["q_data_type"] == named["kv_data_type"]
        assert indices.dtype == tokens.dtype == pages.dtype == last.dtype == torch.int32
        self.window_left, self.sequences = named["window_left"], []
        for index, length in enumerate(seq_lens.tolist()):
            first, end = int(pages[index]), int(pages[index + 1])
            assert length == (end - first - 1) * size + int(last[index])
            span = slice(int(tokens[index]), int(tokens[index + 1]))
            self.sequences.append((span, indices[first:end].long(), length))

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        for span, pages, length in self.sequences:
            keys, values = (part[pages].flatten(0, 1)[:length].double() for part in cache)
            group = q.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[span].double(), keys) * q.shape[2] ** -0.5
            count = span.stop - span.start
            age = torch.arange(length - count, length)[:, None] - torch.arange(length)
            seen = (age >= 0) & ((age <= self.window_left) | torch.tensor(self.window_left < 0))
            mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[span] = torch.einsum("hqk,khd->qhd", mixed, values).to(out.dtype)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return FlashInferAttention(open_device("emulated"), ReferenceAttention())


def told(step: str) -> Case:
    spans = spans_of(*STEPS[step])
    case = case_of(spans, Heads(6, 2, 16), padding=5)
    return replace(case, queries=replace(case.queries, spans=tuple(spans)))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("step", STEPS)
def test_every_sequence_sees_its_own_pages(attention: FlashInferAttention, step: str, window: int | None) -> None:
    case = told(step)
    torch.testing.assert_close(case.run(attention, 1, window).double(), by_hand(case, 1, window), rtol=1e-5, atol=1e-5)


def test_windows_of_one_step_keep_their_plans(attention: FlashInferAttention) -> None:
    case = told("mixed")
    step = attention.prepare(case.cache, case.queries, 6)
    for layer, window in ((0, None), (1, 5), (0, None), (1, 5)):
        found = step.attend(layer, case.q, window)
        torch.testing.assert_close(found[: case.used].double(), by_hand(case, layer, window), rtol=1e-5, atol=1e-5)
        assert not found[case.used :].any(), "padding"


def test_the_result_goes_where_it_belongs(attention: FlashInferAttention) -> None:
    case = told("one")
    out = torch.full_like(case.q, float("nan"))
    assert attention.prepare(case.cache, case.queries, 6).attend(0, case.q, None, out) is out
    assert out.isfinite().all()


def test_without_spans_the_inner_attention_attends(attention: FlashInferAttention) -> None:
    case = told("mixed")
    plain = replace(case, queries=replace(case.queries, spans=None))
    assert torch.equal(plain.run(attention), plain.run(ReferenceAttention()))


@pytest.mark.parametrize("num_untold", [1, 3])
def test_what_spans_tell_nothing_of_is_left_to_the_inner_attention(
    attention: FlashInferAttention, num_untold: int
) -> None:
    case = told("behind prefixes")
    assert case.queries.spans is not None
    count = sum(span.count for span in case.queries.spans[:num_untold])
    queries = replace(case.queries, spans=case.queries.spans[num_untold:], spans_from=count)
    found = replace(case, queries=queries).run(ApartAttention(attention))
    torch.testing.assert_close(found.double(), by_hand(case), rtol=1e-5, atol=1e-5)


def test_without_the_library_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(DeviceError, match="pip install flashinfer-python"):
        FlashInferAttention(open_device("emulated"), ReferenceAttention())
