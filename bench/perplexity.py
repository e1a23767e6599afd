"""Perplexity of the default model on a text, ours and that of `transformers` on the same weights, in float32."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import report
import torch
from engine_logits import sequence_logits
from reference import reference_model

from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions

WINDOW = 512


def perplexity(logits_of: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> float:
    """Over windows of 512 tokens, each scored without its first."""
    total, count = 0.0, 0
    for window in tokens.split(WINDOW):
        with torch.inference_mode():
            logs = logits_of(window)[:-1].double().log_softmax(-1)
        total -= logs.gather(1, window[1:, None]).sum().item()
        count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a text file, such as the test part of WikiText-2")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    llm = LLM(device="cpu", options=EngineOptions(max_seqs=1, max_tokens=WINDOW, max_len=WINDOW, dtype=torch.float32))
    assert llm.tokenizer is not None
    tokens = torch.tensor(llm.tokenizer.encode(args.text.read_text())[: args.tokens])
    model = reference_model(llm.checkpoint)
    figures = {
        "tokens": len(tokens),
        "phonograph": round(perplexity(lambda window: sequence_logits(llm, window.tolist()), tokens), 5),
        "transformers": round(perplexity(lambda window: model(window[None]).logits[0], tokens), 5),
    }
    print(figures)
    print(report.write("perplexity_cpu", figures, args.out))


if __name__ == "__main__":
    main()
