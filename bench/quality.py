"""Quality with graphs on and off, by backend: perplexity of a text, and greedy answers that are the same to the token.

Run: python bench/quality.py wikitext2_test.txt gsm8k_test.jsonl [--model DIR] [--device cuda] [--dtype bfloat16]
Prompts are scored, and answers given, as a server does it: in batches, through the recordings of each backend. Where an
answer is another one than without graphs, what counts is by how much the token was ahead of the next likeliest where
the two part: rounding may turn a near tie, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch

from phonograph.engine.completion import Completion
from phonograph.engine.llm import LLM
from phonograph.engine.options import DTYPES, EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.graphs.planning.settings import ask

WINDOW = 512
PRECISIONS = {str(dtype).rpartition(".")[2]: dtype for dtype in DTYPES}
PLANS = {
    "disabled": {"backend": "disabled"},
    "full": {"backend": "full"},
    "breakable": {"backend": "breakable"},
    "tc_piecewise eager": {"backend": "tc_piecewise", "tc_compiler": "eager"},
    "tc_piecewise inductor": {"backend": "tc_piecewise", "tc_compiler": "inductor"},
}
"""The first is what the others are compared with."""


@dataclass(frozen=True)
class Workload:
    """What is scored and asked."""

    text: str
    num_tokens: int
    questions: Sequence[str]
    answer_tokens: int


def opened(plan: dict[str, str], args: argparse.Namespace) -> LLM:
    asked = [ask(f"{phase}.backend", plan["backend"], origin="bench") for phase in ("decode", "prefill")]
    if "tc_compiler" in plan:
        asked.append(ask("tc_compiler", plan["tc_compiler"], origin="bench"))
    options = EngineOptions(dtype=PRECISIONS[args.dtype] if args.dtype else None, **args.options)
    return LLM(args.model, device=args.device, options=options, asked=asked)


def perplexity(llm: LLM, work: Workload) -> tuple[float, int]:
    """Over windows of 512 tokens, each scored without its first; and how many were scored."""
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode(work.text)[: work.num_tokens]
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - 1, WINDOW)]
    found = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
    scores = [one.logprob for done in found for one in done.prompt_logprobs]
    return math.exp(-math.fsum(scores) / len(scores)), len(scores)


def answers(llm: LLM, work: Workload) -> list[Completion]:
    template = llm.checkpoint.chat_template()
    assert llm.tokenizer is not None
    rendered = [template.render([{"role": "user", "content": question}]) for question in work.questions]
    prompts = [llm.tokenizer.encode(text, add_special=False) for text in rendered]
    return llm.generate(prompts, SamplingParams(max_tokens=work.answer_tokens, temperature=0.0, logprobs=2))


def beside(found: Sequence[Completion], wanted: Sequence[Completion]) -> dict[str, Any]:
    """How many answers are the same; of the others, how far the tokens that part them were ahead, in nats."""
    margins = [margin for one, other in zip(found, wanted, strict=True) if (margin := parting(one, other)) is not None]
    same = 1 - len(margins) / len(wanted)
    return {"same_answers": round(same, 4), "margins": sorted(round(margin, 4) for margin in margins)}


def parting(found: Completion, wanted: Completion) -> float | None:
    """The margin of the wanted token where the other answer parts from it; None where it does not."""
    for token, other, score in zip(found.tokens, wanted.tokens, wanted.logprobs, strict=False):
        if token != other:
            return score.top[0][1] - score.top[1][1]
    return None if len(found.tokens) == len(wanted.tokens) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, such as the test part of WikiText-2")
    parser.add_argument("questions", type=Path, help="lines of JSON with a `question`, such as those of GSM8K")
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=PRECISIONS)
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as JSON")
    parser.add_argument("--only", nargs="*", choices=PLANS, default=list(PLANS))
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    lines = args.questions.read_text().splitlines()[: args.num_questions]
    questions = [json.loads(line)["question"] for line in lines]
    work = Workload(args.text.read_text(), args.tokens, questions, args.answer_tokens)
    figures: dict[str, Any] = {"dtype": args.dtype, "questions": len(questions)}
    first: list[Completion] | None = None
    for name in dict.fromkeys(["disabled", *args.only]):
        begin, llm = time.perf_counter(), opened(PLANS[name], args)
        value, count = perplexity(llm, work)
        given = answers(llm, work)
        first = given if first is None else first
        eager = {phase: runner.stats.eager.total() for phase, runner in llm.executor.runners.items()}
        figures[name] = {"perplexity": round(value, 5), "scored": count, **beside(given, first), "eager_steps": eager}
        print(f"{name:<22} {time.perf_counter() - begin:6.1f} s  {figures[name]}", flush=True)
        del llm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    kind = torch.device("cpu" if args.device == "emulated" else args.device).type
    print(report.write(f"quality_{kind}", figures, args.out))


if __name__ == "__main__":
    main()
