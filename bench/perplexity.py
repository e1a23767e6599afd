"""Perplexity of the default model on a text, in float32: ours, window by window and few tokens at a time, and that of
`transformers`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import report
import torch
from engine_logits import sequence_logits
from reference import reference_model

from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions

WINDOW = 512
FEW = 16
"""Tokens of a step that the packed matrices serve."""


@dataclass(frozen=True)
class Score:
    """How well a model foretells a text."""

    perplexity: float
    likeliest: torch.Tensor  # [num_tokens]: the token that it expects after each

    def beside(self, other: Score) -> dict[str, float]:
        """Figures, and how often both expect the same token."""
        same = (self.likeliest == other.likeliest).double().mean().item()
        return {"perplexity": round(self.perplexity, 5), "same_likeliest_token": round(same, 5)}


def score(logits_of: Callable[[list[int]], torch.Tensor], tokens: torch.Tensor) -> Score:
    """Over windows of 512 tokens, each scored without its first."""
    total, count, likeliest = 0.0, 0, []
    for window in tokens.split(WINDOW):
        with torch.inference_mode():
            logits = logits_of(window.tolist())
        likeliest.append(logits.argmax(-1))
        logs = logits[:-1].double().log_softmax(-1)
        total -= logs.gather(1, window[1:, None]).sum().item()
        count += len(window) - 1
    return Score(math.exp(total / count), torch.cat(likeliest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a text file, such as the test part of WikiText-2")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    options = EngineOptions(max_seqs=1, max_tokens=WINDOW, max_len=WINDOW, dtype=torch.float32)
    llm = LLM(device="cpu", options=options)
    assert llm.tokenizer is not None
    tokens = torch.tensor(llm.tokenizer.encode(args.text.read_text())[: args.tokens])
    model = reference_model(llm.checkpoint)
    theirs = score(lambda window: model(torch.tensor([window])).logits[0], tokens)
    figures = {
        "tokens": len(tokens),
        "transformers_float32": theirs.beside(theirs),
        "float32": score(partial(sequence_logits, llm), tokens).beside(theirs),
        "float32_few_at_a_time": score(partial(sequence_logits, llm, step=FEW), tokens).beside(theirs),
        "kernels": list(llm.kernels.notes),
    }
    for name, value in figures.items():
        print(f"{name:<22} {value}")
    print(report.write("perplexity_cpu", figures, args.out))


if __name__ == "__main__":
    main()
