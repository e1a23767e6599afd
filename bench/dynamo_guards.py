"""What Dynamo's guards cost at every call of a compiled function, and what a replay of its pieces pays in their place.

Run: python bench/dynamo_guards.py [--device cuda] [--layers 4 36] [--out DIR]

The compiled function is called with a compiler that computes nothing, so what remains are guards and the way to the
code; then with the ops. A call of the graphed one looks at its facts, loads its inputs and replays the pieces;
`facts_and_load` is the same call with a replay that does nothing. The emulated device replays op by op.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import report
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from phonograph import Buckets, Device, Graphed, Pad, Replay, Slot, graphed, open_device
from phonograph.graphs.progress import silent

NUM_ROWS, VOCAB, ROUNDS = 4, 64, 300
WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def llama(num_layers: int, device: Device) -> Any:
    """So many layers of transformers, as narrow as can be."""
    config = LlamaConfig(**WIDTHS, num_hidden_layers=num_layers, vocab_size=VOCAB, use_cache=False)
    return AutoModelForCausalLM.from_config(config).to(device.torch_device).eval()


def microseconds(call: Callable[[], object], device: Device) -> float:
    """Median host time of a call; the device is idle at each."""
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
        device.synchronize()
    return round(statistics.median(found[ROUNDS // 10 :]) * 1e6, 1)


def nothing(module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose code computes nothing."""
    (outputs,) = (node.args[0] for node in module.graph.nodes if node.op == "output")
    shapes = [node.meta["example_value"].shape for node in outputs]
    result = [torch.zeros([int(size) for size in shape]) for shape in shapes]
    return lambda *args: result


def recorded(body: Callable[..., Any], device: Device) -> Graphed:
    run = graphed(
        body,
        slots=[Slot("ids", ("seqs", 1), torch.int64, pad=Pad.fill(1), valid=(1, VOCAB - 1))],
        bucketed="seqs",
        buckets=Buckets.of(NUM_ROWS),
        backend="tc_piecewise",
        tc_compiler="eager",
        device=device,
    )
    failures = run.capture(silent).failures
    if failures:
        raise SystemExit(str(failures[0].error))
    return run


@torch.no_grad()
def measured(num_layers: int, device: Device) -> dict[str, Any]:
    model = llama(num_layers, device)
    ids = torch.randint(1, VOCAB, (NUM_ROWS, 1), device=device.torch_device)

    def body(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids).logits
        return logits

    figures: dict[str, Any] = {"layers": num_layers, "parameters": len(list(model.parameters()))}
    guarded = torch.compile(body, backend=nothing, fullgraph=True)
    figures["guards_us"] = microseconds(lambda: guarded(ids), device)
    torch._dynamo.reset()
    compiled = torch.compile(body, backend="eager", fullgraph=True)
    figures["compiled_call_us"] = microseconds(lambda: compiled(ids), device)
    figures["eager_call_us"] = microseconds(lambda: body(ids), device)
    run = recorded(body, device)
    figures["replay_call_us"] = microseconds(lambda: run(ids=ids), device)
    if not isinstance(run.runner.last, Replay):
        raise SystemExit(f"no replay: {run.runner.last}")
    (key,) = run.runner.captured
    with run.runner.recording(key).replaying(lambda steps: None):
        figures["facts_and_load_us"] = microseconds(lambda: run(ids=ids), device)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "emulated")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 36])
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    device = open_device(args.device)
    rows = [measured(num_layers, device) for num_layers in args.layers]
    for row in rows:
        print(row)
    name = "cuda" if device.torch_device.type == "cuda" else "cpu"
    print(report.write(f"dynamo_guards_{name}", {"device": args.device, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
