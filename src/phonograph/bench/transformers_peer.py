"""Transformers peer: Hugging Face transformers on the same shape, in its own process: batching, or a compiled decode.

Usage: python -m phonograph.bench.transformers_peer SHAPE RESULT.json batching|compile
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from phonograph.bench.workloads import MOST_ID, Batch, Prompts, w1
from phonograph.devices import open_device
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.hf.adapter.random import hf_config

_PROMPT, _SHORT, _LONG = 440, 4, 132


def model_of(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    with device:
        return AutoModelForCausalLM.from_config(hf_config(config), dtype=dtype).eval()


def batching(model: Any, batch: Batch) -> dict[str, float]:
    """W1 by continuous batching, the second run."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=batch.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    figures = {}
    inputs = [list(prompt) for prompt in batch.prompts]
    # Where a version can keep its graphs and cache for the second run, it may.
    keeps = {"persistent_manager"} & inspect.signature(model.generate_batch).parameters.keys()
    for _ in range(2):
        begin = time.perf_counter()
        found = model.generate_batch(inputs=inputs, generation_config=config, **dict.fromkeys(keeps, True))
        seconds = time.perf_counter() - begin
        num_tokens = sum(len(output.generated_tokens) for output in found.values())
        if num_tokens != batch.num_new_tokens:
            raise RuntimeError(f"continuous batching made {num_tokens} tokens of {batch.num_new_tokens}.")
        figures["W1_tok_s"] = num_tokens / seconds
    return figures


def compiled(model: Any, vocab: int, batches: tuple[int, ...]) -> dict[str, float]:
    """A decode step with a static cache and torch.compile(mode="reduce-overhead"): slope of two runs, after warm-up."""
    prompts = Prompts(vocab)
    figures = {}

    def seconds(num_seqs: int, new_tokens: int) -> float:
        ids = torch.tensor([prompts.one(_PROMPT) for _ in range(num_seqs)], device=model.device)
        begin = time.perf_counter()
        model.generate(
            ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, cache_implementation="static"
        )
        return time.perf_counter() - begin

    model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    for num_seqs in batches:
        figures[f"compile_s_bs{num_seqs}"] = seconds(num_seqs, _LONG)
        short, long = (min(seconds(num_seqs, count) for _ in range(2)) for count in (_SHORT, _LONG))
        figures[f"decode_ms_bs{num_seqs}"] = (long - short) / (_LONG - _SHORT) * 1e3
    return figures


def main() -> None:
    """Measure and write the result."""
    shape, result, what = sys.argv[1:4]
    config = SHAPES[shape]
    device = open_device().torch_device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    begin = time.perf_counter()
    model = model_of(config, device, dtype)
    figures = {"up_s": time.perf_counter() - begin}
    ids = min(MOST_ID, config.vocab)
    quick = device.type == "cpu"
    with torch.no_grad():
        if what == "batching":
            figures |= batching(model, w1(4, 4, 4, 12, ids) if quick else w1(ids=ids))
        else:
            figures |= compiled(model, config.vocab, (1,) if quick else (1, 32))
    Path(result).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
