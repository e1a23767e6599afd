"""`generate` of a transformers model with random weights: a decode step and tokens/s, plain, compiled and accelerated.

Run: python bench/hf_generate.py [--shape qwen3-8b] [--seqs 1 32] [--prompt 462] [--out FILE]

A step is the slope between two lengths of the same prompt, each the best of three runs after a first one. `plain` has
the cache that transformers makes by default, `static` a static cache without a compiler, `compiled` what transformers
does with a static cache on a GPU (torch.compile), `accelerate` this package. Without a GPU a tiny model shows that
everything runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phonograph import open_device
from phonograph.bench.transformers_peer import model_of
from phonograph.engine.models.config import SHAPES
from phonograph.hf import Accelerated, accelerate

SHORT, LONG = 16, 80
"""New tokens of the two runs."""
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
    "accelerate": {},
}


def measure(model: Any, num_seqs: int, length: int, options: dict[str, Any], synchronize: Callable[[], None]) -> Any:
    """First call in seconds, a step in milliseconds, tokens/s of the longer run, and its tokens."""
    torch.manual_seed(0)
    ids = torch.randint(10, int(model.config.vocab_size), (num_seqs, length), device=model.device)

    def run(num_tokens: int) -> tuple[float, torch.Tensor]:
        begin = time.perf_counter()
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, **options,
        )  # fmt: skip
        synchronize()
        return time.perf_counter() - begin, tokens[:, length:]

    first, _ = run(LONG)
    short = min(run(SHORT)[0] for _ in range(3))
    best, tokens = min((run(LONG) for _ in range(3)), key=lambda one: one[0])
    figures = {
        "first_call_s": first,
        "decode_ms": (best - short) / (LONG - SHORT) * 1e3,
        "tokens_s": num_seqs * LONG / best,
    }
    return figures, tokens


def same(one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of sequences whose tokens are the same."""
    return float((one == other).all(1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = open_device()
    on_cpu = device.torch_device.type == "cpu"
    parser.add_argument("--shape", default="tiny" if on_cpu else "qwen3-8b", choices=list(SHAPES))
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 2] if on_cpu else [1, 32])
    parser.add_argument("--prompt", type=int, default=16 if on_cpu else 462)
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=list(MODES))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    dtype = torch.float32 if on_cpu else torch.bfloat16
    model = model_of(SHAPES[args.shape], device.torch_device, dtype)
    figures: dict[str, dict[str, float]] = {}
    for num_seqs in args.seqs:
        static: torch.Tensor | None = None
        for mode in args.modes:
            fast: Accelerated | None = accelerate(model) if mode == "accelerate" else None
            found, tokens = measure(model, num_seqs, args.prompt, MODES[mode], device.synchronize)
            if mode == "static":
                static = tokens
            elif static is not None:
                found["same_as_static"] = same(tokens, static)
            if fast is not None:
                found["replays"] = fast.replays
                print(fast.explain())
                fast.undo()
            figures[f"{mode}_bs{num_seqs}"] = found
            print(f"{mode:>10} {num_seqs:>3} seqs: " + ", ".join(f"{name} {one:.4g}" for name, one in found.items()))
    if args.out is not None:
        args.out.write_text(json.dumps({"shape": args.shape, "prompt": args.prompt} | figures, indent=1))


if __name__ == "__main__":
    main()
