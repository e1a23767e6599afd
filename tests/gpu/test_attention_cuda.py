"""Attention on a GPU: bfloat16 at real sizes, and one recording for all lengths, tile lists and orders of arrival."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged import DEVICE, LAUNCHES, Case, Heads, case_of, poison_dead, spans_of

pytest.importorskip("triton")

from phonograph.devices import open_device
from phonograph.engine.kernel_selection import default_overlap
from phonograph.engine.ops.attention.launch_config import HOPPER, Launch, Launches
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.attention.triton import TritonAttention
from phonograph.engine.ops.queries import Span

pytestmark = pytest.mark.gpu

QWEN3 = Heads(32, 8, 128)
SMOLLM2 = Heads(9, 3, 64)

STEPS = {
    "decode 1": ([(700, 1)], True),
    "decode 40": ([(17 * i, 1) for i in range(40)], True),
    "prefill 1": ([(0, 600)], False),
    "prefill 5 behind prefixes": ([(100, 200), (0, 33), (64, 1), (511, 97), (3, 400)], False),
    "mixed": ([(900, 1), (31, 1), (0, 1), (0, 300), (200, 7)], False),
}


def near(found: torch.Tensor, case: Case, window: int | None = None) -> None:
    """Within bfloat16 of the reference in float32."""
    wide = replace(case.cache, keys=case.cache.keys.float(), values=case.cache.values.float())
    wanted = replace(case, cache=wide, q=case.q.float()).run(ReferenceAttention(), 1, window)
    assert found.isfinite().all()
    assert ((found.float() - wanted).norm() / wanted.norm()).item() <= 1e-2


def with_spans(case: Case, spans: list[Span]) -> Case:
    return replace(case, queries=replace(case.queries, spans=tuple(spans)))


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [QWEN3, SMOLLM2], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_bfloat16_at_real_sizes(step: str, heads: Heads, page_size: int, window: int | None) -> None:
    sequences, decode = STEPS[step]
    spans = spans_of(*sequences)
    case = case_of(spans, heads, padding=3, page_size=page_size, decode=decode, dtype=torch.bfloat16)
    near(case.run(TritonAttention(LAUNCHES), 1, window), with_spans(case, spans), window)


@pytest.mark.parametrize("launches", [HOPPER.decode, HOPPER.prefill, HOPPER.narrow])
@pytest.mark.parametrize("decode", [True, False])
def test_every_launch_of_the_table_is_right(launches: tuple[Launch, ...], decode: bool) -> None:
    spans = spans_of(*((40 * i, 1 if decode else 50) for i in range(12)))
    case = case_of(spans, QWEN3, page_size=16, decode=decode, dtype=torch.bfloat16)
    for launch in launches:
        only = replace(launch, max_tokens=1 << 30)
        near(case.run(TritonAttention(Launches((only,), (only,))), 1), with_spans(case, spans))


def test_float32_is_exact() -> None:
    spans = spans_of((200, 40), (70, 1))
    case = case_of(spans, QWEN3, page_size=16)
    torch.testing.assert_close(
        case.run(TritonAttention(LAUNCHES)), case.run(ReferenceAttention()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("decode", [True, False])
def test_one_recording_serves_all_lengths(decode: bool) -> None:
    """Splits that are empty at capture are full at replay, and the other way round; the result is that of eager."""
    given = spans_of(*[(900, 1)] * 4 if decode else [(836, 64)])
    first = case_of(given, QWEN3, page_size=16, decode=decode, padding=4, dtype=torch.bfloat16)
    attention, size = TritonAttention(LAUNCHES, overlap=default_overlap(open_device(DEVICE).hardware)), first.q.shape[0]
    first.run(attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step = attention.prepare(first.cache, first.queries, QWEN3.queries)
        outs = [step.attend(layer, first.q, None) for layer in (0, 1)]
    others = [[(0, 1)], [(900, 1), (1, 1), (300, 1)]] if decode else [[(0, 7), (800, 1), (5, 30)], [(850, 50)]]
    for sequences in others:
        rows = [row + 1 for row, (_, count) in enumerate(sequences) for _ in range(count)]
        places = [start + at for start, count in sequences for at in range(count)]
        padding = [0] * (size - len(rows))
        first.queries.rows.copy_(torch.tensor(rows + padding))
        first.queries.positions.copy_(torch.tensor(places + padding))
        eager = attention.prepare(first.cache, first.queries, QWEN3.queries)
        for _ in range(3):
            graph.replay()
            for layer, out in enumerate(outs):
                assert torch.equal(out, eager.attend(layer, first.q, None))


def test_the_order_of_arrival_does_not_matter() -> None:
    given = spans_of(*((4000 - i, 1) for i in range(3)))
    case = case_of(given, QWEN3, page_size=16, decode=True, dtype=torch.bfloat16)
    step = TritonAttention(LAUNCHES).prepare(case.cache, case.queries, QWEN3.queries)
    once = step.attend(0, case.q, None)
    for _ in range(200):
        assert torch.equal(step.attend(0, case.q, None), once)


@pytest.mark.parametrize("step", STEPS)
def test_poison_in_dead_pages_does_not_matter(step: str) -> None:
    sequences, decode = STEPS[step]
    case = case_of(spans_of(*sequences), QWEN3, padding=5, page_size=16, decode=decode, dtype=torch.bfloat16)
    clean = case.run(TritonAttention(LAUNCHES))
    poison_dead(case, float("nan"))
    assert torch.equal(case.run(TritonAttention(LAUNCHES)), clean)
