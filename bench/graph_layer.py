"""What the graph layer itself costs: host time of a step, copies of a load, a break, capture, memory, and a HF model.

On a GPU it measures the Qwen3-8B shape; elsewhere, or with --quick, small shapes on the emulated device, which keeps
the script alive and says nothing about speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from qwen3_shape import TINY, Decoder, Shape

from phonograph import Buckets, Device, Graphed, Pad, Slot, graphed, open_device
from phonograph.bench.breaks import empty_breaks
from phonograph.bench.host_time import host_step
from phonograph.bench.timing import device_seconds
from phonograph.graphs.progress import silent

Figures = dict[str, Any]


def device_us(call: Callable[[], object], device: Device, rounds: int) -> float:
    """Median time of a call on the device."""
    return device_seconds(device, call, rounds) * 1e6


def breaks(device: Device, rounds: int) -> Figures:
    """Device time of a break with nothing in it: 370 small kernels in 1 and in 37 graphs."""
    times = {backend: seconds * 1e6 for backend, seconds in empty_breaks(device, rounds).items()}
    return {
        "one_graph_us": round(times["full"], 1),
        "37_graphs_us": round(times["breakable"], 1),
        "one_break_us": round((times["breakable"] - times["full"]) / 36, 2),
    }


def decode_buckets(device: Device, shape: Shape, dtype: torch.dtype, max_seqs: int, rounds: int) -> Figures:
    """Memory and seconds to capture every decode bucket, and the step against eager."""
    max_len = 512
    model = Decoder(shape, device.torch_device, dtype, max_seqs, max_len)
    slots = [
        Slot("tokens", ("seqs",), torch.int64, pad=Pad.fill(0), valid=(0, shape.vocab - 1)),
        Slot("positions", ("seqs",), torch.int64, pad=Pad.fill(0), valid=(0, max_len - 1)),
    ]
    step = graphed(
        model.decode,
        slots=slots,
        bucketed="seqs",
        buckets=Buckets.up_to(max_seqs),
        device=device,
        preserve=lambda batch: nullcontext(),
    )  # nobody's keys and values are in the cache
    device.synchronize()
    before, begin = device.memory().used, time.perf_counter()
    captured = step.capture(silent)
    seconds = time.perf_counter() - begin
    figures: Figures = {
        "buckets": len(captured.rows),
        "capture_s": round(seconds, 3),
        "warm_up_s": round(captured.warm_seconds, 3),
        "capture_mb": round((device.memory().used - before) / 1e6, 1),
        "graph_mb": round(sum(row.num_bytes for row in captured.rows) / 1e6, 1),
        "graph_mb_of_each": [round(row.num_bytes / 1e6, 1) for row in captured.rows],
        "slowest_capture_ms": round(max(row.seconds for row in captured.rows) * 1e3, 1),
    }
    for num_seqs in (1, 8, 32, 128):
        if num_seqs <= max_seqs:
            batch = {
                "tokens": torch.randint(0, shape.vocab, (num_seqs,), device=device.torch_device),
                "positions": torch.full((num_seqs,), max_len - 1, device=device.torch_device),
            }
            with torch.no_grad():
                eager = device_us(partial(model.decode, **batch), device, rounds)
            replayed = device_us(partial(step, **batch), device, rounds)
            figures[f"step_{num_seqs}_seqs_ms"] = {"eager": round(eager / 1e3, 3), "replay": round(replayed / 1e3, 3)}
    report_ = step.verify(batches=1)
    figures["verify"] = str(report_).splitlines()[0]
    return figures


def hugging_face(device: Device, shape: Shape, dtype: torch.dtype, rounds: int) -> Figures:
    """An unmodified transformers Qwen3 with a static cache, batch 1: eager against recorded."""
    from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache

    config = Qwen3Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device(device.torch_device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def fresh() -> tuple[Graphed, torch.Tensor]:
        cache = StaticCache(config=config, max_cache_len=1024)

        def decode(input_ids: torch.Tensor) -> torch.Tensor:
            return model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[:, -1]

        slot = Slot("input_ids", ("seqs", 1), torch.int64, pad=Pad.fill(0), valid=(0, shape.vocab - 1))
        step = graphed(decode, slots=[slot], bucketed="seqs", buckets=Buckets.of(1, exact=True), device=device)
        with torch.no_grad():
            prompt = torch.arange(10, 510, device=device.torch_device)[None] % shape.vocab
            logits = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1]
        return step, logits

    def greedy(step: Graphed, logits: torch.Tensor, num_tokens: int) -> list[int]:
        tokens = []
        for _ in range(num_tokens):
            token = logits.argmax(-1, keepdim=True)
            tokens.append(token)
            logits = step(input_ids=token)
        return torch.cat(tokens).flatten().tolist()

    eager, logits = fresh()
    begin = time.perf_counter()
    tokens = greedy(eager, logits, rounds)
    device.synchronize()
    eager_ms = (time.perf_counter() - begin) / rounds * 1e3
    step, logits = fresh()
    begin = time.perf_counter()
    step.capture(silent)
    capture_s = time.perf_counter() - begin
    device.synchronize()
    begin = time.perf_counter()
    greedy(step, logits, rounds)
    device.synchronize()
    replay_ms = (time.perf_counter() - begin) / rounds * 1e3
    return {
        "eager_ms": round(eager_ms, 2),
        "graphed_ms": round(replay_ms, 2),
        "speedup": round(eager_ms / replay_ms, 2),
        "capture_s": round(capture_s, 2),
        "replays": step.stats.replays.total(),
        **agreement(fresh, tokens),
    }


def agreement(fresh: Callable[[], tuple[Graphed, torch.Tensor]], tokens: list[int]) -> Figures:
    """Logits of eager and replay on the same tokens; the model may pick other kernels while it is captured."""
    eager, _ = fresh()
    step, logits = fresh()
    step.capture(silent)
    worst, same = 0.0, 0
    for token in tokens:
        ids = torch.tensor([[token]], device=logits.device)
        wanted, found = eager(input_ids=ids).float(), step(input_ids=ids).float()
        worst = max(worst, ((found - wanted).norm() / wanted.norm()).item())
        same += int((found.argmax() == wanted.argmax()).item())
    return {"worst_relative_logit_error": float(f"{worst:.2g}"), "same_argmax": f"{same} of {len(tokens)}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    parser.add_argument("--skip-hf", action="store_true", help="leave out the Hugging Face model")
    args = parser.parse_args()
    device = open_device()
    quick = args.quick or device.name == "emulated"
    rounds = 10 if quick else 100
    shape, dtype, max_seqs = (TINY, torch.float32, 8) if quick else (Shape(), torch.bfloat16, 256)
    torch.manual_seed(0)
    figures: Figures = {}
    parts: list[tuple[str, Callable[[], Figures]]] = [
        ("host time of a step with 8 slots", lambda: host_step(device, rounds)),
        ("empty break", lambda: breaks(device, rounds)),
        ("decode buckets", lambda: decode_buckets(device, shape, dtype, max_seqs, rounds)),
    ]
    if not args.skip_hf:
        parts.append(("Hugging Face, tiny, float32", lambda: hugging_face(device, TINY, torch.float32, rounds)))
        parts.append(("Hugging Face Qwen3, batch 1", lambda: hugging_face(device, shape, dtype, rounds)))
    for title, measure in parts:
        figures[title] = measure()
        print(title)
        for name, value in figures[title].items():
            print(f"  {name:<28} {value}")
    print(report.write(f"graph_layer_{'quick' if quick else device.name}", figures, args.out))


if __name__ == "__main__":
    main()
