"""Time to the first token: of a process, part by part. Run by `cold_start` as a script, in a fresh process.

Nothing but the standard library is imported before the clock is read, so that imports are parts of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any


class Parts:
    """Seconds of consecutive parts, from a moment before the process was started."""

    def __init__(self, started: float) -> None:
        self._started = self._last = started
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Everything since the last part belongs to this one."""
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._started


def main() -> None:
    """Print the parts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("started", type=float, help="time.time() just before this process was started")
    parser.add_argument("shape")
    parser.add_argument("--device")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    args = parser.parse_args()
    parts = Parts(args.started)
    parts.end("start Python")
    import torch

    parts.end("import torch")
    from phonograph.devices import open_device
    from phonograph.engine.checkpoints import random_checkpoint
    from phonograph.engine.llm import LLM
    from phonograph.engine.options import EngineOptions
    from phonograph.engine.requests.request import SamplingParams

    parts.end("import phonograph")
    device = open_device(args.device)
    torch.zeros(1, device=device.torch_device)
    device.synchronize()
    parts.end("open the device")
    begin = time.time()
    marks: dict[str, float] = {}

    def progress(doing: str, done: int, total: int) -> None:
        if doing == "loading weights" and done == total:
            device.synchronize()
            marks["weights"] = time.time()

    options = json.loads(args.options)
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    chosen = EngineOptions(**options)
    llm = LLM(random_checkpoint(args.shape, chosen.model_impl), device=device, options=chosen, progress=progress)
    device.synchronize()
    parts.end("engine")
    llm.generate([list(range(10, 26))], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    parts.end("first token")
    print(json.dumps({"parts": _split(parts, llm, marks["weights"] - begin), "total": parts.total}))


def _split(parts: Parts, llm: Any, weights: float) -> dict[str, float]:
    """The engine's part in three: weights, captures as they were reported, and what sizing the KV cache took."""
    capture = sum(report.seconds for report in llm.reports)
    found = dict(parts.seconds)
    engine = found.pop("engine")
    first = found.pop("first token")
    return {
        **found,
        "make weights": weights,
        "size the KV cache": engine - weights - capture,
        "capture": capture,
        "first token": first,
    }


if __name__ == "__main__":
    main()
