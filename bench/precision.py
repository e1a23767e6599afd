"""How far the default model is from float32 in other precisions, over positions of a text: ours, and those of
`transformers` in the same dtype.

KL divergence is that of the float32 distribution from the other one, in nats per position, at temperature 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import report
import torch
from engine_logits import sequence_logits
from reference import reference_model

from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask

WINDOW = 500
SEGMENTS = 4
FEW = 100
"""Positions of a segment that are also computed one by one, as decode steps are."""
OURS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
)

Logits = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True)
class Distance:
    """From float32, one figure a segment."""

    kl: tuple[float, ...]
    top1: tuple[float, ...]

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "kl": mean(self.kl),
            "kl_by_segment": list(self.kl),
            "top1_agreement": mean(self.top1),
            "top1_by_segment": list(self.top1),
        }


def distance(logits_of: Logits, exact: list[torch.Tensor], windows: list[list[int]]) -> Distance:
    """Over all positions of the windows; segments have as many windows each."""
    kl, top1 = [], []
    for window, wanted in zip(windows, exact, strict=True):
        with torch.inference_mode():
            found = logits_of(window).double()
        truth = wanted.double().log_softmax(-1)
        kl.append((truth.exp() * (truth - found.log_softmax(-1))).sum(-1).mean().item())
        top1.append((found.argmax(-1) == wanted.argmax(-1)).double().mean().item())
    size = len(windows) // SEGMENTS
    parts = [slice(start, start + size) for start in range(0, len(windows), size)]
    return Distance(tuple(mean(kl[part]) for part in parts), tuple(mean(top1[part]) for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a text file, such as the test part of WikiText-2")
    parser.add_argument("--positions", type=int, default=4_000, help="a multiple of 2,000")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = open_checkpoint(None)
    tokens = checkpoint.tokenizer().encode(args.text.read_text())[: args.positions]
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
    opening = [window[:FEW] for window in windows[:: len(windows) // SEGMENTS]]
    figures: dict[str, Any] = {"positions": len(tokens), "default": str(_engine().precision)}

    def theirs(model: Any, window: list[int]) -> torch.Tensor:
        return model(torch.tensor([window], device=device)).logits[0]

    exact_model = reference_model(checkpoint).to(device)
    with torch.inference_mode():
        exact = [theirs(exact_model, window) for window in windows]
    few = [wanted[:FEW] for wanted in exact[:: len(windows) // SEGMENTS]]
    for dtype in (torch.bfloat16, torch.float16):
        model = reference_model(checkpoint).to(device, dtype)
        figures[f"transformers {dtype}"] = distance(partial(theirs, model), exact, windows).figures
    for dtype, residual in OURS:
        llm = _engine(dtype, residual)
        name = f"phonograph {dtype}, residual {residual}"
        figures[name] = distance(partial(sequence_logits, llm), exact, windows).figures
        one_by_one = partial(sequence_logits, llm, as_decodes=True, step=1)
        figures[f"{name}, {FEW * SEGMENTS} positions, one a step"] = distance(one_by_one, few, opening).figures
        del llm
    for name, value in figures.items():
        if isinstance(value, dict):
            spread = f"{min(value['kl_by_segment']):.6f} to {max(value['kl_by_segment']):.6f}"
            print(f"{name:<70} KL {value['kl']:.6f} ({spread})  top-1 {value['top1_agreement']:.4f}")
        else:
            print(f"{name}: {value}")
    print(report.write(f"precision_{device.type}", figures, args.out))


def _engine(dtype: torch.dtype | None = None, residual: torch.dtype | None = None) -> LLM:
    """Nothing is recorded: only the model's logits are asked for."""
    options = EngineOptions(
        max_seqs=2, max_tokens=WINDOW, max_len=1024, cache_tokens=2048, dtype=dtype, residual_dtype=residual
    )
    return LLM(options=options, asked=[ask(f"{p}.backend", "disabled", origin="bench") for p in ("decode", "prefill")])


if __name__ == "__main__":
    main()
