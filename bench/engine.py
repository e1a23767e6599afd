"""The engine end to end: tokens a second with graphs and without, and against `transformers` on the CPU.

On a GPU it runs the Qwen3-8B shape with random weights; elsewhere the default model, in the precision it names.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch

from phonograph import verify
from phonograph.devices import open_device
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.request import SamplingParams
from phonograph.graphs.config import ask

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


def on_gpu(new_tokens: int) -> Figures:
    """Graphs against eager, same scheduler, same kernels."""
    figures: Figures = {}
    found: dict[str, list[list[int]]] = {}
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    given = prompts(32, 150_000, 256)
    for name in ("graphs", "eager"):
        asked = [ask(f"{p}.backend", "disabled", origin="bench") for p in ("decode", "prefill") if name == "eager"]
        begin = time.perf_counter()
        options = EngineOptions(max_seqs=32, max_tokens=512, max_len=512, cache_tokens=32 * 512)
        llm = LLM(RandomCheckpoint(SHAPES["qwen3-8b"]), device="cuda", options=options, asked=asked)
        loaded = time.perf_counter() - begin
        llm.generate(given[:4], params)
        found[name] = [done.tokens for done in llm.generate(given, params)]
        figures[name] = {
            "weights_and_capture_s": round(loaded, 2),
            "captures": [str(r).splitlines()[-1] for r in llm.reports if r.rows],
            "tokens_per_s_32_seqs": rate(partial(llm.generate, given, params), 32 * new_tokens),
            "tokens_per_s_1_seq": rate(partial(llm.generate, given[:1], params), new_tokens),
        }
        if name == "graphs":
            runners = llm.executor.runners.values()
            figures["verify"] = [str(verify(runner, batches=1)).splitlines()[0] for runner in runners]
        llm.core.scheduler.integrity()
        del llm
        torch.accelerator.empty_cache()
    same = sum(a == b for one, other in zip(*found.values(), strict=True) for a, b in zip(one, other, strict=True))
    figures["same_tokens"] = f"{same} of {32 * new_tokens} (random weights: the likeliest tokens are near ties)"
    return figures


def on_cpu(new_tokens: int) -> Figures:
    """The default model against `transformers`, both in float32, in one run."""
    from reference import reference_model

    llm = LLM(device="cpu", options=EngineOptions(max_seqs=16, dtype=torch.float32))
    model = reference_model(llm.checkpoint)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    figures: Figures = {"dtype": "float32", "threads": torch.get_num_threads()}
    for count in (1, 16):
        batch = [list(range(100, 132))] * count
        ours = rate(partial(llm.generate, batch, params), count * new_tokens)
        llm.core.scheduler.integrity()

        def theirs(batch: list[list[int]] = batch) -> None:
            with torch.inference_mode():
                model.generate(
                    torch.tensor(batch), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
                )

        other = rate(theirs, count * new_tokens)
        figures[f"batch_{count}"] = {"tokens_per_s": ours, "transformers": other, "ratio": round(ours / other, 2)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sequence")
    args = parser.parse_args()
    device = open_device()
    figures = on_gpu(args.tokens) if device.name == "cuda" else on_cpu(args.tokens)
    for name, value in figures.items():
        print(f"{name:<16} {value}")
    print(report.write(f"engine_{device.torch_device.type}", figures, args.out))


if __name__ == "__main__":
    main()
