"""Host time of a step's bookkeeping, by what decodes: scheduled, built and committed; nothing is launched.

Run: python bench/host_of_rounds.py [--rows 220] [--out bench/results]

What would be launched returns tokens at once: one for each row, or of rounds of five tokens any number of them, by
chance. Plain steps of an engine that drafts compute one token a row too. *Steady*: the same rows decode on. *Among
prompts*: a request of 20 tokens with six outputs comes before every step. Best of some rounds, in microseconds a step.
A GPU waits for all of this wherever its step takes less.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import report

from phonograph import SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.step_builder import StepTables
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.step import Step, Undone
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.step import Sampled
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import Planned, StepWidth
from phonograph.graphs.progress import silent

_DEPTH, _STEPS, _ROUNDS = 4, 40, 9
_LONGEST = 400
"""Outputs of the rows that decode on, in a context of 512."""


class Nothing:
    """The protocol `StepExecutor`: tokens without a model."""

    def __init__(self, tables: StepTables, vocab: int) -> None:
        self.step_tables, self.vocab = tables, vocab
        numbers = random.Random(0)
        self._counts = [[numbers.randrange(1, _DEPTH + 2) for _ in range(tables.sizes.max_seqs)] for _ in range(16)]

    def launch(self, step: Step) -> Sampled:
        decodes, ends, width = len(step.decodes.rows), sum(one.samples for one in step.prefills), step.tokens_per_row
        if width == 1:
            return Sampled([7] * (decodes + ends))
        counts = self._counts[step.number % len(self._counts)][:decodes] + [1] * ends
        return Sampled([7] * sum(counts), counts, drafted=[width - 1] * decodes + [0] * ends)

    def collect(self, launched: Sampled) -> Sampled:
        return launched

    def put_back(self, undone: Undone) -> None:
        """Nothing was written."""

    def heartbeat(self) -> None:
        """It is well."""


class Bookkeeping:
    """An engine that computes nothing, with rows that decode."""

    def __init__(self, llm: LLM, num_rows: int, width: StepWidth | None = None) -> None:
        scheduler = Scheduler(llm.limits, prefix_cache=False, passes=llm.core.scheduler.passes)
        scheduler.width = scheduler.width if width is None else width
        self.core = EngineCore(scheduler, Nothing(llm.executor.step_tables, llm.executor.vocab))
        self._numbers, self._count = random.Random(0), 0
        for _ in range(num_rows):
            self._add(_LONGEST)
        for _ in range(8):
            self.core.step()

    def _add(self, max_tokens: int) -> None:
        self._count += 1
        prompt = tuple(self._numbers.randrange(5, 200) for _ in range(20))
        asked = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(Request(f"{self._count}", prompt, asked))

    def microseconds(self, *, prompts: bool) -> float:
        """Of one step."""
        begun = time.perf_counter()
        for _ in range(_STEPS):
            if prompts:
                self._add(6)
            self.core.step()
        return (time.perf_counter() - begun) / _STEPS * 1e6


def opened(speculate: str, num_rows: int) -> LLM:
    """For its tables and limits; more rows than decode on, so that others may come."""
    max_seqs = num_rows + 32
    usual: dict[str, Any] = {"max_seqs": max_seqs, "max_tokens": max_seqs * (_DEPTH + 1) + 256, "max_len": 512}
    usual |= {"prefix_cache": False, "verify": "off", "cache_tokens": max_seqs * 512}
    if speculate != "off":
        usual |= {"speculate": speculate, "speculate_depth": _DEPTH}
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=EngineOptions(**usual), progress=silent)


class Plain:
    """The protocol `StepWidth`: one token a row."""

    def of(self, *args: object) -> Planned:
        return Planned(1)

    def took(self, *args: object) -> None:
        """Stateless: nothing to record."""


def measured(num_rows: int, rounds: int = _ROUNDS) -> dict[str, dict[str, float]]:
    """The best of some rounds, each on a new engine, by what decodes and whether prompts come."""
    drafting, found = opened("ngram", num_rows), dict[str, dict[str, float]]()
    engines = {
        "one token a row": (opened("off", num_rows), None),
        "plain steps of an engine that drafts": (drafting, Plain()),
        "rounds of five tokens": (drafting, None),
    }
    for name, (llm, width) in engines.items():
        found[name] = {
            how: round(min(Bookkeeping(llm, num_rows, width).microseconds(prompts=prompts) for _ in range(rounds)), 1)
            for how, prompts in (("steady", False), ("among prompts", True))
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=220)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    args = parser.parse_args()
    print(report.write("host_of_rounds_cpu", {"rows": args.rows, "us_a_step": measured(args.rows)}, args.out))


if __name__ == "__main__":
    main()
