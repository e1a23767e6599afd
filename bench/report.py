"""Writes what was measured, where and when, to bench/results/."""

from __future__ import annotations

import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    accelerator = torch.accelerator.current_accelerator()
    name = torch.cuda.get_device_name() if accelerator is not None and accelerator.type == "cuda" else "CPU only"
    return {
        "accelerator": name,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def write(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """One JSON file per script and machine."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    return path
