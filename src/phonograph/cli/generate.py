"""`phonograph generate`: complete a prompt."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from phonograph.cli.flags import add_engine_flags, add_sampling_flags, arguments_from, greedy_by_default, params_from
from phonograph.graphs.progress import bar

if TYPE_CHECKING:
    from phonograph.engine.completion import Completion
    from phonograph.engine.llm import LLM

HELP = "complete a prompt"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--prompt", required=True, help="the text to complete")
    parser.add_argument("--chat", action="store_true", help="render the prompt with the model's chat template")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--report", action="store_true", help="report what ran: model, plan, graphs, speed")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the completion, and a report if asked."""
    params = params_from(args)
    begin = time.perf_counter()
    llm = arguments_from(args).open(bar())
    loaded = time.perf_counter()
    params = greedy_by_default(params, llm.sampling)
    prompt = [{"role": "user", "content": args.prompt}]
    done = llm.chat(prompt, params) if args.chat else llm.generate(args.prompt, params)[0]
    seconds = time.perf_counter() - loaded
    if args.json:
        print(json.dumps(_as_json(done, seconds)))
    else:
        print(done.text)
    if args.report:
        print(_report(llm, done, loaded - begin, seconds), file=sys.stderr if args.json else sys.stdout)
    if done.error:
        print(f"phonograph: {done.error}", file=sys.stderr)
    return 1 if done.error else 0


def _as_json(done: Completion, seconds: float) -> dict[str, object]:
    return {
        "text": done.text,
        "tokens": done.tokens,
        "prompt_tokens": len(done.prompt),
        "finish": done.finish.value if done.finish else None,
        "error": done.error,
        "seconds": round(seconds, 4),
    }


def _report(llm: LLM, done: Completion, load_seconds: float, seconds: float) -> str:
    config = llm.checkpoint.config
    dtype = str(llm.executor.model.dtype).removeprefix("torch.")
    return "\n".join(
        [
            "",
            f"model   {llm.checkpoint.source}: {config.architecture}, {config.num_layers} layers, {dtype}",
            f"device  {llm.where}; KV cache {llm.limits.capacity:,} tokens",
            f"speed   {len(done.prompt)} prompt tokens, {len(done.tokens)} new in {seconds:.2f} s "
            f"({len(done.tokens) / seconds:.1f} tokens/s); load and capture {load_seconds:.1f} s",
            "",
            llm.explain(),
        ]
    )
