"""Launch state: what ordinary launches between two replays cost the replays after them, and what resuming brings.

    python bench/launch_state.py            # on a GPU
    python bench/launch_state.py --tiny     # the script itself, on any machine

Decode steps of the default model's shape are timed on the device: as they are after a fresh start, after some torch ops
between two steps, and after `Kernels.resume_overlap` (decision 0136). Meanwhile the engine resumes nothing by itself.
Then the engine as it is: it has tables to update, and resumes. Writes bench/results/launch_state_….json.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch

from phonograph.bench.engine_driver import EngineDriver
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask

ORDINARY = 64
"""Launches that end the better state; four were enough."""
STEPS = 20
"""Of each median."""


def opened(*, tiny: bool, sizes: list[int], length: int) -> LLM:
    """With recordings for just these numbers of sequences."""
    shape = SHAPES["tiny" if tiny else "smollm2-135m"]
    options = EngineOptions(
        max_seqs=max(sizes), max_len=length + 6 * STEPS, dtype=shape.dtype if tiny else torch.bfloat16, verify="off"
    )
    asked = [ask("guard", "off", origin="benchmark"), ask("decode.buckets", sizes, origin="benchmark")]
    return LLM(RandomCheckpoint(shape), device="emulated" if tiny else "cuda", options=options, asked=asked)


def measure(llm: LLM, num_seqs: int, length: int) -> dict[str, float]:
    """Microseconds of a step in each state."""
    numbers, kernels = random.Random(num_seqs), llm.executor.model.kernels
    values = torch.zeros(64, device=llm.device.torch_device)
    prompts = [[numbers.randrange(10, llm.checkpoint.config.vocab) for _ in range(length)] for _ in range(num_seqs)]
    driver = EngineDriver(llm)
    resume = kernels.resume_overlap

    def ordinary() -> None:
        for _ in range(ORDINARY):
            values.add_(1)

    def seconds(first: Callable[[], Any]) -> float:
        with torch.inference_mode():
            first()
        return statistics.median(one.device for one in driver.steady(STEPS)[2:])

    found = dict[str, float]()
    sequences = driver.seat(prompts, 5 * STEPS)
    try:
        setattr(kernels, "resume_overlap", lambda: None)  # noqa: B010  a protocol's method can't be assigned
        found["after a start"] = seconds(lambda: None)
        found["after ordinary launches"] = seconds(ordinary)
        found["resumed"] = seconds(resume)
    finally:
        setattr(kernels, "resume_overlap", resume)  # noqa: B010
    ordinary_and_update(llm, ordinary)
    found["the engine resumes"] = seconds(lambda: None)
    driver.drain(sequences)
    return {name: round(taken * 1e6, 1) for name, taken in found.items()}


def ordinary_and_update(llm: LLM, ordinary: Callable[[], None]) -> None:
    """As in service: the next step comes with updates of the tables, since all rows get pages."""
    with torch.inference_mode():
        ordinary()
    decodes = llm.core.scheduler._decodes
    for sequence in decodes:
        llm.core.scheduler.rows.extend(sequence)
    decodes.unsettle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the emulated device, to try the script")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    args = parser.parse_args()
    sizes = [1, 2] if args.tiny else [1, 8, 16, 32, 64, 256]
    length = 20 if args.tiny else 100
    llm, found = opened(tiny=args.tiny, sizes=sizes, length=length), dict[str, Any]()
    for num_seqs in sizes:
        found[f"{num_seqs}"] = measure(llm, num_seqs, length)
        print(f"{num_seqs}: {found[f'{num_seqs}']}", flush=True)
    print(report.write(f"launch_state_{llm.device.torch_device.type}", found, args.out))


if __name__ == "__main__":
    main()
