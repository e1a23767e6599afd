"""A trace whose steps, gaps, launches and copies are known."""

from __future__ import annotations

from typing import Any

from phonograph.bench.profiling import step_profile


def event(category: str, name: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}


def trace(num_steps: int) -> list[dict[str, Any]]:
    """Steps of 100 us: two kernels of 40 us with 5 us between them, a copy to the host, 13 us of nothing."""
    events = [{"ph": "M", "name": "process_name"}, event("cpu_op", "aten::add", 0, 5)]
    for step in range(num_steps):
        at = 1000 + 100 * step
        events += [
            event("cuda_runtime", "cudaGraphLaunch", at - 60, 3),
            event("cuda_runtime", "cudaEventRecord", at - 55, 1),
            event("kernel", "gemm", at, 40),
            event("kernel", "attention", at + 45, 40),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 86, 1),
        ]
        if step == 3:
            events.append(event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at - 5, 1))
    return events


def test_a_step_is_what_lies_between_two_copies_to_the_host() -> None:
    found = step_profile(trace(10), 10)
    assert found.steps == 9
    assert found.period_us == 100
    assert found.gap_us == 15
    assert found.kernels == 2
    assert found.launches == 1
    assert found.copies_to_device == 0
    assert found.copies_to_host == 1
    # 9 steps of 80 us of kernels, from the first kernel to the end of the last: 8 * 100 + 85 us.
    assert found.idle_share == round(1 - 720 / 885, 3)
    assert found.top_kernels_us == {"gemm": 40, "attention": 40}


def test_without_copies_to_the_host_a_step_is_a_graph() -> None:
    events = [entry for entry in trace(10) if "DtoH" not in entry["name"]]
    for entry in events:
        if entry.get("cat") == "kernel":
            entry["args"] = {"correlation": int(entry["ts"]) // 100}
    found = step_profile(events, 10)
    assert (found.steps, found.period_us, found.gap_us, found.kernels) == (9, 100, 15, 2)
    assert found.copies_to_host == 0


def test_kernels_that_overlap_count_once() -> None:
    events = trace(4) + [event("kernel", "beside", 1000 + 100 * step + 5, 30) for step in range(4)]
    assert step_profile(events, 4).idle_share == step_profile(trace(4), 4).idle_share


def test_a_trace_without_a_whole_step_says_so() -> None:
    assert step_profile([], 1).steps == 0
    assert step_profile(trace(1), 1).steps == 0
