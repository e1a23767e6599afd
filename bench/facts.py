"""What facts cost: a check in microseconds, and the capture with and without them; and that decoding raises no alarm.

Run: python bench/facts.py [--layers 2 32] [--steps 200]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

from phonograph import Buckets, Graphed, Pad, Slot, graphed
from phonograph.graphs.progress import silent

WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


class Small(torch.nn.Module):
    """Three layers and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Dropout())
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x) * self.scale


def small(facts: Any) -> Graphed:
    slots = [Slot("x", ("rows", 4), torch.float32)]
    return graphed(Small().eval(), slots=slots, bucketed="rows", buckets=[1, 4], device="emulated", facts=facts)


def llama(num_layers: int, facts: Any) -> Graphed:
    config = LlamaConfig(**WIDTHS, num_hidden_layers=num_layers, vocab_size=64, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = StaticCache(config=config, max_cache_len=512)

    def decode(input_ids: torch.Tensor) -> Any:
        return model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[:, -1]

    slots = [Slot("input_ids", ("seqs", 1), torch.int64, pad=Pad.fill(1), valid=(1, 63))]
    exact = Buckets.of(1, exact=True)
    return graphed(decode, slots=slots, bucketed="seqs", buckets=exact, device="emulated", facts=facts)


def captured(run: Graphed) -> float:
    """Seconds of a capture."""
    begin = time.perf_counter()
    report = run.capture(silent)
    assert not report.failures, report
    return time.perf_counter() - begin


def check_us(run: Graphed, rounds: int = 30, calls: int = 1000) -> float:
    """The fastest round, in CPU time: other processes don't count."""
    check = run.runner.stale.refusal
    times = []
    with torch.no_grad():
        for _ in range(rounds):
            begin = time.process_time()
            for _ in range(calls):
                check()
            times.append((time.process_time() - begin) / calls * 1e6)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 32])
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    makers = {"small module": small} | {f"llama, {n} layers": lambda facts, n=n: llama(n, facts) for n in asked.layers}
    for name, make in makers.items():
        without = captured(make("off"))
        run = make("check")
        seconds = captured(run)
        batch = torch.ones(2, 4) if name.startswith("small") else torch.tensor([[3]])
        for _ in range(asked.steps):
            run(batch)
        print(f"{name}: {run.facts().summary}\n  checked by {run.facts().method}")
        print(f"  {check_us(run):.2f} us a check, capture {seconds:.2f} s, without facts {without:.2f} s")
        print(f"  {run.stats.replays.total()} of {asked.steps} calls replayed, {dict(run.stats.eager)}")


if __name__ == "__main__":
    main()
