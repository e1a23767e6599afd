"""Host time: decide, load and replay of the graph layer, and a whole steady step of the engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.measurement import Bench
from phonograph.bench.report import Row, Subject
from phonograph.bench.timing import host_seconds
from phonograph.bench.workloads import Prompts
from phonograph.devices import Device
from phonograph.engine.options import EngineOptions
from phonograph.graphs.graphed import graphed
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.graphs.phases.buckets import Buckets
from phonograph.graphs.progress import silent

SUBJECT = Subject(
    "host_time",
    "Host time of a step",
    "us",
    how="Median host time of a call, the device drained between rounds. A call of the graph layer decides, loads 8 "
    "slots of 44 sequences into a bucket of 48, and replays; floor: the replay alone; eager: the function itself. An "
    "eager call goes through the graph layer too, with and without --eager-copies. A "
    "step of the engine is scheduled, launched, collected and committed.",
)
_NUM_SEQS = 44


def measure(bench: Bench) -> None:
    """The graph layer, then the engine."""
    rounds = bench.choose("rounds", 100, 3)
    found = host_step(bench.device, rounds)
    for kind in ("numpy", "torch_cpu", "torch_device"):
        case: dict[str, int | str] = {"what": f"a call, values in {kind.replace('_', ' on ')}"}
        copies = {name: count for name, count in found[f"{kind}_copies_per_load"].items() if count}
        bench.report.add(Row(case, "full", "ours", found[f"{kind}_us"], {"copies": _listed(copies)}))
        bench.report.add(Row(case, "floor", "floor", found["replay_alone_us"]))
        if kind == "torch_device":
            bench.report.add(Row(case, "eager", "eager", found["eager_us"]))
    for how, figure in (("copied", "eager_copied_us"), ("used where they are", "eager_carried_us")):
        bench.report.add(Row({"what": f"an eager call, values on device {how}"}, "eager", "eager", found[figure]))
    bench.report.fact("decide_alone_us", found["decide_alone_us"])
    if bench.has_time("steps of the engine"):
        _measure_engine(bench, bench.choose("batches", (1, 32, 256), (1, 2)), rounds)


def _listed(copies: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in copies.items())


def host_step(device: Device, rounds: int) -> dict[str, Any]:
    """decide + load + replay for a decode-like phase of 8 host slots, 44 sequences in a bucket of 48."""
    names = ["tokens", "positions", "lengths", "rows", "seeds", "top_k"]
    slots = [Slot(name, ("seqs",), torch.int64, pad=Pad.fill(0)) for name in names]
    slots += [Slot("temperature", ("seqs",), torch.float32), Slot("top_p", ("seqs",), torch.float32)]

    def body(**inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([value.float() for value in inputs.values()]).sum(0)

    step = graphed(body, slots=slots, bucketed="seqs", buckets=Buckets.of(48), device=device, outputs="view")
    step.capture(silent)
    kinds = {name: np.float32 if name in ("temperature", "top_p") else np.int64 for name in [s.name for s in slots]}
    arrays = {name: np.arange(_NUM_SEQS).astype(kind) for name, kind in kinds.items()}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    placed = {name: tensor.to(device.torch_device) for name, tensor in tensors.items()}
    figures: dict[str, Any] = {}
    for kind, batch in (("numpy", arrays), ("torch_cpu", tensors), ("torch_device", placed)):
        counts = step.runner.registry.counts
        before = (counts.transfers, counts.grouped, counts.plain)
        step(**batch)
        after = (counts.transfers, counts.grouped, counts.plain)
        figures[f"{kind}_copies_per_load"] = dict(
            zip(("transfers", "grouped", "plain"), (b - a for a, b in zip(before, after, strict=True)), strict=True)
        )
        figures[f"{kind}_us"] = round(host_seconds(device, partial(step, **batch), rounds) * 1e6, 1)
    key = step.runner.captured[0]
    figures["replay_alone_us"] = round(host_seconds(device, step.runner.recording(key).replay, rounds) * 1e6, 1)
    figures["decide_alone_us"] = round(host_seconds(device, lambda: step.runner.decide(arrays), rounds) * 1e6, 2)
    figures["eager_us"] = round(host_seconds(device, partial(body, **placed), rounds) * 1e6, 1)
    return figures | eager_calls(device, slots, body, placed, rounds)


def eager_calls(
    device: Device, slots: list[Slot], body: Callable[..., torch.Tensor], batch: dict[str, torch.Tensor], rounds: int
) -> dict[str, float]:
    """The same call without a graph: with its values copied into buffers, and used where they are."""
    times = {}
    for name, copies in (("eager_copied_us", True), ("eager_carried_us", False)):
        call = graphed(
            body,
            slots=slots,
            bucketed="seqs",
            buckets=[48],
            backend="disabled",
            device=device,
            outputs="view",
            eager_copies=copies,
        )
        times[name] = round(host_seconds(device, partial(call, **batch), rounds) * 1e6, 1)
    return times


def _measure_engine(bench: Bench, batches: tuple[int, ...], rounds: int) -> None:
    most = max(batches)
    options = EngineOptions(
        max_seqs=most, max_tokens=max(64, most), max_len=256, cache_tokens=256 * most, prefix_cache=False
    )
    llm = bench.open(options, {"decode": "full", "prefill": "disabled"}, {"decode": batches})
    driver, prompts = EngineDriver(llm), Prompts(bench.config.vocab)
    # The same graph for the null row, which stays where it is however often it is replayed.
    llm.executor.heartbeat()
    idle = llm.executor.runners["idle"]
    replay = host_seconds(bench.device, idle.recording(idle.captured[0]).replay, min(rounds, 5))
    for num_seqs in batches:
        if not bench.has_time(f"steps of the engine, {num_seqs} sequences"):
            continue
        sequences = driver.seat([prompts.one(8) for _ in range(num_seqs)], 200)
        driver.steady(3)
        times = driver.host_alone(min(rounds, 100))
        driver.drain(sequences)
        case: dict[str, int | str] = {"what": f"a step of the engine, sequences: {num_seqs}"}
        bench.report.add(Row(case, "full", "ours", statistics.median(times) * 1e6))
        bench.report.add(Row(case, "floor", "floor", replay * 1e6))
