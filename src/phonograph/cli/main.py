"""`phonograph`: generate, chat and explain from the command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phonograph.cli import bench
from phonograph.errors import PhonographError
from phonograph.graphs.flags import add_flags, asked_from

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM, Completion
    from phonograph.engine.request import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except PhonographError as error:
        print(f"phonograph: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phonograph", allow_abbrev=False, description="Records an LLM's forward pass once and replays it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("generate", _generate, "complete a prompt"),
        ("chat", _chat, "talk to the model"),
        ("explain", _explain, "print the plan without loading weights"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        _add_engine_flags(command)
        if name != "explain":
            _add_sampling_flags(command)
        if name == "generate":
            command.add_argument("--prompt", required=True, help="the text to complete")
            command.add_argument("--chat", action="store_true", help="render the prompt with the model's chat template")
            command.add_argument("--json", action="store_true", help="print the result as JSON")
            command.add_argument("--report", action="store_true", help="say what ran: model, plan, graphs, speed")
        add_flags(command)
    measured = commands.add_parser("bench", help=bench.HELP, description=bench.HELP, allow_abbrev=False)
    bench.add_flags(measured)
    measured.set_defaults(run=bench.run)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a checkpoint folder or GGUF file; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--shape", help="random weights of a named shape instead of a model, e.g. qwen3-8b")
    parser.add_argument("--device", help="cuda, cpu or emulated; default: the accelerator present, else the CPU")
    parser.add_argument("--max-seqs", type=int, help="sequences that run at the same time; default: by memory")
    parser.add_argument("--max-len", type=int, help="the longest sequence, prompt and answer together")


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0 for all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this mass")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="leave out tokens less likely than this share of the best"
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same tokens")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")


def _params(args: argparse.Namespace) -> SamplingParams:
    from phonograph.engine.request import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
    )


def _open(args: argparse.Namespace) -> LLM:
    from phonograph.engine.checkpoints.random import RandomCheckpoint
    from phonograph.engine.llm import LLM
    from phonograph.engine.models.config import SHAPES
    from phonograph.engine.options import EngineOptions
    from phonograph.errors import PlanError
    from phonograph.graphs.progress import bar

    model = args.model
    if args.shape:
        if args.shape not in SHAPES:
            raise PlanError(f"--shape {args.shape!r} is unknown (known: {', '.join(SHAPES)}).")
        model = RandomCheckpoint(SHAPES[args.shape])
    options = EngineOptions(max_seqs=args.max_seqs, max_len=args.max_len)
    return LLM(model, device=args.device, options=options, asked=asked_from(args), progress=bar())


def _generate(args: argparse.Namespace) -> int:
    params = _params(args)
    begin = time.perf_counter()
    llm = _open(args)
    loaded = time.perf_counter()
    prompt = [{"role": "user", "content": args.prompt}]
    done = llm.chat(prompt, params) if args.chat else llm.generate(args.prompt, params)[0]
    seconds = time.perf_counter() - loaded
    if args.json:
        print(json.dumps(_as_json(done, seconds)))
    else:
        print(done.text)
    if args.report:
        print(_report(llm, done, loaded - begin, seconds))
    return 0


def _as_json(done: Completion, seconds: float) -> dict[str, object]:
    return {
        "text": done.text,
        "tokens": done.tokens,
        "prompt_tokens": len(done.prompt),
        "finish": done.finish.value if done.finish else None,
        "seconds": round(seconds, 4),
    }


def _report(llm: LLM, done: Completion, load_seconds: float, seconds: float) -> str:
    config = llm.checkpoint.config
    dtype = str(llm.executor.cache.keys.dtype).removeprefix("torch.")
    return "\n".join(
        [
            "",
            f"model   {llm.checkpoint.source}: {config.architecture}, {config.num_layers} layers, {dtype}",
            f"device  {llm.device.name} ({llm.device.torch_device}); KV cache {llm.limits.capacity:,} tokens",
            f"speed   {len(done.prompt)} prompt tokens, {len(done.tokens)} new in {seconds:.2f} s "
            f"({len(done.tokens) / seconds:.1f} tokens/s); load and capture {load_seconds:.1f} s",
            "",
            llm.explain(),
        ]
    )


def _chat(args: argparse.Namespace) -> int:
    params = _params(args)
    llm = _open(args)
    print("Type a message; an empty line or Ctrl-D ends.", file=sys.stderr)
    messages: list[dict[str, object]] = []
    while True:
        try:
            said = input("> ")
        except EOFError:
            return 0
        if not said.strip():
            return 0
        messages.append({"role": "user", "content": said})
        answer = ""
        for text in llm.stream_chat(messages, params):
            answer += text
            print(text, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


def _explain(args: argparse.Namespace) -> int:
    from phonograph.devices import open_device
    from phonograph.engine.sizing import plan_for

    device = open_device(args.device)
    print(plan_for(device, asked_from(args), on_cpu_by_default=args.device in (None, "cpu")).explain())
    return 0


if __name__ == "__main__":
    sys.exit(main())
