"""`phonograph bench serve`: a load test of any OpenAI endpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phonograph import interrupts
from phonograph.errors import PlanError

if TYPE_CHECKING:
    from phonograph.bench.serving.run import LoadTest
    from phonograph.bench.serving.summary import Summary
    from phonograph.bench.workloads import PromptKind, Workload

_LAG = 0.01
"""Seconds: from here on the client's own lag is worth a warning."""


def add_command(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `serve` to the commands of `phonograph bench`."""
    text = "put load on an OpenAI endpoint: throughput, time to first token, inter-token latency"
    parser = subparsers.add_parser("serve", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(benchmark=run)
    where = parser.add_argument_group("endpoint")
    where.add_argument("--url", default="http://127.0.0.1:8000", help="where it is, with or without /v1")
    where.add_argument("--model", help="default: the first that the endpoint lists")
    where.add_argument(
        "--api", choices=("completions", "chat"), default="completions", help="the route; chat takes text only"
    )
    where.add_argument("--api-key", default="", help="the key, or @FILE to read it from a file")
    where.add_argument("--timeout", type=_positive, default=600.0, help="seconds for one request (default 600)")
    what = parser.add_argument_group("requests")
    what.add_argument("--num-requests", type=_count, help="default 100; 256 for w1")
    what.add_argument("--rate", type=_rate, default=math.inf, help="requests a second, Poisson; inf: all at once")
    what.add_argument("--concurrency", type=_count, help="requests at the same time, at most")
    what.add_argument(
        "--workload",
        choices=("mix", "w1"),
        default="mix",
        help="mix: log-normal lengths, mean 220 in and 190 out; w1: 256 prompts of 32 to 511 token ids, 128 out",
    )
    what.add_argument("--prompt-len", help="tokens of a prompt: 256, 32-512 or lognormal:220")
    what.add_argument("--output-len", help="tokens of an output, in the same words")
    what.add_argument("--prompts", choices=("ids", "text"), help="default: token ids where they are taken, else text")
    what.add_argument("--vocab", type=_count, help="draw token ids below this; default 1000, and 150000 for w1")
    what.add_argument("--temperature", type=float, default=0.0, help="of every request; 0 is greedy")
    what.add_argument("--seed", type=int, default=7, help="the same seed sends the same requests at the same times")
    what.add_argument("--warmup", type=_count_or_none, default=0, help="requests that are sent first, and not measured")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, help="write figures and every request to this file")
    out.add_argument("--plot", type=Path, help="draw to this .svg or .png file")
    out.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Run the test; status 1 if no request was completed."""
    try:
        from phonograph.bench.serving.summary import HOW_ITL, summarise, table
    except ImportError as error:
        raise PlanError(f"bench serve needs {error.name}. Run: pip install 'phonograph[bench]'") from None
    _check_files(args)
    with interrupts.left_to_asyncio():
        test = asyncio.run(_run(args))
    summary = summarise(test.outcomes)
    print(_heading(args, test))
    print(table(summary))
    print()
    for note in (HOW_ITL, *_notes(args, test, summary)):
        print(f"* {note}")
    if args.json:
        args.json.write_text(json.dumps(_as_json(args, test, summary), indent=1) + "\n")
    if args.plot:
        from phonograph.bench.serving.plot import draw

        draw(test.outcomes, summary, _heading(args, test).splitlines()[0], args.plot)
    return 0 if summary.completed else 1


def _check_files(args: argparse.Namespace) -> None:
    """Raise now what would otherwise be lost after the test."""
    if args.json and not args.json.parent.is_dir():
        raise PlanError(f"--json {args.json}: the folder {args.json.parent} does not exist.")
    if args.plot:
        from phonograph.bench.drawing import check_plot

        check_plot(args.plot)


async def _run(args: argparse.Namespace) -> LoadTest:
    from phonograph.bench.serving.client import Endpoint, find_dialect, first_model, new_session
    from phonograph.bench.serving.run import LoadTest
    from phonograph.bench.workloads import jobs

    workload = _workload(args)
    url = args.url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    key = _key(args.api_key)
    model = args.model or await first_model(url, key)
    endpoint = Endpoint(url, model, args.api, args.temperature, key, args.timeout)
    async with new_session() as session:
        kinds = _prompt_kinds(args, workload)
        endpoint = await find_dialect(session, endpoint, kinds, workload.highest_id(args.vocab))
    number = args.num_requests or (256 if workload.is_w1 else 100)
    if args.warmup:
        first = jobs(workload, math.inf, args.seed + 100, args.vocab)
        await LoadTest(endpoint, list(islice(first, args.warmup)), args.concurrency).run(shows_progress=False)
    measured = jobs(workload, args.rate, args.seed, args.vocab)
    test = LoadTest(endpoint, list(islice(measured, number)), args.concurrency)
    shows_progress = not args.quiet and sys.stderr.isatty()
    await test.run(shows_progress=shows_progress)
    if shows_progress:
        print(f"\r{'':<78}\r", end="", file=sys.stderr)
    return test


def _workload(args: argparse.Namespace) -> Workload:
    from phonograph.bench.workloads import WORKLOADS, lengths_from

    workload = WORKLOADS[args.workload]
    if args.prompt_len:
        workload = replace(workload, prompt=lengths_from(args.prompt_len), is_w1=False)
    if args.output_len:
        workload = replace(workload, output=lengths_from(args.output_len))
    return workload


def _prompt_kinds(args: argparse.Namespace, workload: Workload) -> Sequence[PromptKind]:
    """What prompts may be, best first."""
    if args.api == "chat":
        if args.prompts == "ids":
            raise PlanError("--prompts ids: the chat API takes text only. Use --api completions.")
        return ("text",)
    if args.prompts:
        return (args.prompts,)
    return ("ids",) if workload.is_w1 else ("ids", "text")


def _key(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text().strip()
    except OSError as error:
        raise PlanError(f"--api-key {text}: {error.strerror}. Name a file with a key, or give the key.") from None


def _heading(args: argparse.Namespace, test: LoadTest) -> str:
    endpoint, workload = test.endpoint, _workload(args)
    rate = f"{args.rate:g} requests/s (Poisson)" if math.isfinite(args.rate) else "all at once"
    limit = f", at most {args.concurrency} at a time" if args.concurrency else ""
    prompts = "token ids" if endpoint.dialect.prompts == "ids" else "text"
    return (
        f"{endpoint.model} at {endpoint.url}: {len(test.jobs):,} requests, {rate}{limit}\n"
        f"prompts {workload.prompt} ({prompts}), outputs {workload.output} tokens, seed {args.seed}\n"
    )


def _notes(args: argparse.Namespace, test: LoadTest, summary: Summary) -> list[str]:
    from phonograph.bench.serving.summary import latency_summary, shown

    notes = []
    if test.is_interrupted:
        notes.append(f"interrupted: {len(test.outcomes):,} of {len(test.jobs):,} requests had ended")
    if not test.endpoint.dialect.ignores_eos:
        notes.append("the endpoint does not take ignore_eos: outputs may end before the requested length")
    if summary.counts_events:
        notes.append("the endpoint reports no usage: events were counted as tokens")
    if summary.without_text:
        notes.append(f"{summary.without_text:,} responses had tokens and no text: whatever events they had were timed")
    lag = latency_summary(test.lags)
    if lag is not None and lag.p99 > _LAG:
        notes.append(f"this client was busy itself (its event loop was {shown(lag.p99)} late, p99): run it elsewhere")
    if math.isfinite(args.rate) and not args.concurrency and summary.late > _LAG:
        notes.append(f"requests left this client up to {shown(summary.late)} late (p99)")
    return notes


def _as_json(args: argparse.Namespace, test: LoadTest, summary: Summary) -> dict[str, object]:
    endpoint, workload = test.endpoint, _workload(args)
    return {
        "endpoint": {"url": endpoint.url, "model": endpoint.model, "api": endpoint.api},
        "workload": {
            "requests": len(test.jobs),
            "rate": args.rate if math.isfinite(args.rate) else "inf",
            "concurrency": args.concurrency,
            "prompt_len": str(workload.prompt),
            "output_len": str(workload.output),
            "prompts": endpoint.dialect.prompts,
            "ignore_eos": endpoint.dialect.ignores_eos,
            "temperature": args.temperature,
            "seed": args.seed,
        },
        "notes": _notes(args, test, summary),
        "summary": summary.as_json(),
        "requests": [
            {
                "due": round(one.due, 6),
                "sent": round(one.sent, 6),
                "first_token": round(one.arrivals[0][0], 6) if one.arrivals else None,
                "end": round(one.end, 6),
                "prompt_tokens": one.prompt_tokens,
                "output_tokens": one.output_tokens,
                "error": one.error,
            }
            for one in test.outcomes
        ],
    }


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count_or_none(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0, or inf")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError("must be above 0")
    return value
