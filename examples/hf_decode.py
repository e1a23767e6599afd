"""The decode step of an unmodified Hugging Face causal LM, recorded.

The model keeps its keys and values in a static cache; the prompt is prefilled eagerly by the model itself, and
every further token is a replay.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, StaticCache

from phonograph import Buckets, Graphed, Pad, Slot, graphed


def record_decode(model: PreTrainedModel, cache: StaticCache, batch_size: int) -> Graphed:
    """A step from one token per sequence to logits, for exactly this batch size: a static cache has one."""

    def decode(input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[:, -1]

    slots = [Slot("input_ids", ("seqs", 1), torch.int64, pad=Pad.fill(0), valid=(0, model.config.vocab_size - 1))]
    return graphed(
        decode,
        slots=slots,
        bucketed="seqs",
        buckets=Buckets.of(batch_size, exact=True),
        device=model.device,
    )


@torch.no_grad()
def generate(model: PreTrainedModel, prompt: torch.Tensor, num_tokens: int, max_len: int, *, graphs: bool) -> list[int]:
    """Greedy tokens after a prompt of shape [1, length]."""
    cache = StaticCache(config=model.config, max_cache_len=max_len)
    logits = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1]
    step = record_decode(model, cache, batch_size=1)
    if graphs:
        print(step.capture())
    tokens: list[int] = []
    for _ in range(num_tokens):
        token = logits.argmax(-1, keepdim=True)
        tokens.append(int(token))
        logits = step(input_ids=token)
    print(step.runner.explain())
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder with a Hugging Face model; default: a small random one")
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model).to(device)
    else:
        model = AutoModelForCausalLM.from_config(small_config()).to(device)
    model.eval()
    prompt = torch.arange(3, 19, device=device)[None]
    begin = time.perf_counter()
    eager = generate(model, prompt, args.tokens, 64 + args.tokens, graphs=False)
    middle = time.perf_counter()
    replayed = generate(model, prompt, args.tokens, 64 + args.tokens, graphs=True)
    print(f"eager  {eager}\nreplay {replayed}\n{'equal' if eager == replayed else 'DIFFERENT'}")
    print(f"eager {middle - begin:.3f} s, with capture {time.perf_counter() - middle:.3f} s")


def small_config() -> PretrainedConfig:
    """A Qwen3 small enough for a laptop."""
    return Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=256, max_position_embeddings=512,
    )  # fmt: skip


if __name__ == "__main__":
    main()
