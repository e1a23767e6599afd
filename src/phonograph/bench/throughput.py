"""Throughput: output tokens a second of W1, and latencies of a mix of arriving requests, without a server."""

from __future__ import annotations

import time
from dataclasses import replace

from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.figures import percentiles, rounded
from phonograph.bench.floors import Floors
from phonograph.bench.measurement import Bench, greedy, row_of
from phonograph.bench.report import Row, Subject
from phonograph.bench.workloads import MIX, MOST_ID, Batch, LogNormal, Workload, mix, w1
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions

SUBJECT = Subject(
    "throughput",
    "Throughput",
    "tokens/s",
    "higher",
    how="Output tokens over wall time. W1: 256 prompts of 32 to 511 tokens, 128 new each, all at once, greedy, no "
    "prefix cache, the second run. Mix: log-normal lengths, Poisson arrivals. Ceiling of W1: matrix products of the "
    "prefill in steps of the largest size and of 127 decode steps, plus keys and values at read bandwidth.",
)


def measure(bench: Bench) -> None:
    """W1 on every backend, and the mix on the first."""
    for index, backend in enumerate(bench.backends("full", "disabled")):
        if bench.has_time(f"W1, {backend}"):
            _measure_backend(bench, backend, is_first=index == 0)


def _measure_backend(bench: Bench, backend: str, *, is_first: bool) -> None:
    options = EngineOptions(prefix_cache=False)
    if bench.settings.quick:
        options = replace(options, max_seqs=4, max_tokens=32, max_len=128)
    llm = bench.open(options, dict.fromkeys(("decode", "prefill"), backend))
    ids = min(MOST_ID, bench.config.vocab)
    batch = w1(4, 8, 8, 24, ids) if bench.settings.quick else w1(ids=ids)
    _measure_w1(bench, llm, batch, backend)
    if is_first:
        _add_floor(bench, llm, batch)
        for rate in bench.choose("rates", (4.0, 16.0, 32.0), (40.0,)):
            if bench.has_time(f"mix at {rate:g} requests/s"):
                _measure_mix(bench, llm, rate, ids, backend)


def _measure_w1(bench: Bench, llm: LLM, batch: Batch, backend: str) -> None:
    runs, busy = [], {}
    for _ in range(bench.choose("runs", 2, 2)):
        spent = llm.executor.timing.seconds
        before, begin = llm.core.scheduler.counts, time.perf_counter()
        done = llm.generate(list(batch.prompts), greedy(batch.new_tokens))
        runs.append(time.perf_counter() - begin)
        total = llm.executor.timing.seconds
        busy = {" ".join(key): rounded(value - spent.get(key, 0.0)) for key, value in total.items()}
        preempted = llm.core.scheduler.counts.preemptions - before.preemptions
    num_tokens = sum(len(completion.tokens) for completion in done)
    figures = {
        "seconds": rounded(runs[-1]),
        "first_run_seconds": rounded(runs[0]),
        "output_tokens": num_tokens,
        "prompt_tokens": batch.num_prompt_tokens,
        "device_busy_share": rounded(sum(busy.values()) / runs[-1], 3),
        "preemptions": preempted,
        "device_seconds": busy,
    }
    bench.report.add(row_of(backend, {"workload": "W1"}, num_tokens / runs[-1], figures))


def _add_floor(bench: Bench, llm: LLM, batch: Batch) -> None:
    """What products and KV reads alone would take, as if prompts came first and then all decoded together."""
    floors = Floors(bench.device, llm.executor.model)
    num_seqs, chunk = len(batch.prompts), llm.limits.max_tokens
    prompts = batch.num_prompt_tokens / chunk * floors.gemms(chunk, min(num_seqs, chunk))
    decode_steps = batch.new_tokens - 1
    decodes = decode_steps * floors.gemms(num_seqs, num_seqs)
    read = batch.num_prompt_tokens * decode_steps + num_seqs * decode_steps * batch.new_tokens / 2
    keys_and_values = floors.kv_read(read)
    seconds = prompts + decodes + keys_and_values
    figures = {
        "seconds": rounded(seconds),
        "prompt_gemms_s": rounded(prompts),
        "decode_gemms_s": rounded(decodes),
        "kv_s": rounded(keys_and_values),
    }
    bench.report.add(Row({"workload": "W1"}, "ceiling", "floor", batch.num_new_tokens / seconds, figures))


def _measure_mix(bench: Bench, llm: LLM, rate: float, ids: int, backend: str) -> None:
    seconds = bench.choose("seconds", 20.0, 0.1)
    workload = Workload(LogNormal(8), LogNormal(4)) if bench.settings.quick else MIX
    arrivals = mix(rate, seconds, ids=ids, max_len=llm.limits.max_len, workload=workload)
    begin = time.perf_counter()
    streams = EngineDriver(llm).serve(arrivals)
    wall = time.perf_counter() - begin
    first = percentiles([stream.first for stream in streams], 1e3)
    gaps = percentiles([gap for stream in streams for gap in stream.gaps], 1e3)
    figures = {
        "seconds": rounded(wall),
        "requests": len(streams),
        **{f"ttft_{name}_ms": value for name, value in first.items()},
        **{f"itl_{name}_ms": value for name, value in gaps.items()},
    }
    rate_found = sum(len(stream.times) for stream in streams) / wall
    bench.report.add(row_of(backend, {"workload": f"mix at {rate:g}/s"}, rate_found, figures))
