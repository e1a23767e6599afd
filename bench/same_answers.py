"""Answers of engines that draft, against those of one that does not, and against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from engine_logits import sequence_logits
from partings import Judge, off_by, parting

from phonograph.engine.completion import Completion
from phonograph.engine.llm import LLM
from phonograph.engine.requests.request import SamplingParams

Answers = dict[str, list[Completion]]
"""By the way in which they are picked."""
_TEXTS = 4
"""Whose logits show what rounding moves them by."""


def ways(new_tokens: int) -> dict[str, SamplingParams]:
    """Greedy, drawn, and drawn with penalties; all of one length, whatever ends a text."""
    greedy = SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    drawn = replace(greedy, temperature=0.8, top_p=0.95, seed=7)
    penalised = replace(drawn, repetition_penalty=1.2, frequency_penalty=0.3)
    return {"greedy": greedy, "drawn": drawn, "penalised": penalised}


def answers(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> Answers:
    """To each prompt, in each way."""
    return {way: llm.generate(prompts, params) for way, params in ways(new_tokens).items()}


@dataclass(frozen=True)
class Plain:
    """What an engine without speculation says, and the logits of some of its texts."""

    answers: Answers
    logits: list[torch.Tensor]

    @cached_property
    def texts(self) -> list[list[int]]:
        return _texts(self.answers)


def _texts(found: Answers) -> list[list[int]]:
    return [[*one.prompt, *one.tokens] for one in found["greedy"][:_TEXTS]]


def plain_answers(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> Plain:
    """Of an engine that does not speculate."""
    found = answers(llm, prompts, new_tokens)
    return Plain(found, [sequence_logits(llm, text).cpu() for text in _texts(found)])


def compared(reference: LLM, found: Mapping[str, Answers], beside: Plain, new_tokens: int) -> dict[str, Any]:
    """For each drafter and way, how many answers are those of plain decoding, and of the others how many part by which
    margin (`partings`); the reference is an engine in float32 without speculation.

    Drafters among each other run the same passes, but their rows end at other times, so that batches, and with them
    roundings, may differ too.
    """
    judge = Judge(reference, off_by(reference, beside.texts, beside.logits))
    first = next(iter(found.values()))
    figures: dict[str, Any] = {"rounding_moves_a_logit_by": round(judge.unit, 5)}
    for name, said in found.items():
        figures[name] = {}
        for way, params in ways(new_tokens).items():
            some, wanted = said[way], beside.answers[way]
            figures[name][way] = {
                "same_answers": round(_num_alike(some, wanted) / len(some), 4),
                "margins_of_others": judge.margins(some, wanted, params),
                "unlike_the_first_drafter": len(some) - _num_alike(some, first[way]),
            }
    return figures


def _num_alike(some: Sequence[Completion], others: Sequence[Completion]) -> int:
    return sum(parting(one, other) is None for one, other in zip(some, others, strict=True))
