"""The engine end to end: tokens a second with graphs and without, and against `transformers` on the CPU.

On a GPU it runs the Qwen3-8B shape with random weights, and the default model; elsewhere the default model.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch

from phonograph import verify
from phonograph.devices import open_device
from phonograph.engine.checkpoints import default_model
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.completion import Completion
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import CheckpointError
from phonograph.graphs.planning.settings import ask

Figures = dict[str, Any]


def prompts(count: int, vocab: int, longest: int) -> list[list[int]]:
    """Random prompts, the lengths uniform from 32."""
    numbers = random.Random(7)
    return [[numbers.randrange(10, vocab) for _ in range(numbers.randrange(32, longest))] for _ in range(count)]


def rate(call: Callable[[], object], tokens: int) -> float:
    """Tokens a second of one call."""
    begin = time.perf_counter()
    call()
    return round(tokens / (time.perf_counter() - begin), 1)


def same_greedy(one: list[Completion], other: list[Completion], margin: float) -> Figures:
    """Where two runs part: excused where the two likeliest tokens are nearer than the margin, wrong elsewhere."""
    identical = excused = wrong = compared = 0
    for a, b in zip(one, other, strict=True):
        parted = next((i for i, pair in enumerate(zip(a.tokens, b.tokens, strict=True)) if pair[0] != pair[1]), None)
        compared += len(a.tokens) if parted is None else parted
        if parted is None:
            identical += 1
        else:
            (_, best), (_, second) = a.logprobs[parted].top[:2]
            excused += best - second <= margin
            wrong += best - second > margin
    return {"identical": identical, "parted_at_a_near_tie": excused, "wrong": wrong, "tokens_compared": compared}


def on_gpu(new_tokens: int, *, with_shape: bool) -> Figures:
    """Graphs against eager, same scheduler, same kernels: a random Qwen3-8B, and the default model where it is."""
    figures: Figures = {}
    if with_shape:
        shape = RandomCheckpoint(SHAPES["qwen3-8b"])
        figures["qwen3_8b_bfloat16"] = graphs_and_eager(shape, torch.bfloat16, new_tokens, 0.125)
    try:
        default_model()
    except CheckpointError as error:
        figures["default_model"] = f"not measured: {error}"
        return figures
    for dtype, margin in ((torch.float32, 1e-3), (torch.bfloat16, 0.125)):
        name = f"default_model_{str(dtype).removeprefix('torch.')}"
        figures[name] = graphs_and_eager(None, dtype, new_tokens, margin)
    return figures


def graphs_and_eager(model: RandomCheckpoint | None, dtype: torch.dtype, new_tokens: int, margin: float) -> Figures:
    """The same requests with graphs, without, and by torch's own ops: how fast, and whether all agree."""
    figures: Figures = {}
    found: dict[str, list[Completion]] = {}
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    given = prompts(32, 49_000, 256)
    for name in ("graphs", "eager", "reference") if model is None else ("graphs", "eager"):
        asked = [ask(f"{p}.backend", "disabled", origin="bench") for p in ("decode", "prefill") if name != "graphs"]
        begin = time.perf_counter()
        options = EngineOptions(max_seqs=64, max_tokens=2048, max_len=1024, dtype=dtype)
        if name == "reference":
            options = replace(options, attention="reference", kernels="reference", cache_tokens=65_536)
        llm = LLM(model, device="cuda", options=options, asked=asked)
        loaded = time.perf_counter() - begin
        llm.generate(given[:4], params)
        found[name] = llm.generate(given, replace(params, logprobs=2))
        figures[name] = {
            "start_s": round(loaded, 2),
            "kv_cache": f"{llm.limits.capacity:,} tokens: {llm.cache_size.reason}",
            "captures": [str(r).splitlines()[-1] for r in llm.reports if r.rows],
            "tokens_per_s_32_seqs": rate(partial(llm.generate, given, params), 32 * new_tokens),
            "tokens_per_s_1_seq": rate(partial(llm.generate, given[:1], params), new_tokens),
            "device_seconds": {" ".join(key): round(value, 3) for key, value in llm.executor.timing.seconds.items()},
        }
        if name == "graphs":
            runners = llm.executor.runners.values()
            figures["eager_steps"] = sum(runner.stats.eager.total() for runner in runners)
            tolerance = None if dtype == torch.float32 else 5e-2
            reports = [verify(runner, batches=1, tolerance=tolerance) for runner in runners]
            figures["verify"] = [str(report).splitlines()[:4] for report in reports]
            del runners
        llm.core.scheduler.integrity()
        del llm
        gc.collect()
        torch.accelerator.empty_cache()
    for name in found.keys() - {"graphs"}:
        figures[f"same_greedy_as_{name}"] = same_greedy(found["graphs"], found[name], margin)
    return figures


def on_cpu(new_tokens: int, rounds: int = 5) -> Figures:
    """The default model against `transformers` in float32: all in turn, round after round, medians of their rates."""
    from reference import reference_model

    # Rounds repeat their prompts, and `transformers` keeps none.
    options = EngineOptions(max_seqs=16, dtype=torch.float32, prefix_cache=False)
    ours = {
        "float32": LLM(device="cpu", options=options),
        "float32_torch": LLM(device="cpu", options=replace(options, kernels="reference", attention="reference")),
    }
    model = reference_model(ours["float32"].checkpoint)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    figures: Figures = {"threads": torch.get_num_threads(), "rounds": rounds}
    figures["kernels"] = {name: [llm.kernels.name, *llm.kernels.notes] for name, llm in ours.items()}
    for count in (1, 16):
        batch = [list(range(100 + 8 * row, 132 + 8 * row)) for row in range(count)]
        given = torch.tensor(batch)
        calls: dict[str, Callable[[], object]] = {
            name: partial(llm.generate, batch, params) for name, llm in ours.items()
        }
        calls["transformers"] = torch.inference_mode()(
            partial(
                model.generate,
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
            )
        )
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                rates[name].append(rate(call, count * new_tokens))
        median = {name: statistics.median(found) for name, found in rates.items()}
        figures[f"batch_{count}"] = {
            "tokens_per_s": {name: {"median": median[name], "all": found} for name, found in rates.items()},
            "times_transformers": {name: round(median[name] / median["transformers"], 2) for name in ours},
        }
    for llm in ours.values():
        llm.core.scheduler.integrity()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sequence")
    parser.add_argument("--default-only", action="store_true", help="on a GPU, leave the random Qwen3-8B out")
    args = parser.parse_args()
    device = open_device()
    figures = on_gpu(args.tokens, with_shape=not args.default_only) if device.name == "cuda" else on_cpu(args.tokens)
    for name, value in figures.items():
        print(f"{name:<16} {value}")
    print(report.write(f"engine_{device.torch_device.type}", figures, args.out))


if __name__ == "__main__":
    main()
