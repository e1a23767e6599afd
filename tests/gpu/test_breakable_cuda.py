"""Breaks on a real GPU: side streams, and memory that is reused from gap to gap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phonograph import Buckets, Slot, break_graph, graph_break, graphed
from phonograph.graphs.progress import silent

pytestmark = pytest.mark.gpu


@graph_break
def host_side(x: torch.Tensor) -> torch.Tensor:
    """Reads from the host: no graph could hold it."""
    return x * (1.0 + 0.0 * x.sum().item())


def test_side_streams_are_joined_before_a_break_and_forked_again_after_it() -> None:
    side = torch.cuda.Stream()
    weight = torch.randn(512, 512, device="cuda") / 23

    def body(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            left = x
            for _ in range(20):
                left = (left @ weight).tanh()
        right = host_side(x + 1)  # the side stream has not been joined here
        with torch.cuda.stream(side):
            left = left * 2  # and goes on in the next graph
        break_graph()
        main.wait_stream(side)
        return left + right

    slot = Slot("x", ("seqs", 512), torch.float32)
    run = graphed(
        body, slots=[slot], bucketed="seqs", buckets=Buckets.of(64, exact=True), backend="breakable", device="cuda"
    )
    report = run.capture(silent)
    assert not report.failures, report
    assert report.rows[0].num_graphs == 3
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(64, 512, device="cuda")
        wanted = x
        for _ in range(20):
            wanted = (wanted @ weight).tanh()
        torch.testing.assert_close(run(x=x), wanted * 2 + x + 1)


def test_gap_outputs_are_reused_by_the_pool_from_layer_to_layer_and_bucket_to_bucket() -> None:
    width, rows, layers = 4096, 1024, 16
    one = width * rows * 4

    def body(x: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = host_side(x * 1.5) + 1
        return x[:, :1].clone()

    before = torch.cuda.memory_reserved()
    run = graphed(
        body,
        slots=[Slot("x", ("tokens", width), torch.float32)],
        bucketed="tokens",
        buckets=Buckets.of(256, 512, rows),
        backend="breakable",
        device="cuda",
    )
    report = run.capture(silent)
    assert not report.failures, report
    torch.cuda.empty_cache()
    grown = torch.cuda.memory_reserved() - before
    assert grown < 8 * one, f"{grown / one:.1f} activations of the largest bucket, {layers} layers"


def test_a_wait_inside_the_body_is_found_and_unwound_at_capture() -> None:
    """torch's debug mode does not see an explicit synchronize: only capture itself fails."""

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + torch.rand_like(x) * 0
        if x.shape[0] == 4:
            torch.cuda.synchronize()
        return y

    run = graphed(
        body, slots=[Slot("x", ("seqs", 8), torch.float32)], bucketed="seqs", buckets=Buckets.of(2, 4, 8), device="cuda"
    )
    report = run.capture(silent)
    assert [row.key.size for row in report.failures] == [4]
    assert "torch.cuda.synchronize()" in str(report.failures[0].error)
    torch.rand(4, device="cuda")
    for count in (1, 4, 8):
        x = torch.randn(count, 8, device="cuda")
        torch.testing.assert_close(run(x=x), x * 2)
    assert run.stats.replays.total() == 2


def test_a_step_of_host_values_is_one_transfer_and_one_launch() -> None:
    slots = [Slot(name, ("seqs",), torch.float32) for name in "abcdefgh"]

    def body(**inputs: Any) -> torch.Tensor:
        return torch.stack(list(inputs.values())).sum(0)

    run = graphed(body, slots=slots, bucketed="seqs", buckets=Buckets.of(8), device="cuda", outputs="view")
    run.capture(silent)
    batch = {name: [1.0, 2.0, 3.0] for name in "abcdefgh"}
    run(**batch)
    with torch.profiler.profile() as profile:
        run(**batch)
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("cudaMemcpyAsync", 0) == 1
    assert calls.get("cudaGraphLaunch", 0) == 1
    assert calls.get("cudaLaunchKernel", 0) == 0
