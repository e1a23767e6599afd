"""Cost of a graph break: graphs with gaps between them against one graph, empty and around attention."""

from __future__ import annotations

import statistics

import torch

from phonograph.bench.figures import rounded
from phonograph.bench.measurement import Bench
from phonograph.bench.prefill import PrefillCases, open_prefill
from phonograph.bench.report import Row, Subject
from phonograph.bench.timing import device_seconds
from phonograph.devices import Device
from phonograph.graphs.graphed import graphed
from phonograph.graphs.inputs.slot import Slot
from phonograph.graphs.phases.breaks import break_graph
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.progress import silent

SUBJECT = Subject(
    "breaks",
    "Breaks",
    "us",
    how="Median time on the device. 370 small kernels in one graph, and in 37 with nothing in the gaps; a prefill "
    "step of the engine as one graph, and with attention between graphs, one gap a layer.",
)
_NUM_KERNELS, _KERNELS_PER_GRAPH = 370, 10


def measure(bench: Bench) -> None:
    """Empty breaks, then prefill steps."""
    rounds = bench.choose("rounds", 50, 2)
    _measure_empty(bench, rounds)
    sizes = bench.choose("tokens", (32, 128, 512, 2048), (8,))
    for backend in ("full", "breakable"):
        if bench.has_time(f"prefill steps, {backend}"):
            _measure_prefill(bench, backend, sizes)
    _add_cost_of_a_break(bench)


def empty_breaks(device: Device, rounds: int) -> dict[str, float]:
    """Seconds on the device of the same small kernels in 1 graph (`full`) and in 37 (`breakable`)."""

    def body(x: torch.Tensor, broken: bool) -> torch.Tensor:
        for index in range(1, _NUM_KERNELS + 1):
            x = x + 1.0
            if broken and index % _KERNELS_PER_GRAPH == 0 and index < _NUM_KERNELS:
                break_graph()
        return x

    x = torch.randn(8, 64, device=device.torch_device)
    times = {}
    for backend in ("full", "breakable"):
        run = graphed(
            lambda x, broken=backend == "breakable": body(x, broken),
            slots=[Slot("x", ("seqs", 64), torch.float32)],
            bucketed="seqs",
            buckets=Buckets.of(8, exact=True),
            backend="breakable",
            device=device,
            outputs="view",
        )
        run.capture(silent)
        run(x)
        recording = run.runner.recording(run.runner.captured[0])
        times[backend] = device_seconds(device, recording.replay, rounds)
    return times


def _measure_empty(bench: Bench, rounds: int) -> None:
    for backend, seconds in empty_breaks(bench.device, rounds).items():
        num_breaks = _NUM_KERNELS // _KERNELS_PER_GRAPH - 1
        figures = {"breaks": num_breaks if backend == "breakable" else 0}
        bench.report.add(Row({"what": f"{_NUM_KERNELS} small kernels"}, backend, "ours", seconds * 1e6, figures))


def _measure_prefill(bench: Bench, backend: str, sizes: tuple[int, ...]) -> None:
    llm = open_prefill(bench, backend, 0, sizes, (1, 8) if not bench.settings.quick else (1,))
    cases = PrefillCases(bench, llm, 0)
    num_breaks = bench.config.num_layers if backend == "breakable" else 0
    for num_tokens in sizes:
        for num_requests in (1, 8):
            if num_tokens >= 8 * num_requests and bench.has_time(f"{num_tokens} tokens, {backend}"):
                times = [time.device for time in cases.steps(num_tokens, num_requests)]
                plural = "s" if num_requests > 1 else ""
                case = {"what": f"prefill of {num_tokens} tokens, {num_requests} request{plural}"}
                bench.report.add(Row(case, backend, "ours", statistics.median(times) * 1e6, {"breaks": num_breaks}))


def _add_cost_of_a_break(bench: Bench) -> None:
    """The difference between the two, shared by the breaks."""
    rows = {(row.case["what"], row.series): row for row in bench.report.rows}
    found = {}
    for (what, series), row in rows.items():
        whole = rows.get((what, "full"))
        if series == "breakable" and whole is not None:
            found[str(what)] = rounded((row.value - whole.value) / row.figures["breaks"], 3)
    bench.report.fact("one_break_us", found)
