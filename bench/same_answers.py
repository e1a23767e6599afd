"""Answers of engines that draft, against those of one that does not, and against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quality import beside

from phonograph.engine.llm import LLM, Completion
from phonograph.engine.requests.request import SamplingParams

Answers = dict[str, list[Completion]]
"""By the way in which they are picked."""


def answers(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answers:
    """Greedy, drawn, and drawn with a penalty."""
    greedy = SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=2)
    drawn = replace(greedy, temperature=0.8, top_p=0.95, seed=7)
    ways = {"greedy": greedy, "drawn": drawn, "penalised": replace(drawn, repetition_penalty=1.2)}
    return {way: llm.generate(prompts, params) for way, params in ways.items()}


def compared(found: Mapping[str, Answers], plain: Answers) -> dict[str, Any]:
    """For each drafter, the share of answers that are those of plain decoding; of greedy ones that are not, the margins
    where they part: rounding may turn a near tie, and nothing else. Drafters among each other run the same passes, but
    their rows end at other times, so that batches, and with them roundings, may differ too."""
    first = next(iter(found.values()))
    figures: dict[str, Any] = {}
    for name, said in found.items():
        figures[name] = {}
        for way, some in said.items():
            row = beside(some, plain[way])
            if way != "greedy":  # what was ahead, by noise too, no log-probability tells
                del row["margins"]
            row["unlike_the_first_drafter"] = sum(
                one.tokens != other.tokens for one, other in zip(some, first[way], strict=True)
            )
            figures[name][way] = row
    return figures
