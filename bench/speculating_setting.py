"""Settings of bench/speculating.py: on a GPU, and in small on any machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.models.config import SHAPES


@dataclass(frozen=True)
class Setting:
    """What is measured, and how long."""

    model: str | RandomCheckpoint | None
    shape: RandomCheckpoint
    """For synthetic acceptance."""
    device: str
    dtype: torch.dtype
    batches: tuple[int, ...]
    curve: tuple[int, ...]
    """Batch sizes, rising: those that decodes are recorded for."""
    new_tokens: int
    long_tokens: int
    """Of a sequence where no draft is accepted, and of the few ones of the curve."""
    prompts: int
    compared: int
    """Prompts whose answers are compared with those of plain decoding."""
    requests: int
    max_len: int
    depth: int
    repeats: int
    whole_runs: int
    """Of sequences from their prompts to their end, with drafts that are never right."""
    mixed: tuple[int, ...] = ()
    """Tokens of steps with prompts that are recorded; as many as an engine has by default where it is empty."""
    head: Path | None = None
    data: Path | None = None
    draft_vocab: int = 32_000

    @property
    def drafters(self) -> dict[str, dict[str, Any]]:
        """All that there are."""
        both = {} if self.head is None else {"ngram+eagle": {"speculate": "ngram+eagle", "draft": self.head}}
        return {**self.single_drafters, **both}

    @property
    def single_drafters(self) -> dict[str, dict[str, Any]]:
        """Those that are made of no others: what these cost says what the others do."""
        eagle = {} if self.head is None else {"eagle": {"speculate": "eagle", "draft": self.head}}
        return {"ngram": {"speculate": "ngram"}, **eagle}


FULL = Setting(
    None, RandomCheckpoint(SHAPES["qwen3-8b"]), "cuda", torch.bfloat16, (1, 4, 16, 64, 256),
    (1, 2, 3, 4, 6, 8, 16, 32, 64, 96, 128, 192, 256), new_tokens=256,
    long_tokens=512, prompts=360, compared=200, requests=1600, max_len=1024, depth=4, repeats=5, whole_runs=9,
    mixed=(64, 128, 256, 512, 1024, 2048, 4096, 8192),
)  # fmt: skip
TINY = replace(
    FULL, model=RandomCheckpoint(SHAPES["tiny"]), shape=RandomCheckpoint(SHAPES["tiny"]), device="emulated",
    dtype=torch.float32, batches=(1, 2, 4), curve=(1, 2, 3, 4), new_tokens=16, long_tokens=24, prompts=6, compared=5,
    requests=8, max_len=128, repeats=1, whole_runs=2, draft_vocab=100, mixed=(),
)  # fmt: skip
